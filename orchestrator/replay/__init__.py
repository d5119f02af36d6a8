"""An add-on: recompute any recorded update of a run, and find what made it.

A replay is a run of its own, in a folder of its own that is removed: a copy of the run as it was at
a checkpoint, resumed on one process with a callback that writes down each micro-step. Nothing else
imports this folder; without it all other commands work.
"""
