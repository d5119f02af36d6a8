"""Random numbers as pure functions of the run's seed and of a place in the data.

A micro-step's numbers depend on (seed, update, start) and nothing else: not on the rank, the number
of ranks, or what was computed before. So dropout repeats after a resume, and in reproducible mode
on any number of ranks.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from orchestrator.engine.seeding import derived_seed

__all__ = ["derived_seed", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, those of all devices included.

    Args:
        seed: 64 bits. NumPy's legacy generator takes them as two words.
    """
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # what users' code draws from
    torch.manual_seed(seed)
