"""What a rank does beside training: signs of life, the fence, leaving in time."""
