"""What an update boundary comes to: the sums of all ranks, and what they decide."""
