"""What has to hold when an accumulator or engine is built: of its arguments, and on all ranks."""
