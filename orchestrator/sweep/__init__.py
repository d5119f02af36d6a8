"""Sweeps and searches: points, cells and where they run."""
