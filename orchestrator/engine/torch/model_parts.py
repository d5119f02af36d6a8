"""Ranks that each hold a part of one model, as the stages of a pipeline do.

Each part's gradient is reduced among that part's replicas. What the update is decided from, the
gradient's norm, the loss and the flags, is of the whole model: it travels once more, between the
parts, in one small gather.
"""

from __future__ import annotations

import math

import torch

from orchestrator.engine.api import AccumulationOptions, Counters
from orchestrator.engine.common.trailer import (
    USES_ALL,
    USES_CHANGED,
    WEIGHT,
    WIDE,
    Trailer,
    to_float,
)
from orchestrator.engine.torch.group import BaseGroup, gather_texts
from orchestrator.errors import ConfigError, JobError


class ModelParts:
    """The other parts of this rank's model.

    Building one is collective over `group`.

    Args:
        group: the ranks that hold the parts of one model, each parameter on one of them alone.
        options: the accumulator's.

    Attributes:
        traffic: of the last `join`.

    Raises:
        ConfigError: the accumulators' options differ between the parts.
    """

    def __init__(self, group: BaseGroup, options: AccumulationOptions) -> None:
        self._group, self.traffic = group, Counters()
        names = ("clip_norm", "on_non_finite", "precision")
        values = {name: getattr(options, name) for name in names}
        values["metric_names"] = list(options.metric_names)
        texts = gather_texts(group, repr(values))
        if len(set(texts)) > 1:
            raise ConfigError(
                "the parts of one model must have the same clip_norm, on_non_finite, precision and "
                f"metric_names, but they are {texts[0]} on rank 0 of model_group and "
                f"{next(text for text in texts if text != texts[0])} on another"
            )

    def join(self, update: int, totals: Trailer, norm: float) -> tuple[Trailer, float]:
        """Return the sums of the whole model, and its gradient's norm. Collective.

        Losses and metrics of parts are added up, so those that know none say 0; all say the same
        weight.

        Args:
            totals: of this part, over its replicas.
            norm: of this part's summed gradient.

        Raises:
            JobError: on all parts alike, when they counted different weights.
        """
        # The limbs of the sums, which float64 carries exactly, and the norm.
        row = torch.tensor([[*totals.numbers(WIDE), norm]], dtype=torch.float64)
        mark = self._group.mark()
        rows = self._group.all_gather(row.to(self._group.device)).tolist()
        self.traffic = self._group.since(mark)
        parts = [Trailer.from_numbers(numbers, WIDE) for *numbers, _ in rows]
        weights = [to_float(part.sums[WEIGHT]) for part in parts]
        if any(weight != weights[0] for weight in weights):
            raise JobError(
                f"the parts of one model counted different weights in update {update}: "
                f"{', '.join(f'{weight:g}' for weight in weights)}, by their ranks in model_group; "
                "record the same weight on each of them, with a total of 0 where the loss is not "
                "known"
            )
        joined = Trailer(len(totals.sums) - len(Trailer().sums))
        joined.flags = [sum(flags) for flags in zip(*(p.flags for p in parts), strict=True)]
        joined.sums = [sum(units) for units in zip(*(p.sums for p in parts), strict=True)]
        joined.sums[WEIGHT] = totals.sums[WEIGHT]  # parts see the same samples: not added up
        for flag in (USES_ALL, USES_CHANGED):  # each part has parameters of its own
            joined.flags[flag] = totals.flags[flag]
        return joined, math.hypot(*(numbers[-1] for numbers in rows))
