"""The exceptions that users see, as one small tree. The exit code belongs to the class.

Messages are written for the user: what was set (as they spelled it), what is needed, the nearest
value that works. Anything that is *not* one of these is a defect and keeps its traceback.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STOPPED = 3
EXIT_UNJUDGED = 4  # of an audit
EXIT_TIMED_OUT = 124  # of `wait`, as coreutils' timeout has it
EXIT_INTERRUPTED = 130
EVICTED_RANK = 4  # a rank's own: no command ends with it
START_AGAIN = 75
"""Of `node_entry.py after`: start srun again in this allocation; of an agent: start it again."""


class OrchestratorError(Exception):
    """Base of every error that is reported as a message rather than as a traceback."""

    exit_code = EXIT_FAILED


class UsageError(OrchestratorError):
    """A wrong request; nothing was started and nothing was written."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A configuration key or value that cannot be used."""


class PlanError(UsageError):
    """A batch, a schedule or a data set that cannot be planned."""


class JobError(UsageError):
    """A job class that is missing, is not a job, or breaks the job's contract."""


class DataError(UsageError):
    """A data folder that is missing or damaged."""


class RunFolderError(UsageError):
    """A run folder that is missing, damaged, not writable, or another run's."""


class RefusedByRank(UsageError):
    """A job that a rank refused before the first update, so that its run holds nothing."""


class RunFolderRemoved(RunFolderError):
    """The removal of a run folder while its run was using it."""

    exit_code = EXIT_FAILED


class ClusterError(UsageError):
    """A cluster that refuses the request or does not exist."""


class NotNow(ClusterError):
    """A cluster that cannot accept it now, and may later: no answer, or too many queued jobs."""


class TransportError(UsageError):
    """A transport that this machine cannot offer."""


class RendezvousError(OrchestratorError):
    """A rendezvous that timed out; the message names the missing ranks."""


class RanksMissing(RendezvousError):
    """Missing ranks. Never the fault of the ranks that waited for them."""


class PeerLost(OrchestratorError):
    """A collective that ended because another rank was lost. Never the root cause of a failure."""


PEER_LOST = re.compile(
    r"connection (?:closed|reset) by peer|connection reset|broken pipe|connection refused|"
    r"socket (?:closed|timeout)|pair closure|failed to recv, got 0 bytes|"
    r"recvvalue failed|remote process exited|ncclremoteerror|nccl.*network error|"
    r"collective operation timeout|client socket has (?:timed out|failed to connect)|"
    r"timed out waiting \d+ms for (?:recv|send) operation|the other (?:end|side) closed",
    re.IGNORECASE,
)
"""Messages of frameworks for a rank that was lost, or never came."""


class Unrecoverable(PeerLost):
    """A loss after which the remaining ranks cannot, or must not, continue.

    Attributes:
        nodes: numbers of the nodes without remaining ranks.
    """

    def __init__(self, message: str, nodes: Iterable[int]) -> None:
        super().__init__(message)
        self.nodes = tuple(nodes)


class StateLost(PeerLost):
    """A loss after which the rest of a group cannot restore the optimizer's state.

    Attributes:
        ranks: of that group, whose part is lost.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"no rank has the part of rank {ranks[0]} of the optimizer's state")
        self.ranks = tuple(ranks)


class Evicted(PeerLost):
    """Eviction of this rank, which was silent for too long: the others continue without it."""

    exit_code = EVICTED_RANK


class Excluded(Evicted):
    """Exclusion of this rank, which computed wrongly: the others continue without it, for good."""


class NonFiniteError(OrchestratorError):
    """A NaN or infinite loss or gradient, raised on all ranks in the same update."""


class ReplicasDiffer(OrchestratorError):
    """Different weights on some ranks, raised on all ranks together.

    Attributes:
        ranks: those that differ from the majority.
    """

    def __init__(self, message: str, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class WrongResult(OrchestratorError):
    """A wrong result of some ranks, found by computing it again; raised on all ranks together.

    Attributes:
        ranks: by their numbers in the attempt; all that may be wrong, where that is undecided.
    """

    def __init__(self, message: str, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class SilenceError(OrchestratorError):
    """A collective called between two boundaries by a job that did not declare it."""


class RunFailed(OrchestratorError):
    """The end of a run because a rank failed."""


class Interrupted(OrchestratorError):
    """The end of a command by the user, before it had finished."""

    exit_code = EXIT_INTERRUPTED


class StopRequested(OrchestratorError):
    """The requested stop of a run, at a point from which it can be resumed."""

    exit_code = EXIT_STOPPED


def expand_user(text: str) -> Path:
    """Return a path with its `~` or `~user` replaced. Raises `ConfigError` for an unknown user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        user = text.partition("/")[0].removeprefix("~")
        raise ConfigError(f"{text}: there is no user {user}") from error


def require_cwd() -> None:
    """Refuse to begin in a working folder that was deleted. Raises `RunFolderError`."""
    try:
        os.getcwd()  # noqa: PTH109  # Path.cwd() would say no more
    except FileNotFoundError:
        raise RunFolderError(
            "the working folder does not exist any more; cd to another one"
        ) from None


def shortened(value: object, most: int = 60) -> str:
    """Shorten a value in a message: its beginning, and how long it is.

    >>> shortened("x" * 100, 10)
    'xxxxxxxxxx… (100 characters)'
    """
    try:
        text = str(value)
    except ValueError:  # an int of more digits than Python turns into text
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the entry of `known` that is spelled most like `name`, or None when none is close.

    >>> nearest("stpes", ["steps", "global_batch"])
    'steps'
    >>> nearest("zzz", ["steps"]) is None
    True
    """
    import difflib  # only a mistake pays for it

    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the tail of a message: `; did you mean 'steps'?`, or the list of known names.

    >>> did_you_mean("stpes", ["steps"])
    "; did you mean 'steps'?"
    >>> did_you_mean("zzz", ["b", "a"])
    '; known are: a, b'
    """
    known = sorted(known)
    match = nearest(name, known)
    if match is not None:
        return f"; did you mean '{match}'?"
    return f"; known are: {', '.join(known)}" if known else ""


LONGEST_MESSAGE = 4000
"""Characters of what an error says; the rank's log, or `-v`, has the rest."""


def error_text(error: BaseException) -> str:
    """Return an error's message, shortened. A third party's `__str__` may raise itself.

    >>> error_text(ValueError("x" * 5000)).strip("x")
    ' … (1,000 more characters in the log)'
    """
    try:
        text = str(error)
    except Exception as another:  # noqa: BLE001  # whatever its __str__ does
        return f"what it says cannot be printed ({type(another).__name__})"
    more = len(text) - LONGEST_MESSAGE
    return (
        text if more <= 0 else f"{text[:LONGEST_MESSAGE]} … ({more:,} more characters in the log)"
    )


def describe_status(status: int) -> str:
    """Describe an exit status.

    >>> describe_status(-9), describe_status(5)
    ('killed by signal 9 (SIGKILL)', 'exited with code 5')
    """
    if status < 0:
        try:
            name = f" ({signal.Signals(-status).name})"
        except ValueError:
            name = ""
        return f"killed by signal {-status}{name}"
    return f"exited with code {status}"
