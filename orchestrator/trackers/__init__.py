"""Trackers besides the default: MLflow and Weights & Biases, each by its own package."""
