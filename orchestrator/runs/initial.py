"""The beginning of a new run from another one: its weights (`train.initial_weights`), or a branch,
the whole state of a checkpoint (`train.initial_state`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
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
    weights_of,
)
from orchestrator.rundir.folder import BRANCH, INITIAL_DIGEST, RunDir
from orchestrator.runs.recorded import plan_of_run


def initial_weights(config: Config) -> Path | None:
    """Return the weights file: the one that is named, or the newest valid one of a run.

    Raises:
        ConfigError: there is none, or it is no safetensors file.
    """
    reference = config.train.initial_weights
    if reference is None:
        return None
    from orchestrator.rundir.tensors import SafetensorsFile  # NumPy, if it is needed

    try:
        path, (folder, which) = expand_user(reference), split_reference(reference)
        if which is not None and not path.exists():
            run = RunDir(expand_user(folder)).existing()
            path = weights_of(kept_checkpoint(run, which))
        elif path.is_dir():
            run = RunDir(path).existing()
            checkpoint, _ = newest(run.checkpoints, run.identity)
            if checkpoint is None:
                raise RunFolderError("that run has no weights yet: no sound checkpoint was written")
            path = weights_of(checkpoint.folder)
        if not SafetensorsFile(path).tensors:
            raise RunFolderError(f"{path} holds no tensors")
    except (UsageError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"train.initial_weights={reference}: {why}") from error
    return path


def keep_initial_weights(config: Config, run: RunDir) -> dict[str, str]:
    """Copy the file into the new run's folder, so that the run does not depend on it.

    Returns:
        The copy's digest, for submission.json; nothing where no weights are asked for.
    """
    path = initial_weights(config)
    if path is None:
        return {}
    from orchestrator.rundir.tensors import SafetensorsFile  # NumPy, if it is needed

    if path.is_dir():
        SafetensorsFile(path).write(run.initial_weights)
    else:
        shutil.copyfile(path, run.initial_weights)
    run.initial_weights.chmod(0o600)
    return {INITIAL_DIGEST: file_sha256(run.initial_weights)}


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
