"""A replay's own run: a copy of a run as it was at a checkpoint, resumed elsewhere.

Everything in the copy's folder is the replay's: nothing is written into the run itself. Large files
are hard links, which nothing changes in place.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.api import Run, open_run
from orchestrator.config.command_line import key_of, overrides_of
from orchestrator.config.schema import Config
from orchestrator.errors import EXIT_USAGE, OrchestratorError, RunFailed, UsageError
from orchestrator.replay.observer import LEAVES, REQUEST
from orchestrator.replay.recorded import RecordedRun
from orchestrator.rundir.files import make_private, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import History, read_metrics
from orchestrator.runs.inputs import INPUTS
from orchestrator.snapshot import CODE_VARIABLE, RECORD
from orchestrator.source.modules import PACKAGE

POLL_S = 0.1
LONGEST_HANG_S = 10 * 365 * 24 * 3600  # a person in pdb takes their time
LOG_LINES = 15
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a replay computes.

    Attributes:
        update: to look at.
        last: to compute; all ranks stop after it.
        gradients: also digest each micro-step's gradient by parameter, in `update`.
        by_sample: each sample of it is a micro-step of its own.
        keep_before: save a checkpoint right before `update`, too.
        debug_step: the micro-step of this process to stop in with pdb.
        socket: for pdb.
    """

    update: int
    last: int
    gradients: bool = False
    by_sample: bool = False
    keep_before: bool = False
    debug_step: int | None = None
    socket: str = ""

    def to_json(self) -> dict[str, Any]:
        request: dict[str, Any] = {
            "update": self.update,
            "last": self.last,
            "gradients": self.gradients,
        }
        if self.debug_step is not None:
            request["debug"] = {"step": self.debug_step, "socket": self.socket}
        return request


@dataclass(kw_only=True)
class Replay:
    """A replay that has ended: its own records.

    Attributes:
        first: the first update that it has computed.
    """

    run: RunDir
    first: int

    @cached_property
    def history(self) -> History:
        return read_metrics(self.run.metrics)

    @cached_property
    def lines(self) -> dict[int, Line]:
        """What the observers wrote, by update: the micro-steps of all ranks, by number."""
        lines: dict[int, Line] = {}
        rank = 0
        while (path := self.run.path / LEAVES.format(rank)).exists():
            for text in path.read_text("utf-8").splitlines():
                line: Line = json.loads(text)
                whole = lines.setdefault(line["update"], {**line, "leaves": []})
                whole["leaves"] = sorted(
                    [*whole["leaves"], *line["leaves"]], key=lambda leaf: leaf["leaf"]
                )
            rank += 1
        return lines


@dataclass(kw_only=True)
class Scratch:
    """Replays of one run, below a folder that is removed at the end.

    Attributes:
        say: shows a line of progress.
        overrides: of the user: where to compute.
    """

    recorded: RecordedRun
    folder: Path
    say: Callable[[str], None]
    overrides: Sequence[str] = ()
    _replays: int = field(default=0, init=False)

    def words(self, request: Request) -> list[str]:
        """Return the overrides with which the copy is resumed."""
        config, own = self.recorded.config, dict[str, Any]()
        typed = {key_of(word) for word in self.overrides}
        own |= {
            "cluster.nodes": 1,
            "cluster.ranks_per_node": 1,
            "run.callbacks": ["replay"],
            "run.survive": False,
            "run.max_replacements": 16,
            "run.max_restarts": 0,
            "notify.command": None,
            "notify.webhook": None,
        }
        if config.cluster.kind != "local" and "cluster" not in typed:
            own["cluster"] = "local"  # a file: what it does not say is at its default
            for name, value in config.cluster.environment.items():
                own[f"cluster.environment.{name}"] = value
        if request.debug_step is not None:
            own["cluster.hang_timeout_s"] = LONGEST_HANG_S
        if not self.recorded.is_program:
            own |= self._words_of_job(config, request)
        if self._is_local(typed):
            own |= self._code_words()
        elif config.cluster.kind == "slurm" or "cluster" in typed:
            own["cluster.requeue"] = False  # the stop after the last update is the end
        words = ["tracker=none"] if "tracker" not in typed else []
        for key, value in own.items():
            if key == "cluster":
                words.append("cluster=local")
            elif key not in typed:
                words += overrides_of(key, value)
        return [*words, *self.overrides]

    def _words_of_job(self, config: Config, request: Request) -> dict[str, Any]:
        plan, batch = self.recorded.plan_figures, config.accumulation
        own: dict[str, Any] = {
            "train.evaluate_every": 0,
            "train.keep_best": None,
            "train.patience": None,
            "train.checkpoint_in_background": False,
            "train.keep_checkpoints": 1000,
            "train.checkpoint_every": request.update if request.keep_before else 0,
            # The run had finite values up to here, and a last one is to be looked at.
            "train.on_non_finite": "skip",
            "accumulation.balance": "even",
            "engine.shard_model": "none",
            "engine.shard_optimizer": False,
            "accumulation.sentinel_every": None,
            "accumulation.sentinel": "warn",
        }
        if request.by_sample:
            own |= {
                "accumulation.micro_tokens": None,
                "accumulation.pad_to": 1,
                "accumulation.reduction": "fast",
                "accumulation.micro_batch": 1,
            }
        elif batch.micro_tokens is None and not self.has_shape_of_run():
            sizes = [size for sizes in plan.get("micro_batches") or () for size in sizes]
            own["accumulation.micro_batch"] = plan.get("micro_batch") or max(sizes, default=1)
        if "accumulation.micro_batch" in own:
            own |= {"accumulation.global_batch": plan["global_batch"], "accumulation.steps": None}
        return own

    def has_shape_of_run(self) -> bool:
        """Return whether the user asks for as many ranks as the run's plan has."""
        asked = {key_of(word): word.partition("=")[2] for word in self.overrides}
        nodes, width = (asked.get(f"cluster.{name}", "1") for name in ("nodes", "ranks_per_node"))
        if not (nodes.isdecimal() and width.isdecimal()):
            return False
        return int(nodes) * int(width) == self.recorded.plan_figures.get("ranks")

    def _is_local(self, typed: set[str]) -> bool:
        return not typed & {"cluster", "cluster.kind"}

    def code_copy(self) -> Path | None:
        """Return the copy of the code that computed the newest attempt, if the run has one."""
        run = self.recorded.run
        folders = [run.snapshot(number) for number in range(run.latest_attempt, -1, -1)]
        return next((folder for folder in folders if (folder / RECORD).exists()), None)

    @property
    def uses_copy(self) -> bool:
        """True if the run's own copy of the code is replayed, not today's code."""
        typed = {key_of(word) for word in self.overrides}
        return self._is_local(typed) and self.code_copy() is not None

    def _code_words(self) -> dict[str, Any]:
        """Return variables that make ranks import the run's copy of the code."""
        copy = self.code_copy()
        if copy is None:
            return {}
        roots = json.loads((copy / RECORD).read_text())["roots"]
        # Of this package the present one is used, unless the job is part of the same folder.
        own = {root for root in roots if Path(root) == PACKAGE.parent} if len(roots) > 1 else set()
        path = [str(copy / name) for root, name in roots.items() if root not in own]
        path += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        path += [str(PACKAGE.parent), str(self.recorded.run.read_submission().get("folder") or "")]
        return {
            "cluster.environment.PYTHONPATH": os.pathsep.join(filter(None, path)),
            "cluster.environment.PYTHONSAFEPATH": "1",  # the working folder has today's code
            f"cluster.environment.{CODE_VARIABLE}": str(copy),
        }

    def compute(self, request: Request, checkpoint: Path | None) -> Replay:
        """Compute from a checkpoint (None: from the initial weights) to `request.last`.

        Raises:
            OrchestratorError: it could not be started, or failed.
        """
        run = self._copied(checkpoint, request)
        first = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
        with stop_on_signals():
            started: Run | None = None
            try:
                started = open_run(run.path)
                self._resume(started, request)
                started.wait()
            except BaseException:
                if started is not None:
                    _end(started)
                raise
        self._raise_failure(started)
        return Replay(run=run, first=first)

    def start(self, request: Request, checkpoint: Path | None) -> Run:
        """Start a replay that the caller follows, and ends."""
        started = open_run(self._copied(checkpoint, request).path)
        self._resume(started, request)
        return started

    def _resume(self, run: Run, request: Request) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.resume(*self.words(request), changed=True)
        for warning in caught:
            # In reproducible mode neither ranks nor their shares change a bit.
            if self.overrides or not self.recorded.is_exact:
                self.say(f"note: {warning.message}")

    def _raise_failure(self, run: Run) -> None:
        status = run.status
        if status.state in ("finished", "stopped"):
            return
        log = run.logs(lines=LOG_LINES).strip() if RunDir(run.folder).rank_log(0).exists() else ""
        culprit = (RunDir(run.folder).read_result() or {}).get("culprit") or {}
        why = str(culprit.get("cause") or status.reason or status.state)
        last = f"\nthe last lines of its log:\n{log}" if log and why not in log else ""
        kind = UsageError if culprit.get("usage") else RunFailed
        error = kind(f"the replay of {self.recorded.path} failed: {why}{last}")
        error.exit_code = EXIT_USAGE if culprit.get("usage") else error.exit_code
        raise error

    def _copied(self, checkpoint: Path | None, request: Request) -> RunDir:
        """Make the copy, at a checkpoint."""
        source, copy = self.recorded.run, RunDir(self.folder / f"replay-{self._replays}")
        self._replays += 1
        copy.create()
        for path in (source.config, source.plan, source.environment):
            if path.exists():
                shutil.copyfile(path, copy.path / path.name)
        # The differences of inputs are those of the run, which are named before.
        noted = source.read_submission()
        write_json(copy.submission, {key: noted[key] for key in noted if key != INPUTS})
        for path in (source.initial_weights, source.initial_state, source.speeds):
            _link(path, copy.path / path.name)
        if checkpoint is not None:
            _link(checkpoint, copy.checkpoints / checkpoint.name)
        write_json(copy.path / REQUEST, request.to_json())
        return copy


def _link(path: Path, to: Path) -> None:
    """Link a file, or the files of a folder; copy them where the file system has no hard links."""
    if path.is_dir():
        to.mkdir(mode=0o700)
        for file in path.iterdir():
            _link(file, to / file.name)
    elif path.exists():
        try:
            os.link(path, to)
        except OSError:
            shutil.copyfile(path, to)


def _end(run: Run) -> None:
    """End a run at once, and wait until nothing of it is left."""
    with contextlib.suppress(OrchestratorError):
        if not run.has_ended:
            run.cancel(now=True)
            run.wait(30.0)
    with contextlib.suppress(OrchestratorError):
        while not run.has_ended:
            time.sleep(POLL_S)


@contextlib.contextmanager
def stop_on_signals() -> Generator[None]:
    """Let SIGTERM and SIGHUP end the replay as Ctrl-C does: a run outlives the command that began
    it.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def scratch(
    recorded: RecordedRun, overrides: Sequence[str], say: Callable[[str], None]
) -> Generator[Scratch]:
    """Make a folder for replays beside the run, on the same file system; remove it after."""
    parent = recorded.path.parent
    place = parent if os.access(parent, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix=f".{recorded.path.name}.replay-", dir=place))
    try:
        make_private(folder)
        yield Scratch(recorded=recorded, folder=folder, say=say, overrides=tuple(overrides))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
