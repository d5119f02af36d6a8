"""Where a run stands and how it ends, by its folder alone."""
