"""Start a run, or start it again, and follow it: the one path from a `Config` to an `Ended`.

Everything that can be refused is refused before the run folder exists.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.config import Config, read_config, to_yaml
from orchestrator.engine_rules import refuse_unsupported
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    RunFailed,
    RunFolderError,
    TransportError,
    UsageError,
)
from orchestrator.plan.from_config import plan_of
from orchestrator.plan.plan import Plan
from orchestrator.report.closing import print_closing
from orchestrator.report.metrics import Tail, read_metrics
from orchestrator.report.progress import Progress
from orchestrator.report.terminal import say
from orchestrator.rundir import RunDir, write_atomically, write_json
from orchestrator.submit.api import Cluster, Culprit, Handle, State
from orchestrator.submit.ending import write_end
from orchestrator.submit.interrupts import Interrupts
from orchestrator.submit.local import LocalCluster, visible_gpus
from orchestrator.submit.manner import Manner
from orchestrator.target import check_target
from orchestrator.worker.progress import read_progress

POLL_S = 0.1
DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ENOENT, errno.ENOTDIR,
)  # fmt: skip
EXIT_CODES = {
    State.FINISHED: EXIT_FINISHED,
    State.FAILED: EXIT_FAILED,
    State.STOPPED: EXIT_STOPPED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a followed run ended."""

    run: RunDir
    state: State
    exit_code: int
    culprit: Culprit | None = None


def cluster_for(config: Config) -> Cluster:
    """The implementation of `cluster.kind`."""
    if config.cluster.kind == "slurm":
        from orchestrator.submit.slurm import SlurmCluster

        return SlurmCluster(config)
    return LocalCluster()


def prepare(config: Config) -> Plan:
    """Everything that can be said before anything is written. Raises `UsageError`."""
    facts = check_target(config.job)
    refuse_unsupported(config, facts.framework, coupled=bool(facts.coupled))
    plan = plan_of(config, metric_count=facts.metric_count or 0, coupled=facts.coupled)
    if config.cluster.kind == "local" and config.transport == "nccl":
        gpus = len(visible_gpus(os.environ))
        if gpus < plan.ranks:
            raise TransportError(
                f"transport=nccl needs a GPU for each of the {plan.ranks} ranks, but this machine "
                f"has {gpus}; try transport=gloo"
            )
    return plan


def new_folder(config: Config) -> Path:
    """Where a new run goes: `run.dir`, or a folder of its own below `runs/`."""
    if config.run.dir:
        return Path(os.path.abspath(Path(config.run.dir).expanduser()))  # noqa: PTH100  # keeps links
    name = config.run.name or str(config.job["_target_"]).rpartition(".")[2].lower()
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    stamp = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    base = Path.cwd() / "runs" / f"{stamp}_{safe}"
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{base.name}_{number}")
    return candidate


@contextlib.contextmanager
def writing(run: RunDir) -> Generator[None]:
    """Put a disk's refusals (full, read-only) into a message.

    Raises:
        RunFolderError: nothing was trained yet. RunFailed: something was.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        sentence = f"{run.path} cannot be written: {error.strerror}"
        if run.metrics.exists():
            raise RunFailed(
                f"{sentence}; the last good checkpoint is kept, to resume from"
            ) from error
        raise RunFolderError(sentence) from error


@contextlib.contextmanager
def held(run: RunDir) -> Generator[None]:
    """Hold the run for this launcher alone. Raises `RunFolderError` while another one does."""
    descriptor = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode() or "another process"
        os.close(descriptor)
        raise RunFolderError(
            f"{run.path} is in progress (process {holder}); stop that one first"
        ) from None
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


def start(config: Config, manner: Manner, *, overrides: Sequence[str] = ()) -> Ended:
    """Start a new run, and follow it to its end unless it goes on without us."""
    plan = prepare(config)
    run = RunDir(new_folder(config))
    detached = _detached(config)
    verdict = detached.check(config, run, manner) if detached else None
    with Interrupts() as interrupts:
        fresh = not run.path.exists()
        run.create()
        for sentence in () if manner.quiet else plan.warnings:
            say(manner.console, f"warning: {sentence}", "yellow")
        try:
            with writing(run):
                write_atomically(run.config, to_yaml(config))
                write_json(run.plan, plan.to_json())
                write_json(run.submission, _submission(config, overrides))
                with held(run):
                    if detached:
                        return detached.place(config, run, manner, verdict)
                    return _attempt(config, run, plan.to_json(), manner, interrupts)
        except UsageError:  # before anything was trained; the message says all
            if fresh and not run.metrics.exists() and not run.handle.exists():
                shutil.rmtree(run.path, ignore_errors=True)  # it may be gone already
            raise


def resume(path: Path, manner: Manner) -> Ended:
    """Go on with a run from its newest sound checkpoint, or from the start when it has none."""
    run = RunDir(path).existing()
    config = read_config(run.read_config())
    result = run.read_result()
    if result and result["state"] == "finished":
        say(manner.console, f"{path} has finished already; there is nothing to resume")
        return Ended(run=run, state=State.FINISHED, exit_code=EXIT_FINISHED)
    detached = _detached(config)
    with Interrupts() as interrupts, writing(run), held(run):
        if detached:
            return detached.resume(config, run, manner)
        return _attempt(config, run, run.read_plan(), manner, interrupts)


def _detached(config: Config) -> ModuleType | None:
    """The way of runs that are submitted and left alone; None for those that are held."""
    if config.cluster.kind == "local":
        return None
    from orchestrator.submit import detached

    return detached


def _submission(config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    return {
        "time": time.time(),
        "command": sys.argv,
        "overrides": list(overrides),
        "folder": str(Path.cwd()),
        "cluster": config.cluster.kind,
    }


def _attempt(
    config: Config, run: RunDir, plan: dict[str, Any], manner: Manner, interrupts: Interrupts
) -> Ended:
    attempt = run.begin_attempt()
    tail = Tail(run.metrics)
    tail.read()  # what earlier attempts wrote is not news
    run.result.unlink(missing_ok=True)
    cluster = cluster_for(config)
    handle = cluster.submit(cluster.request(config, run.path, attempt))
    try:
        with Progress(plan, manner.console, manner.quiet, manner.verbose) as progress:
            state, interrupted = _follow(
                handle, run, attempt, tail, plan, progress, interrupts, manner
            )
    except BaseException:
        handle.kill()
        raise
    if state is State.FAILED or interrupted or not run.result.exists():
        _write_end(run, state, handle.culprit, interrupted=interrupted)
    code = EXIT_INTERRUPTED if interrupted else EXIT_CODES[state]
    culprit = handle.culprit
    if culprit is not None and culprit.usage and not run.metrics.exists():
        raise UsageError(culprit.cause)
    if not manner.quiet or state is State.FAILED:
        result = run.read_result() or {}
        print_closing(
            result, read_metrics(run.metrics), run.path, manner.console, plan=run.read_plan()
        )
    return Ended(run=run, state=state, exit_code=code, culprit=culprit)


def _follow(
    handle: Handle,
    run: RunDir,
    attempt: int,
    tail: Tail,
    plan: dict[str, Any],
    progress: Progress,
    interrupts: Interrupts,
    manner: Manner,
) -> tuple[State, bool]:
    """Show the run to its end: one interrupt stops it at a boundary, a second ends it at once."""
    asked = False
    while True:
        state = handle.poll(POLL_S)
        place = read_progress(run.progress(attempt))
        records = tail.rest() if state.ended else tail.read()
        if records and plan.get("dataset_samples") is None:
            plan.update(run.read_plan())  # by now the workers know the data set, and so the length
        progress.update(records, (place.done, place.steps) if place else None)
        if state.ended:
            return state, False
        if interrupts.count and not asked:
            asked = True
            handle.stop()
            say(
                manner.console,
                "stopping at the next update boundary, with a checkpoint; "
                "once more ends every process at once",
                "yellow",
            )
        if interrupts.count > 1:
            handle.kill()
            return State.FAILED, True


def _write_end(run: RunDir, state: State, culprit: Culprit | None, *, interrupted: bool) -> None:
    """Write result.json for a run whose rank 0 could not: it failed, or stopped before it began."""
    cause = "interrupted twice: every process was ended at once"
    if interrupted:
        culprit = Culprit(rank=None, node="launcher", cause=cause)
    write_end(run, state, culprit)
