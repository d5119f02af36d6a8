"""Starting and resuming runs."""

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
from orchestrator.config.reading import options_of, read_config, to_yaml
from orchestrator.config.rules import refuse_schedule, refuse_unsupported
from orchestrator.config.schema import Config
from orchestrator.errors import (
    ClusterError,
    ConfigError,
    Interrupted,
    RunFailed,
    RunFolderError,
    UsageError,
    expand_user,
)
from orchestrator.notify import check_recipients
from orchestrator.plan.parts import JobFacts
from orchestrator.plan.plan import Plan
from orchestrator.plan.program import ProgramPlan, notes_of_program, plan_of_program
from orchestrator.plan.recorded_speeds import (
    BALANCE,
    keep_speeds,
    kept_speeds,
    names_run,
    possible_ranks,
    speeds_for,
)
from orchestrator.plugins import CLUSTERS, TRACKERS
from orchestrator.report.terminal import command, say
from orchestrator.rundir.backup import Backup
from orchestrator.rundir.checkpoints import (
    check_initial,
    initial_state,
    newest,
    read_newest_attempt,
)
from orchestrator.rundir.files import FULL_ERRORS, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import locked
from orchestrator.rundir.metrics import Tail
from orchestrator.runs.branch import branch_of, keep_initial_state
from orchestrator.runs.follow import OutputOptions, PreparedRun, handle_of, interrupts
from orchestrator.runs.inputs import INPUTS, has_done_nothing, inputs_of
from orchestrator.runs.resume import (
    PYTHONPATH,
    changed_inputs,
    check_own,
    initial_weights,
    keep_initial_weights,
    labels_of,
    record,
    refuse_changed,
    resumption,
    submission_directory,
)


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
        RunFolderError: nothing was trained yet. RunFailed: something was.
    """
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
        raise RunFolderError(sentence) from error


def _admitted(
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


def _cluster(config: Config, output: OutputOptions) -> Cluster:
    def tell(sentence: str) -> None:
        if interrupts.count:
            raise Interrupted("interrupted")
        say(output.console, sentence, "yellow")

    return cluster_of(config, tell)


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
    run, cluster = RunDir(new_folder(config)), _cluster(config, output)
    request, admission = _admitted(cluster, run, 0, output)
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
            # Nothing was trained, and the message says all; after a start, the logs may say more.
            with contextlib.suppress(OSError):  # the error itself matters more
                begun = run.attempts_made() > 0 and not isinstance(error, UsageError)
                if not (begun or run.metrics.exists() or run.may_be_queued):
                    run.withdraw()
            raise


@contextlib.contextmanager
def prepared_resume(
    path: Path,
    output: OutputOptions,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    *,
    to: Config | None = None,
    changed: bool = False,
) -> Generator[PreparedRun | None]:
    """Prepare a run to resume from its newest valid checkpoint, or from the start when it has
    none, as `prepared_run` does.

    Args:
        overrides: of its configuration: what leaves its numbers as they are, or more updates.
        config_dir: a folder of the user's own configs, for `cluster=…` among the overrides.
        to: the whole configuration to resume with, overrides already applied.
        changed: resume although the code or data has changed.

    Returns:
        None if it has finished already; prints that.
    """
    run = RunDir(path).existing()
    check_own(run)
    Tail(run.metrics, recent=0)  # whether it can be read at all
    resumed = resumption(run, config_of(run), overrides, config_dir, to=to)
    config, result = resumed.config, run.read_result()
    if resumed.is_complete(result):
        early = f" early ({result['ended_early']})" if result and "ended_early" in result else ""
        say(output.console, f"{path} has finished already{early}; there is nothing to resume")
        if not is_program(config.job):
            longer = "train.patience=null" if early else "train.updates=…"
            say(output.console, f"to train on: {command('resume', path)} {longer}", "dim")
        yield None
        return
    with submission_directory(run), interrupts, wrap_disk_errors(run), locked(run):
        inputs = changed_inputs(run, resumed)
        if inputs and not changed:
            refuse_changed({str(run.path): inputs})
        cluster = _cluster(config, output)
        notes = [f"{sentence} since the run began; going on all the same" for sentence in inputs]
        if not is_program(config.job):
            # Verified here only where ranks run here; elsewhere they verify the files themselves.
            checkpoint, passed_over = newest(
                run.checkpoints, run.identity, contents=cluster.attended
            )
            if checkpoint is None and cluster.attended and config.train.initial_weights is not None:
                check_initial(run)
            if checkpoint is None and cluster.attended and config.train.initial_state is not None:
                initial_state(run)
            if checkpoint is None and run.attempts_made():
                notes.append(f"{run.path} has no checkpoint yet: it begins again at update 0")
            notes += passed_over
        elif run.attempts_made() and has_done_nothing(run):
            notes.append(f"{run.path} has no update and no checkpoint yet: its program begins anew")
        other_speeds = BALANCE in {change.key for change in resumed.changes}
        if resumed.changes:
            prepare(config, new=False)
            if not other_speeds:
                kept_speeds(config, run)
        cluster.trust(run, {change.key for change in resumed.changes})
        if standing := handle_of(run).in_progress():
            raise RunFolderError(
                f"{run.path} is in progress ({standing}); to stop it first: "
                f"{command('cancel', run.path)}"
            )
        attempt = run.attempts_made()
        if not cluster.attended:
            attempt = max(attempt, read_newest_attempt(run.newest_attempt) + 1)
        request, admission = _admitted(cluster, run, attempt, output)
        output.note(resumed.message, prose=True)
        for sentence in (*filter(None, [resumed.warning]), *notes):
            say(output.console, f"warning: {sentence}", "yellow", prose=True)
        ready = PreparedRun(
            run=run,
            cluster=cluster,
            request=request,
            output=output,
            handle=run.read_handle(),
            backup=Backup.of(run),
        )
        try:
            if other_speeds:
                keep_speeds(config, run)
            record(run, resumed, attempt, inputs)
            if admission.notice:
                write_json(run.submission, {**run.read_submission(), **admission.notice})
            for file in (run.cancel, run.pruned, run.result):
                file.unlink(missing_ok=True)
            yield ready
        except BaseException:
            with contextlib.suppress(OSError, RunFolderError):  # the error itself matters more
                ready.withdraw()
            raise


def config_of(run: RunDir) -> Config:
    """Read a run's configuration. Raises `RunFolderError` if no run can have started with it."""
    values = run.read_config()
    try:
        return read_config(values)
    except ConfigError as error:
        raise RunFolderError(f"{run.config} is damaged: {error}") from error


def with_notes(plan: Plan | ProgramPlan, config: Config) -> dict[str, Any]:
    """Return a plan as in plan.json, with `notes` about it."""
    if isinstance(plan, ProgramPlan):
        return {**plan.to_json(), "notes": notes_of_program(config)}
    notes = [cluster_of(config).survival_line]
    if names_run(balance := config.accumulation.balance):
        notes.append(f"work is dealt by the speeds that {balance} has recorded")
    return {**plan.to_json(), "notes": [*filter(None, notes)]}


def ask_cluster(config: Config) -> tuple[Request, dict[str, Any]]:
    """Return the request, and the cluster's answer to it; empty if it has none."""
    cluster = cluster_of(config)
    request = cluster.request(new_folder(config), 0)
    warning: str | None = None
    try:
        admission = cluster.check(request)
        answer, refused = admission.message, False
        warning = "; ".join(admission.warnings) or None
    except ClusterError as error:
        answer, refused = str(error), True
    if not (request.text or answer or warning):
        return request, {}
    return request, {"scheduler": answer, "refused": refused, "warning": warning}
