"""Interfaces between the training loop and the engines: Group, Engine, Framework.

This module imports no framework. `engine/torch` and `engine/mindspore` implement the interfaces;
`engine/conformance.py` tests any `Group`.
"""

from __future__ import annotations

import resource
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from orchestrator.data import HeldOutData
from orchestrator.errors import ConfigError, SilenceError, did_you_mean
from orchestrator.plan.held_out import HeldOutShare
from orchestrator.plan.window import MicroBatch, Window
from orchestrator.rundir.checkpoints import WEIGHTS, Saves

_RANK_SPECIFIC = ("overlap", "silent", "warn_about_layers")
TALKS_IN_WINDOW = (
    "set `talks_in_window = True` in the job's class (in a loop of your own, pass silent=False to "
    "the Accumulator) when every rank calls it equally often"
)


@dataclass(frozen=True, kw_only=True)
class AccumulationOptions:
    """Options of an accumulator.

    Attributes:
        clip_norm: largest 2-norm of the averaged gradient, or None.
        metric_names: of `Loss.metrics`, in the order in which they travel; the same on all ranks.
        bucket_bytes: the gradient travels in equal slices of at most this size; None: about
            8 MiB (see `plan.wire.bucket_count`).
        reduction: "fast", or "reproducible": the same bits for any contiguous assignment of whole
            leaves (micro-steps that do not depend on the rank) to ranks.
        on_non_finite: "stop" raises `NonFiniteError` on all ranks; "skip" skips the update on all.
        precision: "float32", "bfloat16", "float16" (autocast, with loss scaling) or "float64".
            Run the forward within `accumulator.precision.forward()`.
        shard_optimizer: each rank keeps and steps 1/R of the optimizer, for reduction="fast".
            Parameters move into flat buffers, and `optimizer` holds pieces of them
            from then on: save it with `optimizer_state`. After a boundary every `.grad` is None.
        shard_by: "auto": the optimizer's class decides whether its parameters are cut into pieces
            or owned whole; "parameters": each is owned whole. See `engine.torch.owners`.
        overlap: send buckets during the last backward; False sends them at the boundary.
        silent: refuse collectives on the group between boundaries. False sends buckets at the
            boundary, too.
        broadcast: begin with rank 0's parameters and buffers on all ranks, as DDP does.
        warn_about_layers: warn, once, of layers whose output depends on the split.
    """

    clip_norm: float | None = None
    metric_names: Sequence[str] = ()
    bucket_bytes: int | None = None
    reduction: str = "fast"
    on_non_finite: str = "stop"
    precision: str = "float32"
    shard_optimizer: bool = False
    shard_by: str = "auto"
    overlap: bool = True
    silent: bool = True
    broadcast: bool = False
    warn_about_layers: bool = True

    def with_options(self, keywords: Mapping[str, Any]) -> AccumulationOptions:
        """Return a copy with other values for these names.

        Raises:
            TypeError: there is no option of such a name; it says which is the nearest.
        """
        for name in keywords:
            known = [option.name for option in fields(AccumulationOptions)]
            if name not in known:
                raise TypeError(
                    f"there is no option '{name}' of an accumulator{did_you_mean(name, known)}"
                )
        return replace(self, **keywords)

    def shared_by_ranks(self) -> dict[str, Any]:
        """Return the options that have to be the same on all ranks, by name."""
        names = [option.name for option in fields(AccumulationOptions)]
        options = {name: getattr(self, name) for name in names if name not in _RANK_SPECIFIC}
        return options | {"metric_names": tuple(self.metric_names)}


@dataclass(frozen=True, kw_only=True)
class EngineSettings(AccumulationOptions):
    """The part of the configuration that an engine needs, checked already.

    Attributes:
        seed: of the whole run.
        optimizer: `{"name": "adam", ...}` or `{"_target_": "...", ...}`; without the learning
            rate. Empty: the job builds its own.
        loader_workers: processes that fetch batches, 0 for none.
        mode: "pynative", "jit" or "graph": how MindSpore runs a job; torch has no such choice.
        jit_level: MindSpore's optimisation level of compiled functions; None for its default.
        style: "own" accumulation, or "framework": MindSpore's GradAccumulation.
        norm: "warn", "frozen", "group" or "layer": what becomes of batch norms.
        survive: ranks may have to continue without those that die (docs/explanation/surviving.md).
        shard_model: "none", "node" or "all": the ranks that hold one copy of the model together.
    """

    seed: int = 0
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"name": "sgd"})
    loader_workers: int = 0
    mode: str = "jit"
    jit_level: str | None = None
    style: str = "own"
    norm: str = "warn"
    survive: bool = False
    shard_model: str = "none"


# ------------------------------------------------------------------ Group and Engine


Tensor = Any


@dataclass(slots=True)
class Counters:
    """Traffic of a group since it was formed. Only ever grows.

    `bytes_on_wire` is what one rank has to send at the least: 2(R-1)/R of an all-reduce's tensor,
    (R-1)/R of a gathered result.
    """

    collectives: int = 0
    bytes_on_wire: int = 0


Mark = tuple[int, int]
"""Counts of a group at one moment: collectives, and bytes that all ranks together sent."""


class Group(ABC):
    """Ranks that communicate. Not the framework's global default group.

    Abstract methods are collective: all ranks call them in the same order. A peer that went away
    raises `PeerLost`. Every collective of a subclass begins with `_admit`.

    Args:
        rank, size: this rank, and how many there are.
        generation: number of this group among those of its attempt.
        transport: name of what carries the bytes.

    Attributes:
        counters: of the traffic so far.
        silence: while set, collectives are refused with `SilenceError`; it says when: "in
            mid-window of update 3".
    """

    def __init__(self, *, rank: int, size: int, generation: int = 0, transport: str) -> None:
        self.rank, self.size, self.generation = rank, size, generation
        self.transport = transport
        self.counters = Counters()
        self.silence: str | None = None
        self._total_bytes = 0  # of all ranks together: a whole number

    @abstractmethod
    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over ranks, in place. Same shape and dtype on all ranks."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenate the ranks' tensors along axis 0.

        Args:
            tensor: shape (n_r, ...); n_r may differ between ranks when `sizes` is given.
            sizes: the R leading sizes n_0..n_{R-1}, equal on all ranks; None when all are equal.

        Returns:
            A new tensor of shape (sum of sizes, ...), the same on all ranks.

        Raises:
            ValueError: `tensor` has no axis 0, or is not of the size that `sizes` says.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Replace `tensor` by rank `source`'s, in place. Same shape and dtype on all ranks."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called."""

    def close(self) -> None:
        """Close the group on this rank, in order: peers see no loss. Every rank calls it."""

    def mark(self) -> Mark:
        """Return the current counts, for `since`."""
        return self.counters.collectives, self._total_bytes

    def since(self, mark: Mark) -> Counters:
        """Return the traffic since `mark`; bytes on the wire are rounded up once."""
        collectives, total_bytes = mark
        return Counters(
            collectives=self.counters.collectives - collectives,
            bytes_on_wire=-(-(self._total_bytes - total_bytes) // self.size),
        )

    def _admit(self, operation: str, total_bytes: int, *, in_window: bool = False) -> None:
        """Check that a collective may run now, and count it; a lone rank sends nothing.

        Args:
            total_bytes: what all ranks together have to send for it.
            in_window: it is the engine's own, which silence is not for.

        Raises:
            SilenceError: ranks are to be silent.
        """
        if self.silence is not None and not in_window:
            raise SilenceError(
                f"the collective '{operation}' was called {self.silence}; ranks talk only at the "
                f"boundary. Move it there, or {TALKS_IN_WINDOW}"
            )
        if self.size == 1:
            return
        self._total_bytes += total_bytes
        self.counters.collectives += 1
        self.counters.bytes_on_wire = -(-self._total_bytes // self.size)

    def _leading_sizes(self, shape: Sequence[int], sizes: Sequence[int] | None) -> tuple[int, ...]:
        """Return the leading sizes of all ranks' tensors, this one's being of `shape`.

        Raises:
            ValueError: they cannot be right.
        """
        if not shape:
            raise ValueError(
                "a tensor to gather needs an axis 0, but has none; use tensor.reshape(1)"
            )
        if sizes is None:
            return (shape[0],) * self.size
        if len(sizes) != self.size or sizes[self.rank] != shape[0] or min(sizes) < 0:
            raise ValueError(
                f"`sizes` must be the {self.size} ranks' leading sizes, with {shape[0]} for rank "
                f"{self.rank}, but is {list(sizes)}"
            )
        return tuple(sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """Arguments to form one generation of a group.

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
        device_request: the setting that requests accelerators, "" for none. With it, "auto" never
            means CPUs.
        survive: a rank that is lost is not to end the others.
        ranks_per_node: how many ranks the node has, this one included.
        incarnation: how many processes had this rank before in this attempt.
        stop_requested: asked while waiting; True makes every rank raise `StopRequested` together.
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
    device_request: str = ""
    survive: bool = False
    ranks_per_node: int = 1
    incarnation: int = 0
    stop_requested: Callable[[], bool] = lambda: False


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryReport:
    """Result of a boundary, equal on all ranks (except for seconds, which are this rank's own).

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
        compile_s: first calls of compiled functions, not part of the other three if measured.
        plain_step_s: a micro-step without compilation, measured once where others are compiled.
        gradient_digest: of the bits of the summed gradient, in reproducible mode; else None.
        losses: total and weight of each of this rank's micro-steps, in their order; () where the
            engine does not tell.
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
    gradient_digest: str | None = None
    losses: Sequence[tuple[float, float]] = ()


class Engine(Protocol):
    """Interface by which the loop uses a framework: it turns windows into updates.

    An engine that derives from it has the usual answers where every rank holds the whole state.
    """

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """Return the ranks that hold this rank's copy of a model in shards; () for any other."""
        return ()

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        """Return one batch for each micro-batch, in order, fetched ahead when there are loader
        workers.
        """
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
        """Return every rank's `numbers` (equally many on all), a row for each rank, as float64.

        Collective; for set-up and the end of a run, never inside a window.
        """
        ...

    def evaluate(self) -> dict[str, float]:
        """Compute the job's held-out figures, with the model in evaluation mode. Rank 0 only; with
        `shard_model` collective.
        """
        ...

    def check_replicas(self) -> None:
        """Compare the weights of all ranks. Collective; for between windows.

        Raises `ReplicasDiffer`, on all ranks alike and with the names of those that differ.
        """
        ...

    def optimizer_used(self) -> dict[str, Any]:
        """Describe the optimizer: its `class`, where it is `from`, its `groups` of parameters."""
        ...

    def parameter_count(self) -> int:
        """Return the trained numbers of the model, shared ones counted once."""
        ...

    def gather_state(self) -> None:
        """Bring to rank 0 what other ranks alone hold of the state, if anything, for a `save_state`
        before the next window. Collective.
        """

    def holds_state(self) -> bool:
        """Return whether `save_state` can be called now: not where other ranks hold parts of the
        state that were not gathered since the last boundary. For rank 0.
        """
        return True

    def part(self) -> int | None:
        """Return the number of this rank's part of a checkpoint where ranks save it in parts, -1 on
        ranks that save none; None where rank 0 saves all of it.
        """
        return None

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write weights.safetensors and optimizer.safetensors into `folder`, or this rank's part of
        them (`rundir.checkpoints.part_name`), which all ranks do; give the rest as what JSON can
        hold, the same on all ranks. Not collective.
        """
        ...

    def load_state(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Load what `save_state` wrote: the same bits afterwards. Not collective."""
        ...

    def load_initial_state(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Load what another run's `save_state` wrote, but keep this optimizer's own options. Before
        the first window. Not collective.
        """
        self.load_state(folder, extra)

    def load_weights(self, path: Path) -> None:
        """Set the weights to a safetensors file's, and nothing else. Before the first window.

        Not collective, but all ranks call it with the same file.

        Raises:
            ConfigError: names, shapes or dtypes are not the model's.
        """
        ...

    def weights_sha256(self) -> str:
        """Return the digest over the weights' bytes, tensor by tensor in the order of the names.

        For rank 0; where `part` is not None collective, and "" on other ranks.
        """
        ...

    def extra_collectives(self) -> int:
        """Return the number of collectives in every window besides the gradient's reduction."""
        return 0

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's `parameters`, `gradients` and `optimizer` state. Not
        collective.
        """
        ...

    def peak_memory_bytes(self) -> int:
        """Return the largest memory of this rank so far: the device's if there is one, else the
        process's.
        """
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def warnings(self, micro_batches: int | None = None) -> list[str]:
        """Return warnings about this model (batch norm, say), each with its remedies.

        Args:
            micro_batches: of an update, over all ranks; None for many.
        """
        del micro_batches
        return []


@runtime_checkable
class ShowsGradients(Protocol):
    """An engine whose gradients callbacks may look at."""

    def gradients(self) -> Mapping[str, Any]:
        """Return the gradients as they are now, by the parameters' names, not to be changed:
        between micro-steps what this rank has accumulated (in reproducible mode of its latest leaf
        alone), after a boundary the averaged and clipped ones. Not collective.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputedLeaf:
    """Result of a leaf that was computed again.

    Attributes:
        digest: of the bits of its gradient, total, weight and metrics; below 2**64.
        changed: values of the job that its `loss` changed and that could not be restored.
    """

    digest: int
    changed: Sequence[str] = ()


@runtime_checkable
class RecomputesLeaves(Protocol):
    """An engine that can compute any leaf of the window under way, in reproducible mode. The window
    and the state around it are as before afterwards, to the bit.
    """

    def leaf_digest(self) -> int:
        """Return the digest of this rank's latest micro-step in the window. Not collective."""
        ...

    def recompute_leaf(self, micro_batch: MicroBatch) -> RecomputedLeaf:
        """Compute a leaf of the window aside, this rank's or another's. Not collective."""
        ...

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return what `Engine.gather` does, right before the window's boundary. Collective."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutReport:
    """Result of an evaluation by all ranks.

    Attributes:
        figures: the loss and the metrics of each data set, the same on all ranks.
        collectives, bytes_on_wire: see `Counters`, for this evaluation.
    """

    figures: Mapping[str, float]
    collectives: int = 0
    bytes_on_wire: int = 0


@runtime_checkable
class EvaluatesHeldOut(Protocol):
    """An engine whose ranks evaluate a job's held-out data together."""

    def held_out_batches(
        self, data: HeldOutData, micro_batches: Iterable[MicroBatch]
    ) -> Iterator[Any]:
        """Return one batch of held-out samples for each micro-batch; see `Engine.batches`."""
        ...

    def evaluate_held_out(
        self,
        data: HeldOutData,
        share: HeldOutShare,
        batches: Iterator[Any],
        before_piece: Callable[[int], None],
    ) -> HeldOutReport:
        """Compute the job's loss on held-out data, in evaluation mode and without a gradient, and
        add it up exactly over ranks. Collective; for between windows. Weights, buffers and random
        numbers are as before afterwards.

        Args:
            share: this rank's.
            batches: of `held_out_batches`, at the first piece's.
            before_piece: called before each piece, with its place in the share.
        """
        ...


class StateCopy(Saves, Protocol):
    """A copy of the state of one moment, for a thread to complete and to write."""

    def take(self) -> None:
        """Copy what was not copied at once; the engine's next boundary waits for it."""
        ...


@runtime_checkable
class CopiesState(Protocol):
    """An engine that has train.checkpoint_in_background."""

    def snapshot(self) -> StateCopy:
        """Return what `save_state` would write now. Not collective."""
        ...


# ------------------------------------------------------------------ Frameworks


class Framework(ABC):
    """Entry point of a framework: one class, made without arguments.

    Third-party frameworks are found through the entry points `orchestrator.frameworks`, by the name
    in a job's `framework`. Its module is imported before ranks are forked on this machine: what
    starts threads or takes a device waits for its methods. What submitting has to know of it is
    `config.frameworks.FrameworkFacts`.
    """

    @abstractmethod
    def form_group(self, spec: GroupSpec) -> Any:
        """Form a `Group` of all ranks. Collective; every rank gets one, or the same error."""

    @abstractmethod
    def build_engine(self, job: Any, settings: EngineSettings, group: Any) -> Engine:
        """Build the engine that trains a job over a group of `form_group`. Collective."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return the versions and devices that decide the bits of a run, by name."""

    def export(self, checkpoint: Path, extra: Mapping[str, Any], form: str, to: Path) -> None:
        """Write a checkpoint for other programs to read.

        Args:
            checkpoint: its folder, with the files of `Engine.save_state`; `extra`: what that gave.
            form: "safetensors" (the weights), "torch" or "dcp".
            to: does not exist.

        Raises:
            ConfigError: the framework has no such format.
        """
        del extra
        if form != "safetensors":
            raise ConfigError(f"--{form} is for checkpoints of torch; use --safetensors")
        shutil.copyfile(checkpoint / WEIGHTS, to)

    def state_dict(self, checkpoint: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return the weights and buffers of a checkpoint by name, on the CPU.

        Args:
            checkpoint, extra: as of `export`.

        Raises:
            ConfigError: the framework does not offer this.
        """
        del extra
        raise ConfigError(f"{type(self).__name__} cannot read weights here; try {checkpoint}")

    def load_weights(self, model: Any, checkpoint: Path, extra: Mapping[str, Any]) -> None:
        """Set the weights and buffers of a model to those of a checkpoint.

        Args:
            model: as the job's `model()` returns it.
            checkpoint, extra: as of `export`.

        Raises:
            ConfigError: the framework does not offer this.
            RunFolderError: they are another model's.
        """
        del model, extra
        raise ConfigError(f"{type(self).__name__} cannot load weights here; try {checkpoint}")

    def ahead(self, spec: GroupSpec) -> None:  # most have nothing to start
        """Start slow initialisation before the job is imported."""


# ------------------------------------------------------------------
# Membership changes during training


@runtime_checkable
class Survives(Protocol):
    """An engine whose group may lose ranks, and get others (docs/explanation/surviving.md)."""

    def newcomers_wait(self, waiting: bool) -> None:  # a plain setter
        """Set whether the next boundary reports to all ranks that new ranks wait."""
        ...

    def before_growth(self) -> None:
        """Keep on every rank what newcomers cannot help to put together. Collective, between
        windows, over the group that newcomers are not in yet.
        """
        ...

    def catch_up(self, group: Group, updates: int, progress: str) -> str | None:
        """Bring all of `group` to the same update. Collective, over the new group.

        Some may have ended an update that others have not; newcomers have ended none. These get the
        state of the lowest rank that has; a window under way is forgotten.

        Args:
            updates: how many this rank has applied; 0 of a newcomer.
            progress: what this rank knows of its updates, for those that have applied fewer.

        Returns:
            On a rank that was behind, the `progress` of the rank whose state it received. Else
            None.

        Raises:
            StateLost: on all alike; a part of the state is gone. They continue after `regroup` and
                `load_state`.
        """
        ...

    def regroup(self, group: Group) -> None:
        """Go on in `group`, before a window. Collective; all of its ranks have the same state."""
        ...
