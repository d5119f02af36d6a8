"""What an accumulator and an engine are told of a run, as values. No framework is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from orchestrator.errors import did_you_mean

_EACH_RANKS_OWN = ("overlap", "silent", "broadcast", "advise")


@dataclass(frozen=True, kw_only=True)
class AccumulationOptions:
    """How an accumulator accumulates, reduces and steps.

    Attributes:
        clip_norm: largest 2-norm of the averaged gradient, or None.
        metric_names: of `Loss.metrics`, in the order in which they travel; the same on all ranks.
        bucket_bytes: the gradient travels in equal slices of at most this size; None: about
            eight (see `plan.wire.bucket_count`).
        reduction: "fast", or "reproducible": the same bits for any contiguous assignment of whole
            leaves (micro-steps that are the same whoever computes them) to ranks.
        on_non_finite: "stop" raises `NonFiniteError` on all ranks; "skip" skips the update on all.
        precision: "float32", "bfloat16", "float16" (autocast, with loss scaling) or "float64".
            Run the forward within `accumulator.precision.forward()`.
        wire: "own", or "bfloat16": gradients travel, and are added up between ranks, as that, for
            half the bytes and an error of R * 2**-8 of their magnitudes; for reduction="fast".
        shard_optimizer: each rank keeps and steps 1/R of the optimizer, for reduction="fast".
            Parameters move into flat buffers, and `optimizer` holds pieces of them
            from then on: save it with `optimizer_state`. After a boundary every `.grad` is None.
        order: numbers of the trained parameters in the order in which a backward reaches them, the
            same on all ranks: buckets fill up in it. The reverse of the model's by default.
        overlap: send buckets during the last backward; False sends them at the boundary.
        silent: refuse collectives on the group between boundaries.
        broadcast: begin with rank 0's parameters and buffers on all ranks, as DDP does.
        advise: warn, once, of layers that do not do what one big batch would, and of what looks
            like a slip.
    """

    clip_norm: float | None = None
    metric_names: Sequence[str] = ()
    bucket_bytes: int | None = None
    reduction: str = "fast"
    on_non_finite: str = "stop"
    precision: str = "float32"
    wire: str = "own"
    shard_optimizer: bool = False
    order: Sequence[int] | None = None
    overlap: bool = True
    silent: bool = True
    broadcast: bool = False
    advise: bool = True

    def but(self, keywords: Mapping[str, Any]) -> AccumulationOptions:
        """The same, with other values for these names.

        Raises:
            TypeError: there is no option of such a name; it says which is the nearest.
        """
        for name in keywords:
            known = [one.name for one in fields(AccumulationOptions)]
            if name not in known:
                raise TypeError(
                    f"there is no option '{name}' of an accumulator{did_you_mean(name, known)}"
                )
        return replace(self, **keywords)

    def of_all_ranks(self) -> dict[str, Any]:
        """Those options that have to be the same on all ranks, by their names."""
        names = [one.name for one in fields(AccumulationOptions)]
        found = {name: getattr(self, name) for name in names if name not in _EACH_RANKS_OWN}
        return found | {"metric_names": tuple(self.metric_names)}


@dataclass(frozen=True, kw_only=True)
class EngineSettings(AccumulationOptions):
    """The part of the configuration that an engine needs, checked already.

    Attributes:
        seed: of the whole run.
        leaf_size: samples of a leaf in reproducible mode.
        optimizer: `{"name": "adam", ...}` or `{"_target_": "...", ...}`; without the learning
            rate. Empty: the job builds its own.
        loader_workers: processes that fetch batches, 0 for none.
        mode: "pynative", "jit" or "graph": how MindSpore runs a job; torch has no such choice.
        jit_level: MindSpore's optimisation level of compiled functions; None for its default.
        style: "own" accumulation, or "framework": MindSpore's GradAccumulation.
        norm: "warn", "frozen" or "group": what torch does about batch norm.
        survive: ranks may have to go on without those that die (docs/explanation/surviving.md).
    """

    seed: int = 0
    leaf_size: int | None = None
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"name": "sgd"})
    loader_workers: int = 0
    mode: str = "jit"
    jit_level: str | None = None
    style: str = "own"
    norm: str = "warn"
    survive: bool = False
