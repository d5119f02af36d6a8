"""A rank that runs a program as it is: a small parent does all that a rank does beside training."""
