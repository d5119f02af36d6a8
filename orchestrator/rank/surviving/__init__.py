"""Going on without ranks that are gone, and with those that come in their place."""
