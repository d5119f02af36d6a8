"""Signs of life and progress of a rank, and how others on and off its node see them."""
