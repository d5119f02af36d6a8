"""Start, resume, follow, inspect and cancel runs: what commands and the Python interface share."""
