"""An optimizer in shards: each rank keeps and steps its own part."""
