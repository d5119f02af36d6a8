"""Many small runs in one allocation, each on its share of every node of it (`sweep.pack`)."""
