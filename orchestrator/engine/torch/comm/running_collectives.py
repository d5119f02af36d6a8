"""Collectives under way: a transport's own, with errors in our words, and ours made of messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from orchestrator.engine.common.waiting import for_others
from orchestrator.engine.torch.comm.held_by_gloo import Held
from orchestrator.errors import PeerLost

# What gloo and NCCL say when a peer is gone or silent. Anything else is a defect, left as it is.
_LOST = re.compile(
    r"reset by peer|closed by peer|broken pipe|connection (was )?(reset|closed|aborted|refused)|"
    r"timed? ?out|timeout caused pair closure|unhandled system error|remote process exited|"
    r"socket closed|communicator was aborted|connection terminated|no route to host",
    re.IGNORECASE,
)
_TAG = 0


def as_peer_lost(error: RuntimeError, operation: str, rank: int) -> PeerLost | None:
    """The `PeerLost` that a transport's error stands for; None when it is about something else."""
    text = str(error)
    if _LOST.search(text) is None:
        return None
    first_line = text.strip().splitlines()[0]
    return PeerLost(f"rank {rank} lost a peer during {operation}: {first_line}")


class Started:
    """A transport's work handle whose errors are ours. Holds the tensors until it is done.

    Args:
        tensors: views that nobody else in Python has.
        held: where they go when it is done; None when the transport has let go of them by then.
    """

    def __init__(
        self, work: Any, operation: str, rank: int, tensors: Sequence[Tensor], held: Held | None
    ) -> None:
        self._work, self._operation, self._rank, self._tensors = work, operation, rank, tensors
        self._held = held

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            with for_others(self._operation):
                self._work.wait()
        except RuntimeError as error:
            lost = as_peer_lost(error, self._operation, self._rank)
            if lost is None:
                raise
            raise lost from error
        self._work = None
        if self._held is not None:
            self._held.keep(self._tensors)
        self._tensors = ()


class Pairwise:
    """Every rank's piece to every other, into place, for gloo.

    In turn d each rank sends to the d-th after it while it hears from the d-th before it, which
    keeps both directions of every link busy, and no link with more than one at a time. gloo's own
    all-to-all uses one direction after the other, and its all-gather copies the whole result.

    Args:
        group: gloo's, whose errors are for the caller to translate.
        into: a place for every rank's piece; the one of this rank is left alone.
        pieces: one for every rank. Empty ones do not travel: both ends know that they are.
        at_once: take all turns at once: while nobody waits, a next one would not begin.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        into: Sequence[Tensor],
        pieces: Sequence[Tensor],
        *,
        at_once: bool = False,
    ) -> None:
        self._group, self._rank, self._into, self._pieces = group, rank, into, pieces
        self._turn, self._at_once = 0, at_once
        self._under_way: list[Any] = []
        self._next()

    def wait(self) -> None:
        while self._under_way:
            for work in self._under_way:
                work.wait()
            self._next()
        self._into = self._pieces = ()

    def _next(self) -> None:
        size, self._under_way = len(self._pieces), []
        while self._turn < size - 1 and (self._at_once or not self._under_way):
            self._turn += 1
            to, source = (self._rank + self._turn) % size, (self._rank - self._turn) % size
            if self._into[source].numel():
                self._under_way.append(self._group.recv([self._into[source]], source, _TAG))
            if self._pieces[to].numel():
                self._under_way.append(self._group.send([self._pieces[to]], to, _TAG))
