"""Sweeps: points, tasks and where they run."""
