"""`report`: a page about runs and sweeps, and their records as CSV or JSON."""
