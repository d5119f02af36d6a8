"""The points of a sweep: checked, run where that is left to do, and compared."""
