"""What is looked at in every window."""
