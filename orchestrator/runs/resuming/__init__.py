"""Going on with a run: what may change, from which weights, and whose run it is."""
