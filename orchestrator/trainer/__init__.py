"""The trainer of job classes, and the parent of programs: a worker's main functions."""
