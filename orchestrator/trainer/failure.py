"""Descriptions of errors of jobs, with remedies.

A job was mostly written for another loop, which began a process group, moved batches and called
backward. The errors that remain of it are Python's and torch's, and lead nowhere in this one.
"""

from __future__ import annotations

import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from orchestrator.agent.root_cause import MEMORY_REMEDY
from orchestrator.client.loop import CallbackNote
from orchestrator.errors import OrchestratorError, error_text
from orchestrator.source.modules import PACKAGE

NOT_USERS = (
    PACKAGE,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
)

_BY_PHRASE = (
    ("out of memory", MEMORY_REMEDY),  # CUDA's
    ("t allocate memory", MEMORY_REMEDY),  # torch's own on a CPU, and the kernel's
    (
        "Default process group has not been initialized",
        (
            "there is no default process group here, since each run has a group of its own: a job "
            "needs neither torch.distributed nor DistributedDataParallel, as the boundary reduces"
        ),
    ),
    (
        "env:// rendezvous",
        "ranks have met already when a job begins: leave init_process_group() out",
    ),
    (
        "backward through the graph a second time",
        "loss() only returns the loss, and the engine calls backward(): leave loss.backward() out",
    ),
    (
        "Torch not compiled with CUDA enabled",
        "the engine moves model and batches to where a rank computes: leave .cuda() out",
    ),
    (
        "does not have a deterministic implementation",
        (
            "accumulation.reduction=reproducible needs such kernels: use another operation there, "
            "or accumulation.reduction=fast"
        ),
    ),
    ("Cannot copy out of meta tensor", "model() must give a model with numbers (to_empty)"),
    ("EOF when reading a line", "ranks have no terminal to read from"),
)
_FORMATS = re.compile(r"\b(half|bfloat16|float\d*|double)(?:tensor)?\b", re.IGNORECASE)
_OF_FORMATS = re.compile(r"dtype|scalar type|Input type|should be same as")
FORMAT_REMEDY = (
    "the data have another number format than the weights: convert them in dataset() or loss(), as "
    "in x.float() (x.astype(mindspore.float32)), or to float64 with train.precision=float64; to "
    "compute in half precision, give float32 data and set train.precision=bfloat16"
)
_BY_KIND = {
    "MemoryError": MEMORY_REMEDY,
    "BdbQuit": "ranks have no terminal for a debugger: leave breakpoint() out, or call the job's "
    "methods in a script of your own",
    "SystemExit": "something in the job ended the process: sys.exit() or exit()",
}


def remedy(error: BaseException) -> str | None:
    """Return advice to the author of a job; None for an error that is not specific to this loop.

    >>> remedy(ValueError("Default process group has not been initialized, please …"))[:33]
    'there is no default process group'
    """
    text = error_text(error)
    if _OF_FORMATS.search(text) and len({name.lower() for name in _FORMATS.findall(text)}) > 1:
        return FORMAT_REMEDY
    by_phrase = (sentence for phrase, sentence in _BY_PHRASE if phrase in text)
    by_kind = (_BY_KIND.get(kind.__name__) for kind in type(error).__mro__)
    return next(by_phrase, None) or next(filter(None, by_kind), None)


# ----------------------------------------------------------------------
# The cause of a failure, as its record has it (`rundir.outcome.failure_record`).


def describe(error: BaseException) -> str:
    """Return the cause: our errors as they are, of others the type and the first line. The rest,
    as all signatures of an operator of torch, is in the rank's log.
    """
    if ended := _loader_worker(error):
        return ended
    text = error_text(error)
    if isinstance(error, OrchestratorError):
        return text
    first, *others = text.strip().splitlines() or [""]
    first = first.rstrip(" :") if others else first
    named = f"{type(error).__name__}: {first}" if first else type(error).__name__
    named += _place(error)
    notes: list[str] = getattr(error, "__notes__", [])
    named += "".join(f", {note}" for note in notes if isinstance(note, CallbackNote))
    advice = remedy(error)
    return named if advice is None else f"{named} ({advice})"


def _place(error: BaseException) -> str:
    """Return where in the user's code an error was raised: the deepest call that is in no package.

    The file is named as Python's path has it, for it may lie in a copy of the code.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            path = Path(frame.filename)
            roots = [Path(entry) for entry in sys.path if entry and path.is_relative_to(entry)]
            nearest = max(roots, key=lambda root: len(root.parts), default=None)
            file = path.relative_to(nearest) if nearest else path
            return f", at {file}:{frame.lineno} in {frame.name}"
    return ""


def _is_users(file: str) -> bool:
    """Return whether a file is in no package, so that its reader can change it."""
    path = Path(file)
    return path.is_absolute() and not any(path.is_relative_to(root) for root in NOT_USERS)


def hide_own_frames(error: BaseException) -> None:
    """Let an error's traceback begin with the first call outside this package, if there is one."""
    tb = error.__traceback__
    while tb is not None and Path(tb.tb_frame.f_code.co_filename).is_relative_to(PACKAGE):
        tb = tb.tb_next
    if tb is not None:
        error.__traceback__ = tb


class _ShortStack(traceback.StackSummary):
    """A stack whose runs of calls within packages are one line and their last call.

    A report shows a log's last lines. Between a line of a job and the one that raised, torch alone
    can have more calls than that.
    """

    def format(self) -> list[str]:
        return list(self._lines())

    def _lines(self) -> Iterator[str]:
        for is_users, group in groupby(self, key=lambda frame: _is_users(frame.filename)):
            frames = list(group)
            hidden = 0 if is_users else len(frames) - 1
            if hidden > 1:
                yield f"  ... {hidden} calls within packages\n"
                frames = frames[-1:]
            yield from traceback.StackSummary.from_list(frames).format()


def short_traceback(error: BaseException) -> str:
    """Format a traceback for a log, with few of the calls that are in packages."""
    whole = traceback.TracebackException.from_exception(error)
    pending: list[traceback.TracebackException | None] = [whole]
    while pending:
        part = pending.pop()
        if part is not None:
            part.stack = _ShortStack(part.stack)
            pending += [part.__cause__, part.__context__, *(part.exceptions or ())]
    return "".join(whole.format())


_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)")
_BY_SIGNAL = re.compile(r"killed by signal: (.*?)\.")
_REMEDIES = {
    "SIGKILL": ", mostly by the kernel, for want of memory: fewer train.loader_workers, or a "
    "smaller accumulation.micro_batch, need less",
    "SIGBUS": ", mostly for want of shared memory (/dev/shm): fewer train.loader_workers need less",
}


def _loader_worker(error: BaseException) -> str | None:
    """Return a sentence about a loader's process that ended, if that caused the error.

    torch raises an error of its own wherever the rank is, whose cause says more.
    """
    ended = ""
    cause: BaseException | None = error
    while cause is not None:
        if match := _WORKER.match(error_text(cause)):
            worker, what = f"a loader worker of this rank (process {match[1]})", match[2]
            if killed := _BY_SIGNAL.search(what):
                names = {signal.strsignal(number): number.name for number in signal.Signals}
                name = names.get(killed[1], killed[1])
                remedy = _REMEDIES.get(name, "; what it said last is in this rank's log")
                return f"{worker} was killed by {name}{remedy}"
            ended = f"{worker} {what.partition('.')[0]}; the log has what it said last"
        cause = cause.__cause__ or cause.__context__
    return ended or None
