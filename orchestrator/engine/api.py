"""The seams below the loop: `Group` (how ranks talk), `Engine` (how a window becomes an update).

No framework is imported here. `engine/torch` and `engine/mindspore` implement both, under the same
file names, and each is a `Framework` (`framework.py`). `conformance.py` is the suite of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Tensor = Any


@dataclass(slots=True)
class Counters:
    """What a group has sent since it was formed. Only ever grows.

    `bytes_handed` is the size of the tensors given to the transport; `bytes_on_wire` is what one
    rank has to send for them at the least: 2(R-1)/R of an all-reduce, (R-1)/R of a gathered result.
    """

    collectives: int = 0
    bytes_handed: int = 0
    bytes_on_wire: int = 0


class Group(Protocol):
    """Ranks that talk. Formed over a store, not the framework's global default group.

    Every method but the properties is collective: all ranks call it in the same order. A peer that
    went away raises `PeerLost`.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def counters(self) -> Counters: ...

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over ranks, in place. Same shape and dtype on all ranks."""
        ...

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenate the ranks' tensors along axis 0.

        Args:
            tensor: shape (n_r, ...); n_r may differ between ranks when `sizes` is given.
            sizes: the R leading sizes n_0..n_{R-1}, equal on all ranks; None when all are equal.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Replace `tensor` by rank `source`'s, in place."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """All that is needed to form one generation of a group.

    Attributes:
        rank, size: this rank, and how many there are.
        local_rank: the rank's number on its node; picks the device.
        node: name of this rank's node, for messages.
        address: IP address of this node that the others can reach.
        folder: folder that every rank sees; the group's address is published there.
        generation: 0 for the first group of an attempt; survivors form the next.
        transport: "auto", "gloo", "nccl", "mccl" or "hccl".
        timeout_s: how long to wait for ranks that do not come.
        collective_timeout_s: how long one collective may take.
        devices_asked: who asked for accelerators, in words; "" when nobody did. With it, "auto"
            never means CPUs.
        stop_requested: asked while waiting; True makes every rank raise `StopRequested` together.
        reads: see `reads_for_node`; None: the rank with local number 0.
    """

    rank: int
    size: int
    local_rank: int
    node: str
    address: str
    folder: Path
    generation: int = 0
    transport: str = "auto"
    timeout_s: float = 60.0
    collective_timeout_s: float = 1800.0
    devices_asked: str = ""
    stop_requested: Callable[[], bool] = lambda: False
    reads: bool | None = None

    @property
    def reads_for_node(self) -> bool:
        """Whether this rank looks for what is published, and tells the others of its node."""
        return self.local_rank == 0 if self.reads is None else self.reads


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One micro-step's work: samples `indices` of the data set, from place `start` of the update.

    `(update, start)` seeds the random numbers of the micro-step, so they do not depend on the rank.
    """

    update: int
    start: int
    indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What one rank is told about one update. A value, never derived from `rank` inside an engine.

    Attributes:
        update: the update's number, from 0.
        samples: samples of this update over all ranks.
        micro_batches: this rank's, in order, none of them empty; () when the rank has no samples.
        steps: micro-steps of the rank that has most of them.
        learning_rate: for this update.
        samples_per_rank: of this update; blocks are contiguous, in the order of ranks.
    """

    update: int
    samples: int
    micro_batches: tuple[MicroBatch, ...]
    steps: int
    learning_rate: float
    samples_per_rank: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryReport:
    """What all ranks know, equally, after a boundary (seconds excepted: those are this rank's own).

    Attributes:
        loss: sum of totals / sum of weights, over all ranks.
        weight: sum of weights over all ranks.
        metrics: the job's sums divided by the weight.
        applied: False when the update was skipped (an overflow under float16, agreed by all).
        stop_requested: some rank was asked to stop; all ranks see it in the same update.
        newcomers: ranks wait to be let in (docs/explanation/surviving.md); as `stop_requested`.
        gradient_norm: of the averaged gradient, before clipping; None when not computed.
        loss_scale: the float16 loss scale used in this window; 1 otherwise.
        micro_steps: this rank's.
        collectives: collectives called in this window, the boundary's own included.
        exchanges: of these, the ones that only this window needed: ranks had to agree on which
            parameters were used.
        bytes_on_wire: see `Counters`, for this window.
        compute_s, wait_s, optimizer_s: forward and backward; reduction; clipping and step.
        compile_s: first calls of compiled functions, not part of the other three where it is told.
        plain_step_s: a micro-step without compilation, measured once where others are compiled.
    """

    update: int
    loss: float
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    applied: bool = True
    stop_requested: bool = False
    newcomers: bool = False
    gradient_norm: float | None = None
    loss_scale: float = 1.0
    micro_steps: int = 0
    collectives: int = 0
    exchanges: int = 0
    bytes_on_wire: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    optimizer_s: float = 0.0
    compile_s: float = 0.0
    plain_step_s: float = 0.0


class Engine(Protocol):
    """Turns windows into updates. The loop knows nothing else of the framework."""

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        """One batch for each micro-batch, in order, fetched ahead when there are loader workers."""
        ...

    def begin_window(self, window: Window) -> None:
        """Start an update: gradients are zero, the learning rate is set. Not collective."""
        ...

    def micro_step(self, batch: Any, micro_batch: MicroBatch) -> None:
        """Forward and backward of one micro-batch. Silent: no collective may run in it, but for the
        reduction of finished buckets in the window's last backward.
        """
        ...

    def boundary(self, *, stop: bool = False) -> BoundaryReport:
        """Reduce once, clip once, step once. Collective. `stop`: this rank was asked to stop.

        Raises `NonFiniteError`, on all ranks alike, when the loss or a gradient is NaN or infinite
        and the settings say "stop", and `ReplicasDiffer` when ranks were seen to hold different
        weights.
        """
        ...

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's `numbers` (equally many on all), a row for each rank, as float64.

        Collective; for set-up and the end of a run, never inside a window.
        """
        ...

    def evaluate(self) -> dict[str, float]:
        """The job's held-out figures, the model in evaluation mode meanwhile. Rank 0 only."""
        ...

    def check_replicas(self) -> None:
        """Compare the weights of all ranks. Collective; for between windows.

        Raises `ReplicasDiffer`, on all ranks alike and with the names of those that differ.
        """
        ...

    def optimizer_used(self) -> dict[str, Any]:
        """What steps the weights: its `class`, whom it is `from`, its `groups` of parameters."""
        ...

    def parameter_count(self) -> int:
        """Trained numbers of the model, shared ones counted once."""
        ...

    def gather_state(self) -> None:
        """Bring to rank 0 what other ranks alone hold of the state, if anything, for a `save_state`
        before the next window. Collective.
        """
        ...

    def holds_state(self) -> bool:
        """Whether `save_state` can be called now: not where other ranks hold parts of the state
        that were not gathered since the last boundary. For rank 0.
        """
        ...

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write weights.safetensors and optimizer.safetensors into `folder`; give the rest as what
        JSON can hold. Not collective. An engine whose `snapshot()` gives something with a `take`
        and this method, for a thread to call, has train.checkpoint_in_background.
        """
        ...

    def load_state(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """The inverse of `save_state`: the same bits afterwards. Not collective."""
        ...

    def load_weights(self, path: Path) -> None:
        """Set the weights to a safetensors file's, and nothing else. Before the first window.

        Not collective, but all ranks call it with the same file.

        Raises:
            ConfigError: names, shapes or dtypes are not the model's.
        """
        ...

    def weights_sha256(self) -> str:
        """Digest over the weights' bytes, tensor by tensor in the order of the names."""
        ...

    def collectives_beside(self) -> int:
        """Collectives in every window, besides the gradient's reduction: gathers, say."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of this rank's `parameters`, `gradients` and `optimizer` state. Not collective."""
        ...

    def peak_memory_bytes(self) -> int:
        """Largest memory of this rank so far: the device's if there is one, else the process's."""
        ...

    def warnings(self, micro_batches: int | None = None) -> list[str]:
        """What a user should know of this model (batch norm, say), each with its remedies.

        Args:
            micro_batches: of an update, over all ranks; None for many.
        """
        ...
