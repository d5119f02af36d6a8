"""What `run.windows` checks before it hands anything out: here, and that all ranks agree."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.engine.torch.accumulator import Accumulator, only_accumulator
from orchestrator.engine.torch.model import be_deterministic
from orchestrator.engine.torch.start_checks import check_same_traits
from orchestrator.errors import ConfigError
from orchestrator.inside.run import Run
from orchestrator.own_loop.options import WindowOptions, decided_by, plan_of, whole_number
from orchestrator.own_loop.saved import Saved
from orchestrator.own_loop.windows import Windows
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn_into


def windows_of(run: Run, samples: int, accumulator: Any, told: Mapping[str, Any]) -> Windows:
    """`Run.windows`. Collective.

    Raises:
        ConfigError, TypeError: what was asked for cannot be.
        JobError: it is not the same on all ranks.
    """
    options = WindowOptions.of(told)
    samples = whole_number("samples", samples, least=1)
    accumulators = _listed(accumulator)
    _check_group(run, accumulators)
    group, settings = accumulators[0].group, accumulators[0].options
    plan = plan_of(samples, options, ranks=group.size, reduction=settings.reduction)
    decided = decided_by(samples, options, plan)
    asked = {**decided, "updates": plan.updates, "steps": plan.batch.steps, "first": options.first}
    asked |= {name: getattr(options, name) for name in ("micro_batch", "checkpoint_every")}
    asked |= {"checkpoints": options.checkpoints is not None, "state": sorted(options.state)}
    if group.size > 1:
        check_same_traits(group, [(f"{n} of run.windows()", repr(v)) for n, v in asked.items()])
    if run:
        node = int(os.environ.get("GROUP_RANK", "0"))
        warn_into(RunDir(run.folder).warnings(run.attempt, node), group.rank)
    if settings.reduction == "reproducible":
        be_deterministic()
    saved = _saved(run, accumulators, options, decided)
    return Windows(run, plan, accumulators, options, saved)


def _listed(accumulator: Any) -> list[Accumulator]:
    if accumulator is None:
        accumulator = only_accumulator()
    given = list(accumulator) if isinstance(accumulator, (list, tuple)) else [accumulator]
    if not given or not all(isinstance(one, Accumulator) for one in given):
        raise ConfigError(
            "run.windows(len(data), accumulator): it must be an Accumulator, or a list of those "
            f"that share the windows, but is {accumulator!r:.60}"
        )
    return given


def _check_group(run: Run, accumulators: Sequence[Accumulator]) -> None:
    group = accumulators[0].group
    if any(one.group is not group and one.group.size != group.size for one in accumulators):
        raise ConfigError("accumulators that share windows must be of the same ranks")
    reductions = {one.options.reduction for one in accumulators}
    if len(reductions) > 1:
        raise ConfigError("accumulators that share windows must have the same reduction=")
    if run.ranks is not None and run.ranks != group.size:
        raise ConfigError(
            f"this run has {run.ranks} ranks, but the accumulator's group has {group.size}: each "
            "sample would be computed by several. Call init_process_group() before, and leave the "
            "group out, or give it TorchGroup.wrap(torch.distributed.group.WORLD)"
        )


def _saved(
    run: Run, accumulators: Sequence[Accumulator], options: WindowOptions, decided: dict[str, Any]
) -> Saved | None:
    folder = options.checkpoints
    if folder is None and (not run or options.first is not None):
        return None
    own = run.checkpoint_dir if folder is None else Path(folder)
    return Saved(
        own,
        accumulators,
        run=RunDir(run.folder).identity if run and folder is None else None,
        decided=decided,
        keep=options.keep_checkpoints,
        state=options.state,
    )
