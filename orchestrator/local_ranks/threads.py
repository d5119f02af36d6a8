"""Ranks as threads, for tests and notebooks.

Results are exact (sums run in rank order), hundreds of ranks are cheap, and global state behaves as
between processes: only one rank runs at a time, and it yields only inside a collective. So torch's
global random generator belongs to one rank between two collectives.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from orchestrator.engine.torch.group import BaseGroup, ChainedWork, Work, sum_into
from orchestrator.errors import PeerLost

T = TypeVar("T")
_STACK_BYTES = 1 << 20  # hundreds of threads are cheap when their stacks are


class InProcessGroup(BaseGroup):
    """One thread's view of the group; make them with `run_in_threads`."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        super().__init__(rank=rank, size=hub.size, transport="threads")
        self._hub, self._called = hub, 0

    def transport_collectives(self) -> int | None:
        """Return the collectives that this rank has started."""
        return self._called

    def _start(self, operation: str, give: Any, finish: Callable[[dict[int, Any]], object]) -> Work:
        if isinstance(give, Tensor):  # a copy, as ranks that finish early overwrite theirs
            operation, give = f"{operation} of {give.numel()} {give.dtype}", give.clone()
        number, self._called = self._called, self._called + 1
        self._hub.post(number, self.rank, operation, give)
        return ChainedWork(after=lambda: finish(self._hub.await_all(number)))

    def _start_sum(self, flat: Tensor) -> Work:
        def finish(inputs: dict[int, Any]) -> None:
            total = inputs[0].clone()
            for rank in range(1, self.size):
                total += inputs[rank]
            flat.copy_(total)

        return self._start("all_reduce_sum", flat, finish)

    def _start_reduce_scatter(self, out: Tensor, tensor: Tensor) -> Work:
        def finish(inputs: dict[int, Any]) -> None:
            sum_into(out, [inputs[rank].chunk(self.size)[self.rank] for rank in range(self.size)])

        return self._start("reduce_scatter_sum", tensor, finish)

    def _start_gather(self, parts: list[Tensor], flat: Tensor) -> Work:
        def finish(inputs: dict[int, Any]) -> None:
            for rank, part in enumerate(parts):
                part.copy_(inputs[rank])

        return self._start("all_gather", flat, finish)

    def _start_uneven_gather(self, tensor: Tensor, pieces: list[Tensor]) -> Work:
        def finish(inputs: dict[int, Any]) -> None:
            for rank, piece in enumerate(pieces):
                piece.copy_(inputs[rank][0])

        operation = f"all_gather of pieces of {tensor.numel()} {tensor.dtype}"
        return self._start(operation, [pieces[self.rank].clone()], finish)

    def _start_uneven_reduce_scatter(self, pieces: list[Tensor]) -> Work:
        def finish(inputs: dict[int, Any]) -> None:
            sum_into(pieces[self.rank], [inputs[rank][self.rank] for rank in range(self.size)])

        sizes = [piece.numel() for piece in pieces]
        own_pieces = [piece.clone() for piece in pieces]
        return self._start(f"reduce_scatter_sum of {sizes}", own_pieces, finish)

    def _start_exchange(
        self, received: Tensor, sent: Tensor, receive_counts: list[int], send_counts: list[int]
    ) -> Work:
        def finish(inputs: dict[int, Any]) -> None:
            received.copy_(torch.cat([inputs[rank][self.rank] for rank in range(self.size)]))

        del receive_counts
        return self._start("all_to_all", sent.clone().split(send_counts), finish)

    def _start_broadcast(self, flat: Tensor, source: int) -> Work:
        return self._start(
            f"broadcast from {source}", flat, lambda inputs: flat.copy_(inputs[source])
        )

    def _start_barrier(self) -> Work:
        return self._start("barrier", None, lambda _: None)


class _Hub:
    """State shared by the threads: the turn, and the collectives in flight."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Condition()  # its lock is the turn: who holds it runs
        self._calls: dict[int, tuple[str, dict[int, Any]]] = {}  # what each rank gave, by number
        self._left: Counter[int] = Counter()  # ranks that have taken the result
        self._lost: str | None = None
        self._ended: set[int] = set()

    def post(self, number: int, rank: int, operation: str, give: Any) -> None:
        called, inputs = self._calls.setdefault(number, (operation, {}))
        if called != operation:
            self.lose(f"rank {rank} called {operation} where another called {called}")
            raise AssertionError(self._lost)
        inputs[rank] = give
        if len(inputs) == self.size:
            self.turn.notify_all()

    def await_all(self, number: int) -> dict[int, Any]:
        operation, inputs = self._calls[number]
        while len(inputs) < self.size:
            if gone := sorted(self._ended - inputs.keys()):
                self.lose(f"rank {gone[0]} ended without calling it")
            if self._lost is not None:
                raise PeerLost(f"a peer was lost during {operation}: {self._lost}")
            self.turn.wait()
        self._left[number] += 1
        if self._left[number] == self.size:
            del self._calls[number], self._left[number]
        return inputs

    def lose(self, why: str) -> None:
        self._lost = self._lost or why
        self.turn.notify_all()

    def end(self, rank: int) -> None:
        self._ended.add(rank)
        self.turn.notify_all()


def run_in_threads(size: int, function: Callable[[InProcessGroup], T]) -> list[T]:
    """Call `function(group)` on `size` ranks at once and give the results in rank order.

    A rank that raises is lost to the others: their next collective raises `PeerLost`, as it does
    between processes. The first error that is not such a consequence is raised here.

    >>> def add_up(group):
    ...     number = torch.tensor([float(group.rank)])
    ...     group.all_reduce_sum(number)
    ...     return number.item()
    >>> run_in_threads(4, add_up)
    [6.0, 6.0, 6.0, 6.0]
    """
    hub = _Hub(size)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run_rank(rank: int) -> None:
        with hub.turn:
            try:
                results[rank] = function(InProcessGroup(hub, rank))
                hub.end(rank)
            except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
                errors[rank] = error
                hub.lose(f"rank {rank} ended with {type(error).__name__}: {error}")

    before = threading.stack_size(_STACK_BYTES if size > 16 else 0)
    try:
        threads = [
            threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(size)
        ]
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(before)
    for thread in threads:
        thread.join()
    causes = [error for error in errors.values() if not isinstance(error, PeerLost)]
    for error in (*causes, *errors.values()):
        raise error
    return [results[rank] for rank in range(size)]
