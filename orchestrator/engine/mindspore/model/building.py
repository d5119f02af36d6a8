"""A job's model, built alike on every rank, and that it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import mindspore as ms
import numpy as np
from mindspore import nn

from orchestrator.engine.common.seeding import derived_seed
from orchestrator.engine.mindspore.model.batch_norms import with_norms
from orchestrator.engine.settings import EngineSettings
from orchestrator.errors import JobError
from orchestrator.job import Job

SEED_BITS = 0x7FFFFFFF
DIGEST_NUMBERS, DIGEST_DIGITS = 4, 12  # 48 bits each, which a float64 carries exactly


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and MindSpore's generators."""
    random.seed(seed)
    ms.set_seed(seed & SEED_BITS)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # users' code draws from it


def built_model(job: Job, settings: EngineSettings) -> tuple[nn.Cell, list[str]]:
    """The job's model from the run's seed, and what to know of its norms.

    Raises:
        JobError: `model()` gives none.
    """
    seed_everything(derived_seed("model", settings.seed))
    model = job.model()
    if not isinstance(model, nn.Cell):
        raise JobError(f"model() must give a mindspore.nn.Cell, but gives {type(model).__name__}")
    if settings.precision == "float64":
        for parameter in model.get_parameters():
            parameter.set_dtype(ms.float64)
    model, told = with_norms(model, settings.norm)
    model.set_train()
    return model, told


def check_same_weights(sha256: str, gather: Callable[[Sequence[float]], list[list[float]]]) -> None:
    """Check that all ranks start with the same bits. Collective.

    Raises:
        JobError: on all ranks alike, naming those that differ from rank 0.
    """
    numbers = [
        float(int(sha256[n * DIGEST_DIGITS : (n + 1) * DIGEST_DIGITS], 16))
        for n in range(DIGEST_NUMBERS)
    ]
    rows = gather(numbers)
    odd = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if odd:
        raise JobError(
            f"model() does not give the same weights on every rank: ranks "
            f"{', '.join(map(str, odd))} differ from rank 0. It must depend on nothing but the "
            f"job's arguments and the random seed"
        )
