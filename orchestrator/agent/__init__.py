"""One agent per node: it owns the node's workers, and the agents decide together who trains."""
