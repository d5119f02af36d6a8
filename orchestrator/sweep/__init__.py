"""Sweeps and searches: points, tasks and where they run."""
