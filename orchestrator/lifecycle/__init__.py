"""What a rank and those who watch it know of its life: signs, stops, checkpoints, the fence."""
