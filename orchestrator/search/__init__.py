"""`sweep.search`: points of a sweep that Optuna chooses from the results so far."""
