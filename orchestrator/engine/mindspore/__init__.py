"""The MindSpore engine: groups without `msrun`, differentiable collectives, the accumulator."""

from __future__ import annotations

from orchestrator.engine.mindspore.building import build_engine, versions
from orchestrator.engine.mindspore.forming import form_group

__all__ = ["build_engine", "form_group", "versions"]
