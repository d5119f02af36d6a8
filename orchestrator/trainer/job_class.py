"""A job's class: import and call it, and tell its framework."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from orchestrator.config.job_source import refuse_arguments
from orchestrator.errors import JobError
from orchestrator.job import REQUIRED_METHODS, Job, is_coupled
from orchestrator.plugins import FRAMEWORKS


def build_job(settings: Mapping[str, Any]) -> Job:
    """Import the class that `job._target_` names and call it. Raises `JobError`."""
    dotted = str(settings["_target_"])
    module, _, name = dotted.rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise JobError(f"job._target_={dotted}: {error}") from error
    except AttributeError as error:
        raise JobError(f"job._target_={dotted}: {module} has no '{name}'") from error
    if not isinstance(target, type):
        raise JobError(f"job._target_={dotted} must be a class, but is a {type(target).__name__}")
    missing = [
        name
        for name in REQUIRED_METHODS
        if not callable(getattr(target, name, None)) or getattr(target, name) is getattr(Job, name)
    ]
    if missing == ["loss"] and is_coupled(target):
        missing = []
    if missing:
        raise JobError(
            f"job._target_={dotted} is not a job: it has no {' and no '.join(missing)} "
            f"(see docs/tutorial/your-own-job.md)"
        )
    arguments = {key: value for key, value in settings.items() if key != "_target_"}
    try:
        known = inspect.signature(target).parameters.values()
    except ValueError:  # a class implemented in C has none
        return target(**arguments)
    required = {
        p.name: p.default is p.empty
        for p in known
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known)
    refuse_arguments(dotted, arguments, required, takes_any=takes_any)
    return target(**arguments)


def framework_of(job: Job) -> str:
    """Return the framework that the job is written for. Raise `JobError` if there is none."""
    own = getattr(job, "framework", "torch")
    if refusal := FRAMEWORKS.refusal(own):
        raise JobError(refusal.replace(FRAMEWORKS.key, f"{type(job).__name__}.framework", 1))
    return own
