"""The exceptions that people meet, as one small tree. The exit code belongs to the class.

Messages are written for the person: what was set (as they spelled it), what is needed, the nearest
value that works. Anything that is *not* one of these is a defect and keeps its traceback.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STOPPED = 3
EXIT_INTERRUPTED = 130
FENCED_RANK = 4  # a rank's own: no command ends with it
START_AGAIN = 75  # of a run's own script, in an allocation that runs share: start me again


class OrchestratorError(Exception):
    """Base of every error that is reported as a message rather than as a traceback."""

    exit_code = EXIT_FAILED


class UsageError(OrchestratorError):
    """What was asked for is wrong; nothing was started and nothing was written."""

    exit_code = EXIT_USAGE


def plainly_said(error: OrchestratorError) -> bool:
    """Whether a traceback would tell nothing more: something asked for is wrong, and we saw it."""
    return isinstance(error, UsageError) and error.__cause__ is None


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


class ClusterError(UsageError):
    """A cluster that refuses the request or is not there."""


class NotNow(ClusterError):
    """A cluster that cannot take it at this moment, and may later: nobody answers, or it takes no
    more of one's jobs.
    """


class TransportError(UsageError):
    """A transport that this machine cannot offer."""


class RendezvousError(OrchestratorError):
    """The ranks did not all come together in time; the message names those that are missing."""


class RanksMissing(RendezvousError):
    """Some ranks did not come. Never the fault of those who waited for them."""


class PeerLost(OrchestratorError):
    """A collective ended because another rank went away. Never the first cause of a failure."""


class NoWayOn(PeerLost):
    """Others are gone, and those that are left cannot, or must not, go on without them.

    Attributes:
        nodes: numbers of those nodes of which nobody is left.
    """

    def __init__(self, message: str, nodes: Iterable[int]) -> None:
        super().__init__(message)
        self.nodes = tuple(nodes)


class StateLost(PeerLost):
    """What is left of a group cannot put the optimizer's state together.

    Attributes:
        ranks: of that group, whose part nobody has.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"nobody has the part of rank {ranks[0]} of the optimizer's state")
        self.ranks = tuple(ranks)


class Fenced(PeerLost):
    """The others have gone on without this rank, which was silent for too long."""

    exit_code = FENCED_RANK


class RankHangs(OrchestratorError):
    """A rank gets nowhere, and does not work either."""


class NonFiniteError(OrchestratorError):
    """The loss or a gradient became NaN or infinite; raised on all ranks in the same update."""


class ReplicasDiffer(OrchestratorError):
    """Ranks hold different weights; raised on all ranks together.

    Attributes:
        ranks: those that are unlike most.
    """

    def __init__(self, message: str, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class SilenceError(OrchestratorError):
    """A collective was called between two boundaries by a job that did not declare it."""


class RunFailed(OrchestratorError):
    """A run ended because a rank failed."""


class Interrupted(OrchestratorError):
    """A person ended a command before it had done what it was for."""

    exit_code = EXIT_INTERRUPTED


class StopRequested(OrchestratorError):
    """The run was asked to stop and did, at a point from which it can be resumed."""

    exit_code = EXIT_STOPPED


def unreadable(error: OSError) -> RunFolderError:
    """What the file system says of a path that somebody named, as a message."""
    what = f"{shortened(error.filename)}: " if error.filename else ""
    return RunFolderError(f"{what}{error.strerror or error}")


def require_cwd() -> None:
    """Refuse to begin in a working folder that is gone. Raises `RunFolderError`."""
    try:
        os.getcwd()  # noqa: PTH109  # Path.cwd() would say no more
    except FileNotFoundError:
        raise RunFolderError(
            "the folder that you stand in does not exist any more; cd to another one"
        ) from None


def shortened(value: object, most: int = 60) -> str:
    """A value in a message: its beginning, and how long it is.

    >>> shortened("x" * 100, 10)
    'xxxxxxxxxx… (100 characters)'
    """
    try:
        text = str(value)
    except ValueError:  # an int of more digits than Python turns into text
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The entry of `known` that is spelled most like `word`, or None when none is close.

    >>> nearest("stpes", ["steps", "global_batch"])
    'steps'
    >>> nearest("zzz", ["steps"]) is None
    True
    """
    import difflib  # only a mistake pays for it

    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return matches[0] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The tail of a message: `; did you mean 'steps'?`, or the list of what is known.

    >>> did_you_mean("stpes", ["steps"])
    "; did you mean 'steps'?"
    >>> did_you_mean("zzz", ["b", "a"])
    '; known are: a, b'
    """
    known = sorted(known)
    match = nearest(word, known)
    if match is not None:
        return f"; did you mean '{match}'?"
    return f"; known are: {', '.join(known)}" if known else ""


MOST_SAID = 4000
"""Characters of what an error says; the rank's log has the rest."""


def words_of(error: BaseException) -> str:
    """What it says, cut where nobody would read on. Anybody's errors come here, so it may be that
    to print one is an error itself.

    >>> words_of(ValueError("x" * 5000)).strip("x")
    ' … (1,000 more characters in the log)'
    """
    try:
        text = str(error)
    except Exception as another:  # noqa: BLE001  # whatever its __str__ does
        return f"what it says cannot be printed ({type(another).__name__})"
    more = len(text) - MOST_SAID
    return text if more <= 0 else f"{text[:MOST_SAID]} … ({more:,} more characters in the log)"


def spans(numbers: Iterable[int]) -> list[str]:
    """Numbers in order, neighbours joined.

    >>> spans([3, 1, 2, 7])
    ['1-3', '7']
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [f"{first}" if first == last else f"{first}-{last}" for first, last in found]


def describe_status(status: int) -> str:
    """An exit status in words.

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
