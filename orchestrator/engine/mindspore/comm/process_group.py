"""`MindSporeGroup`: a `Group` over MCCL (CPU), NCCL or HCCL, formed without `msrun`.

MindSpore knows one world per process, so an attempt has one generation. A collective is launched
from the main thread and waited for beside a watch on the peers, so that a dead one raises
`PeerLost` at once instead of after the collective's time-out. Not here: collectives with a
gradient (`collectives.py`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from orchestrator.engine.common.place_in_group import Member, checked_sizes
from orchestrator.engine.common.waiting import for_others
from orchestrator.engine.mindspore.comm.liveness import Watch
from orchestrator.engine.mindspore.comm.scheduler import Scheduler
from orchestrator.errors import PeerLost

POLL_S = 0.05
REDUCED_BY_MCCL = (ms.float32, ms.float16)
GATHERED_BY_MCCL = (ms.float32, ms.int32)
TIMED_OUT = ("timeout", "timed out", "time out")


class MindSporeGroup(Member):
    """Ranks in processes. With one rank nothing is sent and nothing is counted.

    Args:
        watch: tells of lost peers; None for a lone rank.
        scheduler: MindSpore's, on rank 0 of several.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        transport: str,
        generation: int = 0,
        watch: Watch | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        super().__init__(rank=rank, size=size, generation=generation, transport=transport)
        self._watch, self._scheduler = watch, scheduler
        self._told: set[str] = set()

    # ------------------------------------------------------------------ collectives

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over ranks, in place. Same shape and dtype on all ranks."""
        for total in self.sums([tensor]):
            tensor.assign_value(total)

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over ranks of several tensors, one collective each, launched together."""
        self.silence.check("all_reduce_sum")
        if self._size == 1:
            return list(tensors)
        totals: list[Tensor] = []
        for tensor in tensors:
            self._count(_bytes(tensor), 2 * (self._size - 1) * _bytes(tensor))
            totals.append(self._launch_sum(tensor.reshape(-1)).reshape(tensor.shape))
        self.wait(totals, "all_reduce_sum")
        return totals

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenate the ranks' tensors along axis 0; see `Group.all_gather`."""
        self.silence.check("all_gather")
        every = checked_sizes(tensor.shape, sizes, self._rank, self._size)
        if self._size == 1:
            return tensor.copy()
        row = math.prod(tensor.shape[1:])
        self._count(_bytes(tensor), (self._size - 1) * sum(every) * row * tensor.itemsize)
        gathered = self._launch_gather(tensor, every)
        self.wait([gathered], "all_gather")
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Replace `tensor` by rank `source`'s, in place."""
        self.silence.check("broadcast")
        if not 0 <= source < self._size:
            raise ValueError(f"`source` must be a rank below {self._size}, but is {source}")
        if self._size == 1:
            return
        self._count(_bytes(tensor), (self._size - 1) * _bytes(tensor))
        carried, back = self._as_carried(tensor.reshape(-1))
        broadcast: Any = ops.Broadcast(source)
        (result,) = broadcast((carried,))
        self.wait([result], "broadcast")
        tensor.assign_value(back(result).reshape(tensor.shape))

    def barrier(self) -> None:
        """Return once every rank has called."""
        self.silence.check("barrier")
        if self._size == 1:
            return
        self._counters.collectives += 1
        # MCCL has no barrier of its own.
        self.wait([self._launch_sum(ops.zeros((1,), ms.float32))], "barrier")

    def close(self) -> None:
        """Say goodbye to the peers, and end the scheduler. The group is of no use afterwards."""
        closing: Any = self._watch
        if closing is not None:
            closing.close()
        if self._scheduler is not None:
            self._scheduler.end()

    # ------------------------------------------------------------------ the parts

    def _launch_sum(self, flat: Tensor) -> Tensor:
        if self._transport != "mccl" or flat.dtype in REDUCED_BY_MCCL:
            reduce: Any = ops.AllReduce()
            return reduce(flat)
        self._say_once(
            f"MCCL has no all-reduce of {flat.dtype}; the ranks' parts are gathered and added in "
            f"the order of ranks instead"
        )
        parts = self._launch_gather(flat, (flat.shape[0],) * self._size)
        return parts.reshape(self._size, -1).sum(axis=0).astype(flat.dtype)

    def _launch_gather(self, tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Equal parts are gathered, so shorter ones travel padded to the longest."""
        longest = max(sizes)
        carried, back = self._as_carried(tensor)
        missing = longest - tensor.shape[0]
        if missing:
            padding = ops.zeros((missing, *carried.shape[1:]), carried.dtype)
            carried = ops.concat([carried, padding]) if tensor.shape[0] else padding
        if carried.size == 0:
            return tensor.copy()
        gathered = back(ops.AllGather()(carried))
        if min(sizes) == longest:
            return gathered
        pieces = [
            gathered[place * longest : place * longest + size] for place, size in enumerate(sizes)
        ]
        return ops.concat([piece for piece in pieces if piece.shape[0]])

    def _as_carried(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """`tensor` in a type that the transport carries, and the way back."""
        dtype = tensor.dtype
        if self._transport != "mccl" or dtype in GATHERED_BY_MCCL:
            return tensor, lambda result: result
        if dtype in (ms.float64, ms.int64):
            # MCCL takes these, but a float64 keeps a float32's digits only and an int64 its lower
            # half; int32 arrives as it was, so the bits travel as pairs of those.
            array = np.ascontiguousarray(tensor.asnumpy())
            rest = array.shape[1:]
            bits = array.reshape(array.shape[0], math.prod(rest)).view(np.int32)

            def as_before(result: Tensor) -> Tensor:
                self.wait([result], "all_gather")
                return Tensor(result.asnumpy().view(array.dtype).reshape(-1, *rest))

            return Tensor(bits), as_before
        wide = ms.float32 if dtype in (ms.float16, ms.bfloat16) else ms.int32
        return tensor.astype(wide), lambda result: result.astype(dtype)

    def wait(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Return when the tensors are computed. Raises `PeerLost` when they will never be."""
        if self._watch is None:
            return
        done = threading.Event()
        raised: list[RuntimeError] = []

        def compute() -> None:
            try:
                for tensor in tensors:
                    tensor.asnumpy()
            except RuntimeError as error:
                raised.append(error)
            finally:
                done.set()

        threading.Thread(target=compute, name=operation, daemon=True).start()
        with for_others(operation):
            while not done.wait(POLL_S):
                self._watch.check()
        if raised:
            self._watch.changed.wait(2.0)  # a peer's death may show here first
            self._watch.check()
            first = str(raised[0]).strip().splitlines()[0]
            if any(word in str(raised[0]).lower() for word in TIMED_OUT):
                raise PeerLost(f"rank {self._rank}: {operation} did not end: {first}") from raised[
                    0
                ]
            raise raised[0]

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            print(f"note: {sentence}", flush=True)


def _bytes(tensor: Tensor) -> int:
    return int(tensor.size) * int(tensor.itemsize)
