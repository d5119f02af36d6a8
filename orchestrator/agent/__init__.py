"""One agent per simulated node owns its workers; one of the agents coordinates them all."""
