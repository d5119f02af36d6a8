"""What both engines say alike; no framework is imported."""
