"""Runs and sweeps as Python objects, for scripts and notebooks.

`start` and `start_sweep` take the words of the command line and run that command in a process of
its own, which the run outlives: whatever the caller's process has loaded, holds or handles (CUDA,
threads, an event loop, signals) makes no difference, and there is one way from words to a run.
Everything else reads the run folder, as the commands do, which call what is here. Nothing is
printed unless it is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import psutil
from rich.console import Console

from orchestrator import errors
from orchestrator.clusters.api import class_of
from orchestrator.config.changes import flat
from orchestrator.config.command_line import overrides_of, read_command_line
from orchestrator.config.composer import Composer
from orchestrator.config.program import is_program
from orchestrator.config.reading import with_run_folder
from orchestrator.config.rules import SMALL_IS_GOOD
from orchestrator.engine.api import Framework
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    ConfigError,
    RunFailed,
    RunFolderError,
    UsageError,
    did_you_mean,
    require_cwd,
    shortened,
)
from orchestrator.job import definition_time
from orchestrator.plugins import COMMANDS, FRAMEWORKS
from orchestrator.report.compare import compare as compare_weights
from orchestrator.report.compare_runs import RunComparison, compare_folders
from orchestrator.report.sweep_tables import current_overrides, only_varying
from orchestrator.report.terminal import command
from orchestrator.rundir.checkpoints import (
    BEST,
    Checkpoint,
    kept_checkpoint,
    load,
    read_last,
    weights_of,
)
from orchestrator.rundir.files import await_readable, make_folder, remove
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import is_locked
from orchestrator.rundir.metrics import HELD_OUT, History, Record, read_metrics
from orchestrator.rundir.outcome import describe_end
from orchestrator.rundir.status import (
    OVER,
    UNREADABLE,
    RunStatus,
    await_run,
    find_runs,
    kind_of,
)
from orchestrator.runs.cancel import cancel, cancel_sweep
from orchestrator.runs.follow import OutputOptions, follow, handle_of
from orchestrator.runs.launcher import LauncherProcess, launch
from orchestrator.runs.logs import read_log
from orchestrator.runs.planning import PlannedRun, plan_new_run
from orchestrator.runs.recorded import check_own, submission_directory
from orchestrator.runs.status import statuses
from orchestrator.snapshot import code_files
from orchestrator.sweep.planning import PlannedPoints, plan_points
from orchestrator.sweep.sweep import follow_sweep, is_sweep

POLL_S = 0.2
FOLLOW_S = 1.0  # between two looks at all points of a sweep that is followed
LEAVE_S = 10.0  # given to a command whose run has ended, or is withdrawn, to say why
EXIT_OF_STATE = {
    "finished": EXIT_FINISHED,
    "pruned": EXIT_FINISHED,
    "stopped": EXIT_STOPPED,
    "cancelled": EXIT_STOPPED,
}
"""Of `orchestrator wait`; of any other state it is 1."""
FORMS = ("safetensors", "torch", "dcp")  # of `Run.export`
Value = TypeVar("Value")


# ------------------------------------------------------------------ Starting


def start(
    *words: str | type,
    job: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> Run:
    """Start a run, and return once it has begun or, on a cluster, once it is submitted.

    A run on this machine goes on when this process ends; `Run.cancel` stops it.

    Args:
        words: as for `python -m orchestrator.launch`: `"job=digits"`, `"+cluster=slurm"`,
            `"--config-dir"`, …, and after `"--"` a program and its arguments. Or the class of a
            job, which a module has to define.
        job: arguments of the job's constructor: numbers, texts, lists and mappings of these.
        overrides: further words.

    Raises:
        OrchestratorError: as the command would say; nothing was started then.
    """
    arguments = _words(words, job, overrides)
    line = read_command_line(arguments)
    if line.multirun or line.help or line.cfg:
        raise ConfigError("start() begins one run; a sweep is begun by start_sweep()")
    folder, launcher = launch(["orchestrator.launch", *arguments], "start()")
    if folder is None or find_runs(folder) != [folder]:
        raise ConfigError(
            f"these words mean a sweep, which has begun in {folder}; start_sweep() returns one"
        )
    return Run(folder, launcher)


def start_sweep(
    *words: str | type,
    job: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> Sweep:
    """Start a run for each point of a sweep, or the trials of a search.

    Args:
        words, job, overrides: as for `start`, with several values for some keys:
            `"accumulation.steps=1,2,4"`. `-m` is understood.

    Raises:
        OrchestratorError: as the command would say; nothing was started then.
    """
    arguments = ["-m", *_words(words, job, overrides)]
    read_command_line(arguments)
    folder, launcher = launch(["orchestrator.launch", *arguments], "start_sweep()")
    if folder is None:
        raise ConfigError("these words name no points of a sweep")
    return Sweep(folder, launcher)


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Return the run in a folder, from any process and days later.

    Raises:
        RunFolderError: there is none.
    """
    run = RunDir(_absolute(folder))
    if find_runs(run.path) not in ([], [run.path]):
        raise RunFolderError(
            f"{run.path} holds several runs: open_sweep() returns a sweep, list_runs() returns all "
            "runs in a folder"
        )
    return Run(run.existing().path)


def open_sweep(folder: str | os.PathLike[str]) -> Sweep:
    """Return the sweep in a folder.

    Raises:
        RunFolderError: there is none.
    """
    path = _absolute(folder)
    if not is_sweep(RunDir(path)):
        raise RunFolderError(
            f"there is no sweep in {path}; open_run() returns a run, and list_runs() all runs in "
            "a folder"
        )
    return Sweep(path)


def list_runs(folder: str | os.PathLike[str] = "runs") -> list[Run]:
    """Return all runs in and below a folder, the points of sweeps included, by name.

    Raises:
        RunFolderError: there is no such folder.
    """
    path = _absolute(folder)
    if not path.is_dir():
        raise RunFolderError(f"there is no folder {path}")
    return [Run(run) for run in find_runs(path)]


def plan_run(
    *words: str | type,
    job: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what `start` would do with these words, as `plan --json` prints it; start nothing.

    Raises:
        OrchestratorError: as `start` would.
    """
    planned = _plan(_words(words, job, overrides))
    if isinstance(planned, PlannedPoints):
        raise ConfigError("these words mean a sweep; plan_sweep() returns its plans")
    return planned.to_json()


def plan_sweep(
    *words: str | type,
    job: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return what `start_sweep` would do, a plan for each point; see `plan_run`."""
    planned = _plan(["-m", *_words(words, job, overrides)])
    if not isinstance(planned, PlannedPoints):
        raise ConfigError("these words name no points of a sweep")
    for sentence in planned.sentences:
        warnings.warn(sentence, stacklevel=2)
    return planned.to_json()


def _plan(arguments: Sequence[str]) -> PlannedRun | PlannedPoints:
    require_cwd()
    line, before = read_command_line(arguments), list(sys.path)
    sys.path.insert(0, str(Path.cwd()))  # where the command would find a job's module
    try:
        composer = Composer(line)
        composition = composer.compose()
        return plan_points(composer) if composition.sweeps else plan_new_run(composition.config())
    finally:
        sys.path[:] = before


def compare(a: str | os.PathLike[str] | Run, b: str | os.PathLike[str] | Run) -> RunComparison:
    """Compare the newest weights, the settings and the losses of two runs.

    Args:
        a, b: runs, their folders, or safetensors files. Differences are relative to `b`.

    Raises:
        RunFolderError: a run has no checkpoint.
        UsageError: the weights are of different models.
    """
    paths = [run.folder if isinstance(run, Run) else _absolute(run) for run in (a, b)]
    weights = compare_weights(*map(weights_file, paths))
    if any(path.is_file() for path in paths):
        return RunComparison(weights=weights)
    return compare_folders(weights, *map(RunDir, paths))


def _absolute(folder: str | os.PathLike[str]) -> Path:
    require_cwd()
    return errors.expand_user(os.fspath(folder)).absolute()


def _words(
    words: Sequence[str | type], job: Mapping[str, Any] | None, overrides: Sequence[str]
) -> list[str]:
    """Return what was given as words of the command line. Raises `ConfigError`."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r} is a text; a list is needed: [{overrides!r}]")
    line: list[str] = []
    for word in words:
        if isinstance(word, str):
            line.append(word)
        elif isinstance(word, list | tuple | Mapping | os.PathLike):
            raise ConfigError(
                f"a word is a text, as in start(Line, 'train.updates=20'), but this is a "
                f"{type(word).__name__}: {shortened(repr(word))}; a list of words is given as "
                "overrides=[…], the constructor's arguments as job={…}"
            )
        else:
            line.append(f"job._target_={_name_of(word)}")
    line += [] if job is None else overrides_of("job", job)
    if "--" in line:  # what follows is a program's
        at = line.index("--")
        if line[at + 1 : at + 2] in (["python"], ["python3"]):
            line[at + 1] = sys.executable  # this process's, which the path need not have
        return [*line[:at], *overrides, *line[at:]]
    return [*line, *overrides]


def _name_of(job: object) -> str:
    """Return the dotted name by which ranks import a job's class.

    Raises:
        ConfigError: they could not.
    """
    if not isinstance(job, type):
        name = type(job).__name__
        if callable(job) and hasattr(job, "__qualname__"):
            raise ConfigError(
                f"a job is a class, with model, dataset and loss, but {job.__qualname__} is a "
                f"{name}; the file of a script of yours comes after '--'"
            )
        raise ConfigError(
            f"a job is given as a class, which every rank makes for itself, but this is an object "
            f"of {name}: start({name}, job={{…}}) with the arguments of its constructor"
        )
    module, name = job.__module__, job.__qualname__
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or file is None:
        raise ConfigError(
            f"{name} is defined in this notebook or script itself, which ranks do not run: write "
            f"the class to a file beside it, say {name.lower()}_job.py, and then: "
            f"from {name.lower()}_job import {name}"
        )
    present = getattr(sys.modules[module], name, None)
    if present is not job and isinstance(present, type) and present.__qualname__ == name:
        raise ConfigError(
            f"{name} is older than the class of that name in {module}, which was imported again: "
            f"from {module} import {name} once more"
        )
    if present is not job:
        raise ConfigError(
            f"ranks cannot import {name} by its name from {module}: a job's class is defined at "
            "the top level of its module"
        )
    return f"{module}.{name}"


# ------------------------------------------------------------------ A run


class Metrics(Sequence[Record]):
    """The recorded updates of a run: a row for each update, by name in columns.

    A row has `update` (from 0), `loss`, `learning_rate`, … of that update, and after an evaluation
    `held_out.NAME` for each of its figures. `metrics[3]` is a row and `metrics["loss"]` a column,
    with None where a row lacks it. `pandas.DataFrame(run.metrics)` is a table.
    """

    def __init__(self, history: History) -> None:
        self._history, self._updates = history, history.updates

    def __len__(self) -> int:
        return len(self._updates)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    @overload
    def __getitem__(self, index: str) -> list[Any]: ...
    def __getitem__(self, index: int | slice | str) -> Record | list[Record] | list[Any]:
        if isinstance(index, int):
            record = self._updates[index]
            return _row(record, self._history.evaluation(record["update"]))
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        column = [row.get(index) for row in self]
        if all(value is None for value in column):
            raise UsageError(f"nothing is recorded as {index!r}{did_you_mean(index, self.names)}")
        return column

    def __iter__(self) -> Iterator[Record]:
        evaluations = iter(self._history.evaluations)
        evaluation = next(evaluations, None)
        for record in self._updates:
            while evaluation is not None and evaluation["update"] < record["update"]:
                evaluation = next(evaluations, None)
            of_this = evaluation is not None and evaluation["update"] == record["update"]
            yield _row(record, evaluation if of_this else None)

    @property
    def names(self) -> list[str]:
        """Return the names of all columns."""
        return [*dict.fromkeys(name for row in self for name in row)]

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` of the rows, by update.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            pandas: Any = importlib.import_module("pandas")
        except ModuleNotFoundError as error:
            raise UsageError("to_pandas() needs pandas, which is not installed") from error
        frame = pandas.DataFrame([*self])
        return frame.set_index("update") if len(self) else frame

    def __repr__(self) -> str:
        return f"<{len(self)} updates of {', '.join(self.names) or 'nothing'}>"


def _row(record: Record, evaluation: Record | None) -> Record:
    row: Record = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            row |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            row[name] = value
    figures: Mapping[str, Any] = (evaluation or {}).get("evaluation") or {}
    return row | {f"{HELD_OUT}{name}": value for name, value in figures.items()}


class Run:
    """A run: of `start` or `open_run`. All of it is read from its folder when it is asked for.

    Every member may raise `RunFolderError`, where the folder was moved, removed or damaged.

    Attributes:
        folder: the run folder.
    """

    def __init__(self, folder: Path, launcher: LauncherProcess | None = None) -> None:
        self.folder, self._launcher = folder, launcher

    def __repr__(self) -> str:
        return f"<run in {self.folder}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other.folder == self.folder

    def __hash__(self) -> int:
        return hash(self.folder)

    def _existing(self) -> RunDir:
        if self._launcher is not None and not self.folder.exists():
            self._launcher.raise_error(LEAVE_S)  # it could not begin after all
        return RunDir(self.folder).existing()

    @property
    def status(self) -> RunStatus:
        """Return how far the run is, and all else that `orchestrator status` says of it."""
        [status], _ = statuses([self._existing()])
        return status

    @property
    def state(self) -> str:
        """Return its state: "running", "finished", "failed", …; see `RunStatus.state`."""
        return self.status.state

    @property
    def has_ended(self) -> bool:
        """Return whether nothing computes it any more."""
        return self.state in OVER and not is_locked(RunDir(self.folder))

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the run has ended, well or not, and return its state.

        To interrupt this leaves the run alone. A folder that cannot be read is read again for up to
        a minute, whatever `timeout_s` is.

        Raises:
            TimeoutError: it has not ended after so many seconds. It goes on.
            OrchestratorError: a rank refused what it was asked to do before the first update.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        has_waited = was_read = False
        while True:
            try:
                status = self.status
                is_over = status.state in OVER and not is_locked(RunDir(self.folder))
            except (OSError, RunFolderError):
                if has_waited:
                    raise
                status, is_over = None, False
            if status is None or (status.state == "damaged" and not has_waited):
                has_waited = True
                await_run(RunDir(self.folder), existed=was_read)
                continue
            if status.state in UNREADABLE:
                raise RunFolderError(status.reason or f"{self.folder} cannot be read")
            has_waited, was_read = False, True
            if is_over:
                if self._launcher is not None:
                    # It releases the run before it says why it ends.
                    self._launcher.raise_error(LEAVE_S)
                latest = self.state
                return latest if latest in OVER else status.state
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{self.folder} is {status.state} after {timeout_s:g} s")
            interval_s = class_of(status.cluster).status_interval_s
            time.sleep(min(max(POLL_S, 0.0 if status.state in OVER else interval_s), left_s))

    def follow(self) -> str:
        """Show the run's live line and its end table, as `orchestrator attach` does; return its
        state. To interrupt this leaves the run alone.
        """
        run = self._existing()
        follow(handle_of(run), run, OutputOptions(console=Console()))
        return self.wait()

    def cancel(self, *, now: bool = False) -> str:
        """Ask the run to stop: at its next update boundary, with a checkpoint.

        Args:
            now: at once, without a checkpoint.

        Returns:
            A sentence on what happens.

        Raises:
            ClusterError: there is nothing to stop, or the scheduler does not answer.
        """
        return cancel(self._existing(), now=now)

    def resume(
        self, *words: str, job: Mapping[str, Any] | None = None, changed: bool = False
    ) -> Run:
        """Go on from the newest sound checkpoint, to the same bits, and return this run.

        A run that has finished stays as it is, with a warning that says so.

        Args:
            words: KEY=VALUE: more updates, other nodes, another cluster.
            job: changed arguments of the job's constructor: where data lie, as absolute paths.
                Others decide the numbers of an update and are refused.
            changed: go on although the code or data has changed.

        Raises:
            OrchestratorError: as `orchestrator resume` would say; nothing was started then.
        """
        self._launcher = _resume(self._existing().path, words, job, changed=changed)
        return self

    def logs(self, rank: int | None = None, *, lines: int | None = None) -> str:
        """Return a rank's log, or its last lines; by default rank 0's.

        Raises:
            RunFolderError: the rank has none.
        """
        return "".join(read_log(self._existing(), rank, lines))

    @property
    def result(self) -> dict[str, Any]:
        """Return result.json of a run that has finished or was stopped.

        Raises:
            RunFailed: it failed, was cancelled, or is lost; the message says why.
            UsageError: it has not ended.
        """
        status = self.status
        if status.state not in OVER:
            raise UsageError(f"{self.folder} has no result yet: it is {status.state}; wait() first")
        result = RunDir(self.folder).read_result() or {}
        if status.state in ("failed", "cancelled", "lost"):
            why = describe_end(result) or status.reason or status.state
            raise RunFailed(
                f"{self.folder} {status.state}: {why}\nto continue: resume() of this run, or "
                f"{command('resume', self.folder)}"
            )
        return result

    @property
    def plan(self) -> dict[str, Any]:
        """Return plan.json: who computes what, as far as it is known."""
        return self._existing().read_plan()

    @property
    def config(self) -> dict[str, Any]:
        """Return the run's whole configuration."""
        return self._existing().read_config()

    @property
    def metrics(self) -> Metrics:
        """Return what has been recorded so far, update by update."""
        return Metrics(read_metrics(self._existing().metrics))

    def best(self, figure: str) -> Record:
        """Return the row of `metrics` in which a figure is best.

        Args:
            figure: the largest is best, as in `held_out.accuracy`; with a minus before it the
                smallest, as in `-held_out.loss`.

        Raises:
            UsageError: no row has this figure, or none that is finite.
        """
        sign, name = _direction(figure)
        return _best_row(self.metrics, sign, name, f"{self.folder} has recorded no number as")

    def state_dict(self, *, best: bool = False) -> dict[str, Any]:
        """Return the weights and buffers of the newest checkpoint, on the CPU, by name.

        Imports the run's framework.

        Args:
            best: of the best checkpoint, as `train.keep_best` has it.

        Raises:
            RunFolderError: no checkpoint was written, or it is damaged.
        """
        framework = self._framework()
        return self._read(lambda saved: framework.state_dict(saved.folder, saved.extra), best=best)

    def load_model(self, *, best: bool = False) -> Any:
        """Return the model that the run's job builds, with the weights of the newest checkpoint.

        Imports the job's class, so the run has to be your own, and its code where it was.

        Args:
            best: see `state_dict`.

        Raises:
            ConfigError: the run is a program's, which builds its model its own way.
            RunFolderError: no checkpoint was written, it is damaged, or another model's.
        """
        from orchestrator.trainer.job_class import build_job  # what trains it

        run = self._existing()
        check_own(run)
        settings = run.read_config()["job"]
        if is_program(settings):
            raise ConfigError(f"{run.path} is a program's, which builds its model its own way")
        framework = self._framework()
        with submission_directory(run):
            sys.path.insert(0, str(Path.cwd()))
            if stale := _stale_files(settings["_target_"]):
                warnings.warn(
                    f"{' and '.join(map(str, stale))} changed after this process imported it, so "
                    "load_model() builds the model of the older code: restart the process, or "
                    "importlib.reload() its module",
                    stacklevel=2,
                )
            model = build_job(with_run_folder(settings, str(run.path))).model()
        self._read(
            lambda saved: framework.load_weights(model, saved.folder, saved.extra), best=best
        )
        return model

    def export(
        self,
        form: str = "safetensors",
        output: str | os.PathLike[str] | None = None,
        *,
        best: bool = False,
    ) -> tuple[Path, int]:
        """Write the newest checkpoint for other programs; return the new file or folder, and after
        how many updates it is.

        Args:
            form: "safetensors" (the weights), "torch" (with the optimizer, for `torch.load`), or
                "dcp" (the same, for `torch.distributed.checkpoint.load`).
            output: where; in the run folder's `export` by default.
            best: see `state_dict`.

        Raises:
            UsageError: the output exists, its folder does not, or there is no such form.
            RunFolderError: no checkpoint was written, or it is damaged.
        """
        if form not in FORMS:
            raise UsageError(f"there is no form {form!r}{did_you_mean(form, FORMS)}")
        framework, run = self._framework(), RunDir(self.folder)

        def write(saved: Checkpoint) -> tuple[Path, int]:
            name = f"{saved.folder.name}.{'pt' if form == 'torch' else form}"
            to = run.path / "export" / name if output is None else _absolute(output)
            if os.path.lexists(to):
                raise UsageError(f"{to} exists already; name another output")
            if output is None:
                with contextlib.suppress(FileExistsError):
                    make_folder(to.parent)
            elif not to.parent.is_dir():
                raise UsageError(f"there is no folder {to.parent} to write {to.name} to")
            partial = to.with_name(f".partial-{to.name}")
            try:
                framework.export(saved.folder, saved.extra, form, partial)
                partial.rename(to)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    remove(partial)
            return to, saved.updates

        return self._read(write, best=best)

    def report(self, output: str | os.PathLike[str] | None = None) -> Path:
        """Write the page about the run, and return its file; by default report.html in its folder.

        Raises:
            UsageError: the page needs a package that is not installed.
            ConfigError: the report page is not part of this installation.
        """
        return _write_page(self._existing().path, output)

    def _framework(self) -> Framework:
        versions = (self._existing().read_environment() or {}).get("framework", {})
        name = next((name for name in versions if FRAMEWORKS.refusal(name) is None), "torch")
        return FRAMEWORKS.make(name, Framework)

    def _read(self, read: Callable[[Checkpoint], Value], *, best: bool) -> Value:
        run = RunDir(self.folder)
        if not best:
            return read_newest(run, read)
        run.existing()
        try:
            return read(load(kept_checkpoint(run, BEST), run.identity))
        except RunFolderError as error:
            raise RunFolderError(f"{run.path}: {error}") from error


def _resume(
    folder: Path, words: Sequence[str], job: Mapping[str, Any] | None, *, changed: bool
) -> LauncherProcess:
    """Run `orchestrator resume`, for a caller's caller; warn where nothing is left to do."""
    arguments = [*words, *overrides_of("job", job or {}), *(["--changed"] if changed else [])]
    begun, launcher = launch(
        ["orchestrator", "resume", str(folder), *arguments], "resume()", depth=2
    )
    if begun is None:
        warnings.warn(launcher.text_printed().strip(), stacklevel=3)
    return launcher


def _stale_files(target: str) -> list[Path]:
    """Return the files of a job that have changed since this process imported them.

    A class of `Job` knows when it was defined; of others, the time is that of this process's start.
    """
    module, _, name = target.rpartition(".")
    job = getattr(sys.modules.get(module), name, None)
    since = (definition_time(job) if job else None) or psutil.Process().create_time()
    imported = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    return [
        file
        for file in code_files(target)
        if str(file) in imported and file.stat().st_mtime > since
    ]


def wait_for(runs: Sequence[Run], timeout_s: float | None = None) -> int:
    """Wait until all these runs have ended; return the exit code of `orchestrator wait`.

    Raises:
        TimeoutError: one has not ended after so many seconds.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    codes: set[int] = set()
    for run in runs:
        left_s = None if timeout_s is None else max(0.0, deadline - time.monotonic())
        codes.add(EXIT_OF_STATE.get(run.wait(left_s), EXIT_FAILED))
    return EXIT_FAILED if EXIT_FAILED in codes else max(codes, default=EXIT_FINISHED)


def read_newest(run: RunDir, read: Callable[[Checkpoint], Value]) -> Value:
    """Return what `read` returns of a run's newest checkpoint.

    Raises:
        RunFolderError: there is none, or it is damaged.
    """
    run.existing()
    content = read_last(run.checkpoints, run.identity, lambda saved: (read(saved),))
    if content is None:
        if run.read_plan().get("program"):
            raise RunFolderError(
                f"{run.path} is a program's, which saves its weights its own way (in "
                f"{run.checkpoints}, if anywhere here); compare takes a safetensors file"
            )
        raise RunFolderError(f"{run.path} has no weights yet: no checkpoint was written")
    return content[0]


def weights_file(path: Path) -> Path:
    """Return the newest weights of a run: a safetensors file, or a folder of parts.

    Args:
        path: a run folder, or a file, which is returned.

    Raises:
        RunFolderError: the run has no checkpoint.
    """
    if path.is_file():
        return path
    return read_newest(RunDir(path.absolute()), lambda saved: weights_of(saved.folder))


def _direction(figure: str) -> tuple[int, str]:
    """Return 1 if the largest is best and -1 if the smallest is, and the figure's name."""
    if figure in SMALL_IS_GOOD:
        sentence = f"best({figure!r}) is the largest; the smallest: best('-{figure}')"
        warnings.warn(sentence, stacklevel=3)
    return (-1, figure[1:]) if figure.startswith("-") else (1, figure)


def _best_row(rows: Sequence[Record], sign: int, name: str, refusal: str) -> Record:
    """Return the row with the largest `sign` times the figure. Raises `UsageError` without one."""
    finite = [row for row in rows if _is_finite(row.get(name))]
    if not finite:
        names = {key for row in rows for key in row}
        why = "; it never was finite" if name in names else did_you_mean(name, names)
        raise UsageError(f"{refusal} {name!r}{why}")
    return max(finite, key=lambda row: sign * row[name])


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _write_page(path: Path, output: str | os.PathLike[str] | None) -> Path:
    target = path / "report.html" if output is None else _absolute(output)
    COMMANDS.load_function("report")([path], output=target, quiet=True)
    return target


# ------------------------------------------------------------------ A sweep


class Sweep:
    """The runs of a sweep or search: of `start_sweep` or `open_sweep`.

    Attributes:
        folder: of the sweep, with a run folder for each point that has begun.
    """

    def __init__(self, folder: Path, launcher: LauncherProcess | None = None) -> None:
        self.folder, self._launcher = folder, launcher

    def __repr__(self) -> str:
        return f"<sweep in {self.folder}>"

    @property
    def runs(self) -> list[Run]:
        """Return the points that have begun, by number."""
        if not self.folder.is_dir():
            raise RunFolderError(f"there is no folder {self.folder}")
        return [Run(path) for path in find_runs(self.folder)]

    @property
    def state(self) -> str:
        """Return "running" while anything of it is; else "failed" or "stopped" if any point is,
        and "finished" if none is.
        """
        return self._state()[0]

    def _state(self) -> tuple[str, float, list[Path]]:
        """Return the state, after how many seconds it is worth to look again, and the points that
        cannot be read.
        """
        at_work = is_locked(RunDir(self.folder))
        runs = [RunDir(run.folder) for run in self.runs]
        run_statuses = statuses(runs)[0]
        interval_s = max((class_of(kind_of(run)).status_interval_s for run in runs), default=0.0)
        states = {status.state for status in run_statuses}
        damaged = [status.folder for status in run_statuses if status.state == "damaged"]
        if at_work or not states <= {*OVER, *UNREADABLE}:
            state = "running"
        elif states & {"failed", "lost", *UNREADABLE}:
            state = "failed"
        else:
            state = "finished" if states and states <= {"finished", "pruned"} else "stopped"
        return state, interval_s, damaged

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until all points have ended, and return the sweep's state.

        To interrupt this leaves the sweep alone.

        Raises:
            TimeoutError: they have not after so many seconds. They go on.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        has_waited = False
        while True:
            state, interval_s, damaged = await_readable(self._state)
            if state != "running":
                if damaged and not has_waited:
                    has_waited = True
                    for folder in damaged:
                        await_run(RunDir(folder), existed=False)
                    continue
                if self._launcher is not None:
                    self._launcher.raise_error(LEAVE_S)
                return state
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{self.folder} is running after {timeout_s:g} s")
            time.sleep(min(max(POLL_S, interval_s), left_s))

    def follow(self) -> str:
        """Print a line as points begin and end, and the table of all at the end; return the state.
        To interrupt this leaves the sweep alone.
        """

        def wait() -> bool:
            with contextlib.suppress(TimeoutError):
                self.wait(FOLLOW_S)
                return False
            return True

        follow_sweep(RunDir(self.folder), Console(), wait)
        return self.wait()

    def cancel(self, *, now: bool = False) -> list[str]:
        """Ask all points to stop; see `Run.cancel`. Return sentences on what happens."""
        return cancel_sweep(self.folder, now=now)

    def resume(
        self, *words: str, job: Mapping[str, Any] | None = None, changed: bool = False
    ) -> Sweep:
        """Go on with the points that are not finished; see `Run.resume`."""
        self._launcher = _resume(self.folder, words, job, changed=changed)
        return self

    @property
    def table(self) -> list[Record]:
        """Return a row for each point: its folder, what it was given that others were not, its
        state, and its final figures, held-out ones as `held_out.NAME`.
        """
        runs = [RunDir(run.folder) for run in self.runs]
        recorded = [run.read_submission().get("overrides") or () for run in runs]
        varying = only_varying(
            [
                current_overrides(run, overrides)
                for run, overrides in zip(runs, recorded, strict=True)
            ]
        )
        rows: list[Record] = []
        for run, status, overrides in zip(runs, statuses(runs)[0], varying, strict=True):
            result, settings = run.read_result() or {}, flat(run.read_config())
            figures: Mapping[str, Any] = result.get("metrics") or status.evaluation
            rows.append(
                {
                    "folder": str(run.path),
                    **{key: settings.get(key, text) for key, text in overrides.items()},
                    "state": status.state,
                    "updates": status.updates,
                    "loss": result.get("loss", status.loss),
                    "seconds": result.get("seconds"),
                    **{f"{HELD_OUT}{name}": value for name, value in figures.items()},
                }
            )
        return rows

    def best(self, figure: str) -> Run:
        """Return the run whose final figure in `table` is best; see `Run.best`.

        Raises:
            UsageError: no run has this figure, or none that is finite.
        """
        sign, name = _direction(figure)
        try:
            row = _best_row(self.table, sign, name, f"no run in {self.folder} ended with a number")
        except UsageError as error:
            if self.state == "running":
                raise UsageError(f"{error}; the sweep is running: wait() first") from error
            raise
        return Run(Path(row["folder"]))

    def report(self, output: str | os.PathLike[str] | None = None) -> Path:
        """Write the page about all runs, and return its file; see `Run.report`."""
        return _write_page(self.folder, output)
