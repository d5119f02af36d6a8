"""`Callback` of the loops of ours, and `current_run` for frameworks that have the loop themselves.

Each of these (for the Trainer, Lightning, Accelerate) records figures and progress, stops all ranks
after the same update, has the framework save a checkpoint there, and returns the one to resume
from. Without a run of ours they do nothing. Each is imported with its first use, and its framework
with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.client.for_accelerate import AccelerateUpdates
    from orchestrator.client.for_lightning import LightningCallback
    from orchestrator.client.for_trainer import TrainerCallback
    from orchestrator.client.loop import Callback

__all__ = ["AccelerateUpdates", "Callback", "LightningCallback", "TrainerCallback"]
_HOMES = {
    "AccelerateUpdates": "for_accelerate",
    "Callback": "loop",
    "LightningCallback": "for_lightning",
    "TrainerCallback": "for_trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    value = getattr(importlib.import_module(f"orchestrator.client.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
