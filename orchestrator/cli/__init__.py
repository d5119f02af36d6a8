"""The commands: start, resume, follow, inspect and cancel runs."""
