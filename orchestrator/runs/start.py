"""Start of new runs: the checks before anything is written, and the run's folder."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator.clusters.api import THREAD_VARIABLES, Admission, Cluster, Request, cluster_of
from orchestrator.config.job_source import check_constructor, check_program, check_target
from orchestrator.config.optimizer import check_builder
from orchestrator.config.program import is_program, program_of, short_name
from orchestrator.config.reading import options_of, to_yaml
from orchestrator.config.rules import refuse_schedule, refuse_unsupported
from orchestrator.config.schema import Config
from orchestrator.errors import (
    Interrupted,
    RefusedByRank,
    RunFailed,
    RunFolderError,
    expand_user,
)
from orchestrator.interrupt import interrupts
from orchestrator.notify import check_recipients
from orchestrator.plan.parts import JobFacts
from orchestrator.plan.plan import Plan
from orchestrator.plan.program import ProgramPlan, plan_of_program
from orchestrator.plan.recorded_speeds import (
    keep_speeds,
    possible_ranks,
    speeds_for,
)
from orchestrator.plugins import CLUSTERS, TRACKERS
from orchestrator.report.terminal import say
from orchestrator.rundir.files import FULL_ERRORS, names_in, write_json
from orchestrator.rundir.folder import LABELS, RunDir
from orchestrator.rundir.lock import locked
from orchestrator.runs.follow import OutputOptions, PreparedRun
from orchestrator.runs.initial import (
    branch_of,
    initial_weights,
    keep_initial_state,
    keep_initial_weights,
)
from orchestrator.runs.inputs import INPUTS, inputs_of
from orchestrator.runs.recorded import PYTHONPATH


def stated_folder(text: str) -> Path:
    """Return the folder that a path means. Raises `ConfigError` for an unknown `~user`."""
    return Path(os.path.abspath(expand_user(text)))  # noqa: PTH100  # keeps links


def new_folder(config: Config) -> Path:
    """Return the folder of a new run: `run.dir`, or one below `runs/`."""
    if config.run.dir:
        return stated_folder(config.run.dir)
    name = config.run.name or short_name(config.job)
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    stamp = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    base = Path.cwd() / "runs" / f"{stamp}_{safe}"
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{base.name}_{number}")
    return candidate


DISK_ERRORS = (*FULL_ERRORS, errno.EROFS, errno.EIO)
FOLDER_ERRORS = (*DISK_ERRORS, errno.EACCES, errno.ENOENT, errno.ENOTDIR)


def prepare(config: Config, *, new: bool = True) -> Plan | ProgramPlan:
    """Check everything that can be checked before anything is written. Raises `UsageError`.

    Args:
        new: False for a resumed run, which has its initial weights in its folder.
    """
    check_recipients(config.notify)
    if is_program(config.job):
        check_program(program_of(config.job))
        return plan_of_program(config)
    if config.tracker.options:
        from orchestrator.trainer.recorder import Tracker  # few submissions need it

        schema = TRACKERS.load(config.tracker.kind, Tracker).Options
        options_of(schema, config.tracker.options, "tracker.options")
    if new:
        initial_weights(config)
        speeds_for(config.accumulation.balance, possible_ranks(config.cluster))
    branch = branch_of(config) if new else None
    facts = check_target(config.job["_target_"])
    check_constructor(config.job["_target_"], [key for key in config.job if key != "_target_"])
    refuse_unsupported(config, facts.framework, coupled=facts.coupled)
    check_builder(config.optimizer, str(config.job["_target_"]), own=facts.own_optimizer)
    if facts.own_rate:
        refuse_schedule(str(config.job["_target_"]), config.schedule)
    known = JobFacts(
        own_rate=facts.own_rate,
        metric_count=facts.metric_count or 0,
        framework=facts.framework,
        coupled=facts.coupled,
        branch=branch,
    )
    plan = Plan.of(config, known)
    cluster_of(config).refuse(facts.framework)
    return plan


@contextlib.contextmanager
def wrap_disk_errors(run: RunDir) -> Generator[None]:
    """Put a disk's refusals (full, read-only) of the run's files into a message.

    Raises:
        RunFolderError: nothing was trained yet. RunFailed: something was, or may have been, as an
            attempt has begun within.
    """
    attempts = run.attempts_made()
    try:
        yield
    except OSError as error:
        name = error.filename
        if error.errno in FULL_ERRORS and error.filename2:  # of a copy, where it goes
            name = error.filename2
        if name is None:  # writing to an open file names none
            concerns_run = error.errno in DISK_ERRORS
        else:
            path = Path(os.path.abspath(os.fsdecode(name)))  # noqa: PTH100  # keeps links
            inside = path.is_relative_to(run.path.absolute())
            concerns_run = inside and error.errno in FOLDER_ERRORS
        if not concerns_run:
            raise
        sentence = f"{run.path} cannot be written: {error.strerror}"
        if run.metrics.exists():
            raise RunFailed(
                f"{sentence}; the last good checkpoint is kept, to resume from"
            ) from error
        if run.attempts_made() > attempts:  # a program need not report what it does
            raise RunFailed(f"{sentence}; what it has saved is kept, to resume from") from error
        raise RunFolderError(sentence) from error


def request_admission(
    cluster: Cluster, run: RunDir, attempt: int, output: OutputOptions
) -> tuple[Request, Admission]:
    """Ask the cluster before anything is written. Raises `ConfigError`, `ClusterError`."""
    with CLUSTERS.wrap_errors(cluster.config.cluster.kind, "to say whether the run can be placed"):
        request = cluster.request(run.path, attempt)
        admission = cluster.check(request)
    for sentence in (*admission.warnings, *replaced_threads(cluster.config, os.environ)):
        say(output.console, f"warning: {sentence}", "yellow", prose=True)
    return request, admission


def replaced_threads(config: Config, env: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each exported number of threads that the ranks do not get.

    >>> from orchestrator.config.reading import read_config
    >>> [sentence.partition(";")[0] for sentence in replaced_threads(
    ...     read_config({"job": {"_target_": "a.B"}}), {"OMP_NUM_THREADS": "8"}
    ... )]
    ['OMP_NUM_THREADS=8 of this shell is replaced by 1 in the ranks (cluster.cpus_per_rank)']
    """
    threads = str(config.cluster.cpus_per_rank)
    for name in THREAD_VARIABLES:
        if env.get(name, threads) != threads and name not in config.cluster.environment:
            yield (
                f"{name}={env[name]} of this shell is replaced by {threads} in the ranks "
                f"(cluster.cpus_per_rank); cluster.environment.{name}={env[name]} keeps it"
            )


def cluster_for(config: Config, output: OutputOptions) -> Cluster:
    """Return the run's cluster, which tells the waiting user what it does, until an interrupt."""

    def tell(sentence: str) -> None:
        if interrupts.count:
            raise Interrupted("interrupted")
        say(output.console, sentence, "yellow")

    return cluster_of(config, tell)


def labels_of(config: Config) -> dict[str, Any]:
    """Return the user's labels of the run, for submission.json, which `status` reads."""
    values = {name: getattr(config.run, name) for name in LABELS}
    return {name: value for name, value in values.items() if value}


@contextlib.contextmanager
def prepared_run(
    config: Config,
    output: OutputOptions,
    *,
    overrides: Sequence[str] = (),
    flags: Sequence[str] = (),
    plan: Plan | ProgramPlan | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Generator[PreparedRun]:
    """Make a new run ready, for as long as this is entered. Raises `UsageError`.

    Args:
        overrides, flags: of the line that begins the run, for submission.json.
        plan: where it is made already.
        notes: of a point, for submission.json, with its inputs.
    """
    plan = plan or prepare(config)
    run, cluster = RunDir(new_folder(config)), cluster_for(config, output)
    request, admission = request_admission(cluster, run, 0, output)
    with interrupts:
        cluster.trust(run)
        for sentence in plan.warnings:
            output.note(f"warning: {sentence}", "yellow")
        if survival := cluster.survival_line:
            output.note(survival, "dim", prose=True)
        try:
            run.create()
        except RunFolderError:
            if config.run.dir or not run.lock.exists():
                raise
            # Another start in this second has the same name, made from the time: take the next one.
            options: dict[str, Any] = {"overrides": overrides, "flags": flags, "plan": plan}
            with prepared_run(config, output, **options, notes=notes) as ready:
                yield ready
            return
        try:
            # The lock comes first: without it another command would take this run for a lost one.
            with wrap_disk_errors(run), locked(run):
                run.write_config(to_yaml(config))
                write_json(run.plan, plan.to_json())
                keep_speeds(config, run)
                digest = keep_initial_weights(config, run)
                digest |= keep_initial_state(
                    None if isinstance(plan, ProgramPlan) else plan.branch, run
                )
                submission = {
                    "time": time.time(),
                    "command": sys.argv,
                    "overrides": list(overrides),
                    "flags": list(flags),
                    "folder": str(Path.cwd()),
                    **cluster.placed,
                }
                if paths := [e for e in os.environ.get(PYTHONPATH, "").split(os.pathsep) if e]:
                    submission[PYTHONPATH] = paths
                noted = {**(notes or {INPUTS: inputs_of(config)}), **labels_of(config)}
                write_json(run.submission, {**submission, **digest, **admission.notice, **noted})
                yield PreparedRun(run=run, cluster=cluster, request=request, output=output)
        except BaseException as error:  # rich raises SystemExit when its reader has ended
            with contextlib.suppress(OSError, RunFolderError):  # the error itself matters more
                if not (_has_begun(run, config, error) or run.may_be_queued):
                    run.withdraw()
            raise


def _has_begun(run: RunDir, config: Config, error: BaseException) -> bool:
    """Return whether the folder may hold anything that is worth keeping: results, or logs that say
    more than the message does.

    What a program does is not known, so its folder is kept once an attempt has begun.
    """
    if isinstance(error, RefusedByRank) and not is_program(config.job):
        return run.metrics.exists() or bool(names_in(run.checkpoints))
    return run.metrics.exists() or run.attempts_made() > 0
