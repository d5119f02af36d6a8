"""Exact gradient accumulation on many nodes: state a global batch, get provably its update."""

from orchestrator.job import Job, Loss

__version__ = "0.1.0"
__all__ = ["Job", "Loss", "__version__"]
