"""A job's model and optimizer, built alike on every rank, and what is looked at before training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.config.optimizer import chosen
from orchestrator.engine.common.hyperparameters import refuse_scheduler
from orchestrator.engine.settings import EngineSettings
from orchestrator.engine.torch import loader
from orchestrator.engine.torch.checks.at_start.loss_trial import loss_warning
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.model.device_and_dtype import doubled
from orchestrator.engine.torch.model.precision import Precision
from orchestrator.engine.torch.optimizers import build_optimizer, usable
from orchestrator.engine.torch.seeds import derived_seed, seed_everything
from orchestrator.errors import JobError
from orchestrator.job import Job


def built_model(job: Job, settings: EngineSettings, device: torch.device) -> Module:
    """The job's model on `device`, from the run's seed. Raises `JobError` when it is none."""
    seed_everything(derived_seed("model", settings.seed))
    model = job.model()
    if not isinstance(model, Module):
        raise JobError(f"model() must give a torch.nn.Module, but gives {type(model).__name__}")
    if settings.precision == "float64":
        model = doubled(model)
    return model.to(device)


def built_optimizer(job: Job, model: Module, settings: EngineSettings) -> Optimizer:
    """The job's own, or the one that the configuration names.

    Raises:
        ConfigError: it cannot be built, or used.
        JobError: a scheduler hangs on it.
    """
    given = getattr(job, "optimizer", lambda _: None)(model)
    own = chosen(given, settings.optimizer, type(job).__name__)
    if own is None:
        return build_optimizer(model, settings.optimizer)
    found = usable(own, f"{type(job).__name__}.optimizer")
    refuse_scheduler(found.param_groups, job)
    return found


def tried_loss(
    job: Job,
    model: Module,
    group: BaseGroup,
    precision: Precision,
    prepare: Callable[[Any], Any],
) -> list[str]:
    """Warn of a loss that is not a sum; on rank 0, whose warnings are shown. Not collective."""
    if group.rank != 0:
        return []
    # A shallow copy, so that what a job counts in its own attributes is not counted here.
    dataset = job.dataset()
    loader.check_dataset(dataset)
    group.silence.keep("while rank 0 tried the loss")
    try:
        return loss_warning(
            copy.copy(job), model, dataset, prepare=prepare, forward=precision.forward
        )
    finally:
        group.silence.end()
