"""Random numbers as pure functions of the run's seed and of a place in the data.

A micro-step's numbers depend on (seed, update, start) and nothing else: not on the rank, the number
of ranks, or what was computed before. So dropout repeats after a resume, and in reproducible mode
on any number of ranks.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from orchestrator.engine.common.seeding import derived_seed

__all__ = ["derived_seed", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, those of all devices included.

    Args:
        seed: 64 bits. NumPy's legacy generator takes them as two words.
    """
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # what users' code draws from
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """`torch.manual_seed`, to the bit, without its price.

    That seeds every kind of device that torch knows of; for one that nobody uses it keeps the
    stack as text for a message, which reads the size and date of every source file on it: some 30
    file operations a call, several hundred a second in training.
    """
    torch.default_generator.manual_seed(seed)
    if torch.accelerator.is_available():
        device: Any = torch.get_device_module()
        # Of one that has none (Apple's), torch's own way is the one that is known.
        getattr(device, "manual_seed_all", torch.manual_seed)(seed)
