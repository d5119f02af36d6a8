"""The learning rate of each update. It counts updates, never micro-steps.

With u from 0, T updates in all, W of warm-up, s = max(W - 1, 0) the update that reaches the peak:

    peak  = base_lr * f(G / base_batch)   f(x) = x (linear), sqrt(x) (sqrt) or 1 (none)
    u < W:  peak * (u + 1) / W
    else:   peak * d(p)                   p = min(1, (u - s) / (T - 1 - s)),
                                          d(p) = (1 + cos(pi p)) / 2 (cosine), 1 - p (linear), 1

Under a batch schedule G, and so the peak, is that of update u.

Linear scaling with warm-up: Goyal et al., arXiv 1706.02677. Square root: Krizhevsky, arXiv
1404.5997, and for Adam Malladi et al., arXiv 2205.10287. Cosine: Loshchilov and Hutter, arXiv
1608.03983.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.errors import PlanError
from orchestrator.plan.batch import BatchSchedule, batch_at


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A learning-rate schedule; the formulas are the module's.

    Attributes:
        base_lr: learning rate for a global batch of `base_batch`, positive and finite (0 allowed).
        base_batch: global batch that `base_lr` was chosen for, in samples.
        scaling: how the peak follows the global batch: linear, sqrt or none.
        warmup_updates: W; 0 for none.
        decay: cosine, linear or none, from the peak to 0 at update T - 1.
        global_batch: G, in samples.
        total_updates: T; None when the run's end is not known, which only `decay="none"` allows.
        batch_schedule: other values of G, from given updates on.

    Raises:
        PlanError: an unusable learning rate, or a decay without a known end.
    """

    base_lr: float
    global_batch: int
    base_batch: int = 256
    scaling: str = "none"
    warmup_updates: int = 0
    decay: str = "none"
    total_updates: int | None = None
    batch_schedule: BatchSchedule = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.base_lr) and self.base_lr >= 0):
            raise PlanError(f"schedule.base_lr={self.base_lr}: it must be finite and not negative")
        if self.total_updates is None and self.decay != "none":
            raise PlanError(
                f"schedule.decay={self.decay} needs to know the last update: set train.updates, or "
                "train.epochs with a data set of known size, or schedule.decay=none"
            )

    @property
    def peak(self) -> float:
        """Return the highest learning rate: after warm-up, before decay.

        Under a batch schedule it is the highest that the run reaches in any stage.
        """
        if not self.batch_schedule:
            return self.peak_at(0)
        # Within a stage the rate only rises before `top`, and only falls after it.
        top, end = max(self.warmup_updates - 1, 0), self.total_updates
        starts = [0, *(update for update, _ in self.batch_schedule if not end or update < end)]
        ends = [*starts[1:], max(end or 0, top + 1, starts[-1] + 1)]
        return max(
            self.learning_rate(min(max(top, start), following - 1))
            for start, following in zip(starts, ends, strict=True)
        )

    def peak_at(self, update: int) -> float:
        """Return the learning rate of `update` without warm-up and decay."""
        if self.scaling == "none":
            return self.base_lr
        ratio = batch_at(update, self.global_batch, self.batch_schedule) / self.base_batch
        return self.base_lr * (math.sqrt(ratio) if self.scaling == "sqrt" else ratio)

    def learning_rate(self, update: int) -> float:
        """Return the learning rate of `update`, from 0; constant after the last update.

        >>> Schedule(
        ...     base_lr=0.1, base_batch=256, scaling="linear", warmup_updates=2, decay="cosine",
        ...     global_batch=512, total_updates=4,
        ... ).learning_rate(0)
        0.1
        """
        peak = self.peak_at(update)
        if update < self.warmup_updates:
            return peak * ((update + 1) / self.warmup_updates)
        if self.decay == "none" or self.total_updates is None:
            return peak
        reached = max(self.warmup_updates - 1, 0)
        length = self.total_updates - 1 - reached
        if length <= 0:
            # A run of one update trains at its peak. One that continues beyond its end has decayed.
            return peak if update < self.total_updates else 0.0
        progress = min(1.0, (update - reached) / length)
        if self.decay == "linear":
            return peak * (1.0 - progress)
        # Mathematical libraries differ in a cosine's last bit; ranks must not.
        return peak * (0.5 * (1.0 + round(math.cos(math.pi * progress), 14)))
