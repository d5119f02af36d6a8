"""Branches: the state of another run's checkpoint, in a new run (`train.initial_state`)."""

from __future__ import annotations

import shutil
from typing import Any, Literal

from orchestrator.config.program import is_program
from orchestrator.config.reading import read_config
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, RunFolderError, UsageError, expand_user
from orchestrator.plan.order import INITIAL_STATE, Branch, Shards
from orchestrator.plan.plan import Plan
from orchestrator.rundir.checkpoints import (
    STATE,
    file_sha256,
    kept_checkpoint,
    load,
    newest,
    split_reference,
    updates_after,
)
from orchestrator.rundir.folder import BRANCH, RunDir
from orchestrator.runs.resume import plan_of_run


def branch_of(config: Config) -> Branch | None:
    """Return the checkpoint at which a new run is to begin, and its place in the data.

    Raises:
        ConfigError: there is none, or no place in its data is known.
    """
    reference = config.train.initial_state
    if reference is None:
        return None
    try:
        return _branch(*split_reference(reference))
    except UsageError as error:
        raise ConfigError(f"{INITIAL_STATE}={reference}: {error}") from error


def _branch(folder: str, which: int | Literal["best"] | None) -> Branch:
    run = RunDir(expand_user(folder)).existing()
    config = read_config(run.read_config())
    if is_program(config.job):
        raise RunFolderError("that run is of a program, whose checkpoints are its own")
    if which is None:
        # The files are checked when they are copied.
        checkpoint, _ = newest(run.checkpoints, run.identity, contents=False)
        if checkpoint is None:
            raise RunFolderError("that run has no checkpoint yet")
        updates = checkpoint.updates
    else:
        updates = updates_after(kept_checkpoint(run, which))
    kept_plan = run.read_plan()
    plan, shards = plan_of_run(config, kept_plan), kept_plan.get("shards")
    if not isinstance(plan, Plan) or plan.length.dataset_samples is None:
        raise RunFolderError(f"{run.plan} does not say how many samples its data set has")
    epoch, position = plan.order.place(updates)
    return Branch(
        run=folder,
        updates=updates,
        epoch=epoch,
        position=position,
        global_batch=plan.order.batch_of(plan.order.updates_before_epoch(epoch)),
        seed=plan.order.seed,
        dataset_samples=plan.length.dataset_samples,
        shards_digest=shards and Shards(tuple(shards["lengths"])).digest,
        lanes=shards and shards["lanes"],
    )


def keep_initial_state(branch: Branch | None, run: RunDir) -> dict[str, Any]:
    """Copy the checkpoint into the new run's folder, so that it does not need the other run.

    Returns:
        For submission.json: the copy's digest, the other run's identity and its optimizer; nothing
        without a branch.

    Raises:
        ConfigError: it is damaged, or was removed in the meantime.
    """
    if branch is None:
        return {}
    other = RunDir(expand_user(branch.run))
    run.initial_state.mkdir(mode=0o700)
    try:
        source = kept_checkpoint(other, branch.updates)
        for path in sorted(source.iterdir()):
            copy = run.initial_state / path.name
            shutil.copyfile(path, copy)
            copy.chmod(0o600)
        load(run.initial_state, other.identity)
        optimizer = (other.read_environment() or {}).get("optimizer")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{INITIAL_STATE}={branch.run}: its checkpoint after update {branch.updates} was "
            "removed while it was copied, since the run saves newer ones; type the same line again"
        ) from error
    except UsageError as error:
        raise ConfigError(f"{INITIAL_STATE}={branch.run}: {error}") from error
    digest = file_sha256(run.initial_state / STATE)
    begun = {"sha256": digest, "identity": other.identity, "optimizer": optimizer}
    return {BRANCH: {"run": branch.run, "updates": branch.updates, **begun}}
