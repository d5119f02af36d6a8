"""The MindSpore engine: groups without `msrun`, differentiable collectives, the accumulator.

MindSpore is imported with the first name that needs it, so that `ahead` can start what takes time
before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from orchestrator.engine.mindspore.rendezvous import ahead

if TYPE_CHECKING:
    from orchestrator.engine.mindspore.engine import build_engine, versions
    from orchestrator.engine.mindspore.group import form_group

__all__ = ["ahead", "build_engine", "form_group", "versions"]
_HOMES = {"build_engine": "engine", "versions": "engine", "form_group": "group"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
