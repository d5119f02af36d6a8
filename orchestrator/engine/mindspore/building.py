"""What the worker asks this package for besides a group: an engine, and the versions behind it."""

from __future__ import annotations

import platform

import mindspore as ms
import numpy as np

from orchestrator.config.frameworks import check_installed
from orchestrator.engine.api import Engine
from orchestrator.engine.mindspore.comm.process_group import MindSporeGroup
from orchestrator.engine.mindspore.engine import MindSporeEngine
from orchestrator.engine.settings import EngineSettings
from orchestrator.errors import ConfigError
from orchestrator.job import Job


def versions() -> dict[str, str]:
    """What decides the bits of a run on this framework's side."""
    return {
        "mindspore": ms.__version__,
        "numpy": np.__version__,
        "device": str(ms.get_context("device_target")),
        "processor": platform.machine(),
    }


def check_settings(settings: EngineSettings) -> None:
    """Raise `ConfigError` for what this engine does not have."""
    if settings.reduction != "fast":
        raise ConfigError(
            f"accumulation.reduction={settings.reduction} is not available with MindSpore; try "
            f"accumulation.reduction=fast (the same ranks give the same bits there, too), or a "
            f"torch job"
        )


def build_engine(job: Job, settings: EngineSettings, group: MindSporeGroup) -> Engine:
    """Build the job's model, the same on every rank, and all that trains it. Collective.

    Raises:
        ConfigError: settings that this engine does not have.
        JobError: `model()` or `dataset()` do not give what the contract says, or replicas differ.
    """
    check_installed("mindspore")
    check_settings(settings)
    if settings.style == "framework":
        from orchestrator.engine.mindspore.framework_style import FrameworkEngine

        if group.size > 1:
            raise ConfigError(
                "engine.style=framework computes on one rank only; try engine.style=own"
            )
        return FrameworkEngine(job, settings, group)
    return MindSporeEngine(job, settings, group)
