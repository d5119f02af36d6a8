"""The atoms of work of `accumulation.reduction=reproducible`, as the accumulator numbers them."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.engine.api import MicroBatch


@dataclass(frozen=True, slots=True)
class Leaves:
    """Leaves of `size` samples each; None where there are none."""

    size: int | None

    def of_update(self, samples: int) -> int | None:
        """How many an update of so many samples has."""
        return None if self.size is None else -(-samples // self.size)

    def leaf_of(self, micro_batch: MicroBatch) -> int | None:
        """The number of the leaf that a micro-batch is."""
        if self.size is None:
            return None
        leaf, beside = divmod(micro_batch.start, self.size)
        if beside:
            raise RuntimeError(f"{micro_batch.start} does not begin a leaf of {self.size}")
        return leaf
