"""What runs on each rank: who am I, meet the others, the loop."""
