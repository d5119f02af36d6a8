"""Lifecycle of a rank: signs of life, stops, checkpoints and eviction."""
