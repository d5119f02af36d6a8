"""Following a run: its live line, Ctrl-C, and its end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from orchestrator.clusters.api import (
    POLL_S,
    Cluster,
    Culprit,
    Handle,
    LauncherHandle,
    Request,
    State,
    class_of,
)
from orchestrator.config.program import is_program
from orchestrator.config.schema import Config
from orchestrator.errors import (
    EXIT_INTERRUPTED,
    ClusterError,
    Interrupted,
    RefusedByRank,
    RunFolderError,
    RunFolderRemoved,
    UsageError,
)
from orchestrator.interrupt import interrupts
from orchestrator.notify import Notifier
from orchestrator.plugins import CLUSTERS
from orchestrator.report.caller import tell_begun
from orchestrator.report.progress import Progress
from orchestrator.report.run_tables import print_closing
from orchestrator.report.terminal import LogReader, command, legible, outlive_reader, say
from orchestrator.rundir.backup import Backup
from orchestrator.rundir.best import BestSoFar
from orchestrator.rundir.files import (
    await_readable,
    is_unreadable_now,
    read_json,
    remove,
    write_json,
)
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Tail, read_metrics, read_progress
from orchestrator.rundir.outcome import (
    CANCELLED_AT_ONCE,
    EXIT_CODES,
    NO_RESULT,
    describe_culprit,
    describe_stop,
    result_from_records,
)
from orchestrator.rundir.restarts import (
    RestartDecision,
    RestartKind,
    grant_restart,
    record_restart,
)
from orchestrator.rundir.status import kind_of
from orchestrator.rundir.warnings import NewWarnings
from orchestrator.runs.inputs import INPUTS, differences, rewritten_data

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """Console and verbosity."""

    console: Console
    verbose: bool = False
    quiet: bool = False

    def note(self, text: object, style: str = "", *, prose: bool = False) -> None:
        """Print a line, as `say` does, unless `quiet`."""
        if not self.quiet:
            say(self.console, text, style, prose=prose)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A launch that may start: its folder is written, its lock held, its signals counted.

    Attributes:
        request: what its cluster was asked to admit, with the number of the start that a person
            asked for.
        handle: of a resumed run, handle.json of its start before.
        backup: of a resumed run, its folder before.
        replaced: where what was in the run's folder before has been moved.
    """

    run: RunDir
    cluster: Cluster
    request: Request
    output: OutputOptions
    handle: Mapping[str, Any] | None = None
    backup: Backup | None = None
    replaced: Path | None = None

    @property
    def config(self) -> Config:
        return self.cluster.config

    @property
    def is_queued(self) -> bool:
        """True once a scheduler knows this start of the run; it may have known earlier ones."""
        return self.run.read_handle() not in (None, self.handle)

    def withdraw(self) -> None:
        """Remove a new run and restore what it replaced, or put the files of a resumed one back as
        they were; unless it has begun, or may be queued.
        """
        begun = self.run.attempts_made() > self.request.attempt
        if begun or self.is_queued or self.run.is_being_submitted:
            return
        try:
            self.run.withdraw()
        finally:
            put_back(self.replaced, self.run.path)
        if self.backup is None or not self.run.path.exists():
            return
        try:
            self.backup.restore()
        except (OSError, RunFolderError) as error:
            sentence = f"{self.run.path} is not as it was before this resume: {error}"
            say(self.output.console, f"warning: {sentence}", "bold red", prose=True)
            raise


def put_back(replaced: Path | None, folder: Path) -> None:
    """Move a replaced folder back, unless another has taken its place."""
    if replaced is not None and not folder.exists():
        replaced.rename(folder)


def resolve_submissions(runs: Sequence[RunDir]) -> tuple[list[str], dict[Path, str]]:
    """Find out whether submissions that were interrupted reached the scheduler.

    Returns:
        What was found out, as sentences; and for each run of which it cannot be known yet whether
        it was submitted, why.
    """
    folders = dict.fromkeys(path for run in runs for path in (run.path, run.path.parent))
    sentences: list[str] = []
    unknown: dict[Path, str] = {}
    for folder in map(RunDir, folders):
        if not os.path.lexists(folder.submitting):  # also where it may not be read
            continue
        members = [run for run in runs if folder.path in (run.path, run.path.parent)]
        try:
            sentences.append(class_of(kind_of(members[0])).adopt(folder))
        except (ClusterError, RunFolderError) as error:
            why = str(error)
            if isinstance(error, RunFolderError):  # the file is damaged
                why += "; see for yourself whether its job is queued, then remove the file"
            unknown |= {run.path: why for run in members if _is_about(folder, run.path)}
    return [sentence for sentence in sentences if sentence], unknown


def _is_about(folder: RunDir, run: Path) -> bool:
    """Return True if the submission may be of this run, or if that is not known."""
    try:
        note: dict[str, Any] = read_json(folder.submitting) or {}
    except RunFolderError:
        return True
    return run == folder.path or run.name in note.get("elements", (run.name,))


def handle_of(run: RunDir) -> Handle:
    """Return the handle of a run; one that was never handed to a cluster has a launcher.

    Raises:
        ClusterError: it is being submitted, or may have been, and the scheduler does not answer.
    """
    _, unknown = resolve_submissions([run])
    for why in unknown.values():
        raise ClusterError(why)
    return class_of(kind_of(run)).handle(run) if run.handle.exists() else LauncherHandle(run)


class _Stopped(Exception):
    """Nothing more is to be shown, though the folder cannot be read yet."""


@dataclass(kw_only=True, slots=True)
class _Reading:
    """Reads what is shown of a run, which must not end it: a file that cannot be read now, as over
    a network that fails for a moment, is read again for some time; one that is damaged or a link
    is not shown. Says so once.

    Args:
        stop: called between two tries; once it returns true nothing more is awaited.
    """

    output: OutputOptions
    stop: Callable[[], bool] = lambda: False
    has_failed: bool = False

    def __call__(self, action: Callable[[], T], otherwise: T) -> T:
        """Return what `action` reads; `otherwise` where nothing can be read.

        Raises:
            OSError, RunFolderError: the file is there, but could not be read for some time.
            _Stopped: `stop` returned true meanwhile.
        """
        try:
            return self.patiently(action)
        except (OSError, RunFolderError) as error:
            if is_unreadable_now(error):
                raise
            if not self.has_failed:
                self.has_failed = True
                self.note(f"warning: {error}; what is shown here lacks it until it can be read")
            return otherwise

    def patiently(self, action: Callable[[], T]) -> T:
        """Return what `action` reads. Raises as `__call__` does, and where nothing can be read."""

        def attempt() -> T:
            try:
                return action()
            except (OSError, RunFolderError):
                is_stopped = False
                with contextlib.suppress(OSError, RunFolderError):
                    is_stopped = self.stop()
                if is_stopped:
                    raise _Stopped from None
                raise

        return await_readable(attempt, self.note)

    def note(self, sentence: str) -> None:
        self.output.note(sentence, "yellow", prose=True)


def _best_before(run: RunDir, objective: str) -> BestSoFar:
    """Return the best figure of the evaluations so far."""
    best = BestSoFar(objective)
    for record in read_metrics(run.metrics).evaluations:
        best.add(record["update"] + 1, record["evaluation"])
    return best


def watch(
    handle: Handle, run: RunDir, output: OutputOptions, stop: Callable[[], bool], recent: int = 0
) -> State:
    """Show a run until it has ended, or until `stop` returns true.

    Args:
        stop: called after each poll of a run that has not ended.
        recent: show this many bytes of what earlier attempts or hours wrote, too.

    Raises:
        OSError, RunFolderError: the folder could not be read for some time.
        _Stopped: `stop` returned true while it could not be read.
    """
    reading = _Reading(output=output, stop=stop)
    plan = reading(run.read_plan, {})
    config: dict[str, Any] = reading(run.read_config, {})
    tail = reading(lambda: Tail(run.metrics, recent), Tail(run.metrics))
    if isinstance(config.get("cluster", {}).get("nodes"), dict):
        plan.pop("ranks", None)  # of the most nodes; a scheduler may give fewer
    attempt, warnings = -1, NewWarnings(run.path)
    shows_output = output.verbose and is_program(config.get("job", {}))
    log = LogReader(run.rank_log(0))
    best, keep_best = None, config.get("train", {}).get("keep_best")
    if keep_best is not None:  # `tail` may begin after some evaluations
        best = reading(lambda: _best_before(run, keep_best), BestSoFar(keep_best))
    with Progress(plan, output.console, output.quiet, output.verbose, best=best) as progress:
        while True:
            state = reading.patiently(partial(handle.poll, POLL_S))
            current = reading(lambda: run.latest_attempt, attempt)
            if current != attempt:
                attempt = current
                warnings = NewWarnings(run.attempt(attempt), already=plan.get("warnings") or ())
            latest = reading(partial(read_progress, run.progress(attempt)), None)
            records = reading(tail.read, [])
            if records and plan.get("dataset_samples") is None:
                # by now the workers know the data set, and so the length
                plan.update(reading(run.read_plan, {}))
            micro_steps = (latest.done, latest.steps) if latest else None
            new_warnings = reading(partial(warnings.read, now=state.ended), [])
            progress.update(records, micro_steps, new_warnings)
            for sentence in () if output.quiet else reading(handle.new_messages, []):
                reading.note(sentence)
            for text in reading(lambda: list(log.read()), []) if shows_output else ():
                output.console.out(legible(text, output.console), end="", highlight=False)
            if shows_output and state.ended and (rest := log.rest()):
                output.console.out(legible(rest, output.console), highlight=False)
            if state.ended or stop():
                return state


def follow(handle: Handle, run: RunDir, output: OutputOptions, *, recent: int = 0) -> int:
    """Show a run to its end; an interrupt only ends the showing.

    Returns:
        The run's exit code; or, when the showing was interrupted, 130.
    """
    state = await_readable(partial(handle.poll, 0.0))
    if not state.ended:
        with contextlib.suppress(_Stopped):
            state = watch(handle, run, output, lambda: interrupts.count > 0, recent)
    if not state.ended:
        say(
            output.console,
            f"detached; {handle.title} goes on: {command('status', run.path)}",
            "yellow",
        )
        return EXIT_INTERRUPTED
    code = EXIT_CODES[state]
    result = await_readable(run.read_result)
    if result is None and handle.culprit is None and state is not State.FINISHED:
        lost = f"{run.path} has ended without a result: its launcher is gone"
        say(output.console, lost, "bold red")
        say(output.console, f"to go on from here: {command('resume', run.path)}", "bold")
        return code
    result = result or result_from_records(run, state, handle.culprit)
    if not output.quiet or state is State.FAILED:
        history = read_metrics(run.metrics)
        print_closing(result, history, run.path, output.console, plan=run.read_plan())
    return code


def run_to_end(ready: PreparedRun) -> int:
    """Train it from the newest checkpoint, if there is one, and show it to its end; restart after
    failures as `grant_restart` says. Return its exit code. Nothing is left running, whatever is
    raised.
    """
    run, output = ready.run, ready.output
    hides_output = is_program(ready.config.job) and not output.verbose
    hint = f"; -v, or {command('logs', run.path)} -f, shows rank 0's output" * hides_output
    output.note(f"run folder: {run.path}{hint}", "dim", prose=True)
    with outlive_reader(interrupts.once):
        return _run_attempts(ready)


def _run_attempts(ready: PreparedRun) -> int:
    """Run attempts to the end of the run, as `run_to_end` says; return the exit code."""
    run, output = ready.run, ready.output
    while True:
        number = run.begin_attempt()
        state, interrupted, culprit = _attempt(ready, number)
        decision = RestartDecision(restarts=False)
        if culprit is not None and state is State.FAILED and not interrupts.count:
            most = ready.config.run.max_restarts
            decision = grant_restart(run, number, culprit, first=ready.request.attempt, most=most)
        if culprit is None or not decision.restarts:
            break
        record_restart(run, number, decision.note, RestartKind.LAUNCHER)
        Notifier(run).send()
        output.note(describe_culprit(culprit.to_json()), "bold red")
        output.note(decision.message, "yellow")
        changes: list[str] = []
        with contextlib.suppress(OSError, RunFolderError):  # it is only a warning
            changes = _Reading(output=output)(lambda: _differences(run, ready.config), [])
        for changed in changes:
            # This attempt starts by itself: no user can accept the change, as with `resume`.
            more = f"warning: {changed}; attempt {number + 1} has it as it is"
            say(output.console, more, "yellow", prose=True)
    if interrupted:
        culprit = Culprit(rank=None, node="launcher", cause=CANCELLED_AT_ONCE)
    if run.is_removed():  # nothing to write into, or to show
        raise RunFolderRemoved(run.removed_message)
    result = await_readable(run.read_result) or {}
    if state is State.FAILED or not result:  # rank 0 could not write it
        result = result_from_records(run, state, culprit, remark=decision.message)
        try:
            write_json(run.result, result)
        except OSError as error:
            say(output.console, f"{run.result} cannot be written: {error.strerror}", "bold red")
    Notifier(run).send()
    code = EXIT_INTERRUPTED if interrupted else EXIT_CODES[state]
    if culprit is not None and culprit.usage and not run.metrics.exists():
        raise (UsageError if culprit.rank is None else RefusedByRank)(culprit.cause)
    if not output.quiet or state is State.FAILED:
        history, plan = await_readable(lambda: (read_metrics(run.metrics), run.read_plan()))
        print_closing(result, history, run.path, output.console, plan=plan)
    return code


def _differences(run: RunDir, config: Config) -> list[str]:
    """Return what has changed in the code and data of a run since it began."""
    before = run.read_submission().get(INPUTS) or {}
    changed = [f"{sentence} since the run began" for sentence in differences(run, before, config)]
    return [*changed, *rewritten_data(run, before, config)]


def _attempt(ready: PreparedRun, number: int) -> tuple[State, bool, Culprit | None]:
    """Run one attempt to its end: one interrupt asks it to stop, a second ends it at once.

    Returns:
        How it ended, whether at once by request, and by whose fault.
    """
    try:
        with CLUSTERS.wrap_errors(ready.config.cluster.kind, "to start the ranks"):
            handle = ready.cluster.submit(ready.cluster.request(ready.run.path, number))
    except Exception:
        if number == ready.request.attempt:  # no rank has started, so no attempt has begun
            with contextlib.suppress(OSError):  # the error itself matters more
                remove(ready.run.attempt(number))
        raise
    stopping, notifier = False, Notifier(ready.run)

    def stop() -> bool:
        nonlocal stopping
        if interrupts.count and not stopping:
            stopping = True
            handle.stop()
            try:
                how = describe_stop(ready.run)
            except (OSError, RunFolderError):  # which no stop waits for
                how = "is asked to stop"
            sentence = f"the run {how}; once more ends every process at once"
            say(ready.output.console, sentence, "yellow")
        if interrupts.count > 1:
            return True
        notifier.send()
        return False

    try:
        state = _watch_patiently(handle, ready, stop)
        if not state.ended:
            handle.kill()
            return State.STOPPED, True, None
    except BaseException:
        handle.kill()
        raise
    # Rank 0 records the end of the training; a program records nothing.
    recorded = (await_readable(ready.run.read_result) or {}).get("state")
    if state is State.FINISHED and recorded != state.value and not is_program(ready.config.job):
        return State.FAILED, False, Culprit(rank=None, node="launcher", cause=NO_RESULT)
    return state, False, handle.culprit


def _watch_patiently(handle: Handle, ready: PreparedRun, stop: Callable[[], bool]) -> State:
    """Show an attempt as `watch` does. A folder that cannot be read ends the showing, not the
    ranks.
    """
    while True:
        try:
            return watch(handle, ready.run, ready.output, stop)
        except _Stopped:
            with contextlib.suppress(OSError, RunFolderError):
                return handle.poll(0.0)
            return State.RUNNING
        except (OSError, RunFolderError) as error:
            if not is_unreadable_now(error):
                raise
            sentence = f"{error}; this ends no rank: the run is shown again once it can be read"
            say(ready.output.console, sentence, "bold red", prose=True)
        with contextlib.suppress(OSError, RunFolderError):
            if stop():
                return State.RUNNING


def start_run(ready: PreparedRun) -> int:
    """Train a run here to its end; or queue it, and follow it when `run.watch` says so. Return the
    exit code.

    Raises:
        Interrupted: by a person, before it was submitted.
    """
    run, output, cluster = ready.run, ready.output, ready.cluster
    if cluster.attended:
        tell_begun(run.path, run.terminal_log)
        return run_to_end(ready)
    if interrupts.count:
        raise Interrupted("interrupted: the run was not submitted")
    with CLUSTERS.wrap_errors(ready.config.cluster.kind, "to submit the run"):
        handle = cluster.submit(ready.request)
    tell_begun(run.path, run.terminal_log)
    output.note(f"{handle.title} is queued", "bold green")
    output.note(f"run folder: {run.path}")
    for verb, hint in (("status", ""), ("logs", " -f"), ("cancel", "")):
        output.note(f"  {command(verb, run.path)}{hint}")
    if not ready.config.run.watch:
        return 0
    return follow(handle, run, output)
