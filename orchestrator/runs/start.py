"""Start a run, or start it again, and follow it: the one path from a `Config` to an `Ended`.

Everything that can be refused is refused before the run folder exists.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.clusters.api import State
from orchestrator.config.frameworks import notes
from orchestrator.config.rules import refuse_schedule, refuse_unsupported
from orchestrator.config.job_source import check_target
from orchestrator.config.optimizer_rules import check_builder
from orchestrator.config.program_section import is_program, program_of
from orchestrator.config.program_source import check_program
from orchestrator.config.reading import read_config, to_yaml
from orchestrator.config.schema import Config
from orchestrator.errors import (
    EXIT_FINISHED,
    ConfigError,
    RunFailed,
    RunFolderError,
    TransportError,
    UsageError,
)
from orchestrator.outcome.lock_holder import held
from orchestrator.outcome.run_result import Ended
from orchestrator.plan.parts import Known
from orchestrator.plan.plan import Plan
from orchestrator.plan.program import ProgramPlan, notes_of_program, plan_of_program
from orchestrator.report.metrics import Tail
from orchestrator.report.terminal import command, say
from orchestrator.run_folder.rundir import SEALED, RunDir
from orchestrator.runs.console import Manner
from orchestrator.runs.interrupts import Interrupts
from orchestrator.runs.new_folder import new_folder
from orchestrator.runs.resuming.initial_weights import initial_weights, keep_initial_weights
from orchestrator.runs.resuming.own_runs_only import check_own

DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ENOENT, errno.ENOTDIR,
)  # fmt: skip


def prepare(config: Config, *, new: bool = True) -> Plan | ProgramPlan:
    """Everything that can be said before anything is written. Raises `UsageError`.

    Args:
        new: the run begins; one that goes on has its initial weights in its folder.
    """
    if is_program(config.job):
        check_program(program_of(config.job))
        return plan_of_program(config)
    if new:
        initial_weights(config)
    facts = check_target(config.job)
    refuse_unsupported(config, facts.framework, coupled=bool(facts.coupled))
    check_builder(config.optimizer, str(config.job["_target_"]), own=facts.own_optimizer)
    if facts.own_rate:
        refuse_schedule(str(config.job["_target_"]), config.schedule)
    known = Known(
        own_rate=facts.own_rate,
        metric_count=facts.metric_count or 0,
        framework=facts.framework,
        coupled=facts.coupled,
    )
    plan = Plan.of(config, known)
    if config.cluster.kind == "local" and config.transport == "nccl":
        from orchestrator.clusters.local.cluster import visible_gpus

        gpus = len(visible_gpus(os.environ))
        if gpus < plan.ranks:
            on_cpus = "mccl" if facts.framework == "mindspore" else "gloo"
            raise TransportError(
                f"transport=nccl needs a GPU for each of the {plan.ranks} ranks, but this machine "
                f"has {gpus}; try transport={on_cpus}"
            )
    return plan


def plan_and_notes(config: Config) -> dict[str, Any]:
    """The plan as plan.json has it, and under `notes` what is to be said of it. Raises
    `UsageError`.
    """
    plan = prepare(config)
    if isinstance(plan, ProgramPlan):
        return {**plan.to_json(), "notes": notes_of_program(config)}
    return {**plan.to_json(), "notes": notes(config, check_target(config.job).framework)}


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


def start(config: Config, manner: Manner, *, overrides: Sequence[str] = ()) -> Ended:
    """Start a new run, and follow it to its end unless it goes on without us."""
    plan = prepare(config)
    run = RunDir(new_folder(config))
    way = _way(config)
    verdict = way.check(config, run, manner)
    with Interrupts() as interrupts:
        run.create()
        if config.cluster.slurm_conf is not None:
            from orchestrator.clusters.slurm.trust import remember

            remember(config.cluster.slurm_conf)
        for sentence in () if manner.quiet else plan.warnings:
            say(manner.console, f"warning: {sentence}", "yellow")
        try:
            with writing(run):
                run.write_config(to_yaml(config))
                run.write_own(run.plan, plan.to_json())
                digest = keep_initial_weights(config, run)
                run.write_own(run.submission, _submission(config, overrides) | digest)
                with held(run):
                    return way.place(config, run, manner, interrupts, verdict)
        except UsageError:  # before anything was trained; the message says all
            if not run.metrics.exists() and not run.handle.exists():
                run.withdraw()
            raise


def resume(
    path: Path, manner: Manner, overrides: Sequence[str] = (), config_dir: str | None = None
) -> Ended:
    """Go on with a run from its newest sound checkpoint, or from the start when it has none.

    Args:
        overrides: of its configuration: what leaves its numbers as they are, or more updates.
        config_dir: a folder of the user's own configs, for `cluster=…` among the overrides.
    """
    from orchestrator.runs.resuming.resumption import record, resumption

    run = RunDir(path).existing()
    check_own(run)
    run.check_writable()
    Tail(run.metrics).skip_to_the_end()  # whether it can be read at all
    asked = resumption(run, _config_of(run), overrides, config_dir)
    result = run.read_result()
    if result and result["state"] == "finished" and not (asked.total or 0) > result["updates"]:
        say(manner.console, f"{path} has finished already; there is nothing to resume")
        more = f"to train on: {command('resume', path)} train.updates=…"
        say(manner.console, more, "dim")
        return Ended(run=run, state=State.FINISHED, exit_code=EXIT_FINISHED)
    if not manner.quiet:
        say(manner.console, asked.words, prose=True)
    if asked.warning:
        say(manner.console, f"warning: {asked.warning}", "yellow", prose=True)
    with at_home(run), Interrupts() as interrupts, writing(run), held(run):
        for sentence in () if is_program(asked.config.job) else _of_checkpoints(run, asked.config):
            say(manner.console, f"warning: {sentence}", "yellow")
        if asked.changes:
            prepare(asked.config, new=False)
        _vouch(run, asked.config, typed=any(c.key == "cluster.slurm_conf" for c in asked.changes))
        if run.handle.exists():
            from orchestrator.runs.background import refuse_while_queued

            refuse_while_queued(run)
        note = partial(record, run, asked)
        return _way(asked.config).resume(asked.config, run, manner, interrupts, note)


def _vouch(run: RunDir, config: Config, *, typed: bool) -> None:
    """Use no slurm.conf that only the run folder names; one that was `typed` now is remembered.

    Raises:
        ClusterError: nobody vouches for it. Nothing was submitted.
    """
    conf = config.cluster.slurm_conf
    if conf is not None and config.cluster.kind != "local":
        from orchestrator.clusters.slurm.trust import client_of, remember

        if typed:
            remember(conf)
        client_of(run, conf)


@contextlib.contextmanager
def at_home(run: RunDir) -> Generator[None]:
    """Stand where the run was submitted: its relative paths and modules are meant from there.

    Raises:
        RunFolderError: that folder is gone.
    """
    stood = Path.cwd()
    home = Path(run.read_submission().get("folder") or stood)
    try:
        os.chdir(home)
    except OSError as error:
        raise RunFolderError(
            f"{run.path} was submitted in {home}, where its relative paths and its code are, but "
            f"that folder cannot be entered: {error.strerror}"
        ) from error
    before = list(sys.path)
    sys.path[:] = [str(home) if entry in ("", str(stood)) else entry for entry in before]
    try:
        yield
    finally:
        sys.path[:] = before
        os.chdir(stood)


def _config_of(run: RunDir) -> Config:
    """Raises `RunFolderError` when config.yaml holds what no run was ever started with."""
    values = run.read_config()
    try:
        return read_config(values)
    except ConfigError as error:
        raise RunFolderError(f"{run.config} is damaged: {error}") from error


def _of_checkpoints(run: RunDir, config: Config) -> list[str]:
    """What is to be said of what the run goes on from, before anything starts. Where it goes on
    elsewhere than here, only what is quickly read; the ranks do the rest.

    Raises:
        RunFolderError: there are checkpoints, but none that is sound; or there are none yet, and
            the weights that it begins with are damaged.
    """
    from orchestrator.lifecycle.checkpoint import check_initial, newest

    contents = config.cluster.kind == "local"
    sentences: list[str] = []
    if not run.sealed:
        sentences.append(
            f"{run.path} was made before run folders had digests: damage of {run.config.name} or "
            f"of a checkpoint's state would go unnoticed"
        )
    found, passed_over = newest(run.checkpoints, run.identity, contents=contents)
    if found is None and contents and config.train.initial_weights is not None:
        check_initial(run)
    if found is None and run.attempts_made():
        sentences.append(f"{run.path} has no checkpoint yet: it begins again at update 0")
    return sentences + passed_over


def _way(config: Config) -> ModuleType:
    """How runs are kept: held by this process, or submitted and left alone.

    Both modules have `check`, `place` and `resume`; only the one that is needed is imported.
    """
    if config.cluster.kind == "local":
        from orchestrator.runs import foreground

        return foreground
    from orchestrator.runs import background

    return background


def _submission(config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    return {
        "time": time.time(),
        "command": sys.argv,
        "overrides": list(overrides),
        "folder": str(Path.cwd()),
        "cluster": config.cluster.kind,
        SEALED: True,
    }
