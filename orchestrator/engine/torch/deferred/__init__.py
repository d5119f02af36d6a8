"""Windows whose micro-batches need each other: computed at the boundary."""
