"""What ranks do together when a window cannot be applied: the same error, or the same skip.

By then all ranks know from the trailer *that* something is wrong. To say *where*, they exchange it:
one more collective, in windows that fail only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from orchestrator.engine.common.packed_sums import BAD_WEIGHT, Trailer
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.errors import ConfigError, JobError, NonFiniteError

POLICIES = ("stop", "skip")
_NAMED = 3  # of what is named in a message, so many at most
_REMEDIES = (
    "the weights are still those before it. A lower schedule.base_lr or train.clip_norm may help; "
    "train.on_non_finite=skip leaves such updates out"
)


class Refusals:
    """The errors of one accumulator's windows.

    Args:
        group: the ranks.
        policy: what to do about a loss or gradient that is not finite: "stop" or "skip".

    Raises:
        ConfigError: there is no such policy.
    """

    def __init__(self, group: BaseGroup, policy: str) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"train.on_non_finite must be stop or skip, but is {policy!r}")
        self._group, self._policy = group, policy

    def weight(self, update: int, totals: Trailer, bad_step: int | None) -> JobError:
        """The error for weights that cannot be divided by. Collective when one was not usable."""
        if totals.flags[BAD_WEIGHT]:
            return JobError(
                f"Loss.weight was negative or not finite in update {update}, first on "
                f"{self._where(bad_step)}; it must be 0 or more"
            )
        return JobError(
            f"the weights of update {update} add up to {totals.weight.value:g} over all ranks, and "
            "the gradient cannot be divided by that; is every token masked, or was "
            "there no micro-step?"
        )

    def loss(self, update: int, bad_step: int | None) -> None:
        """Raise for a loss that is not finite, under the policy to stop. Collective if it does."""
        if self._policy == "stop":
            raise NonFiniteError(
                f"the loss became NaN or infinite in update {update}, first on "
                f"{self._where(bad_step)}; {_REMEDIES}"
            )

    def gradient(self, update: int, named: Callable[[], list[str]]) -> None:
        """Raise for a gradient that is not finite, unless it is to be skipped.

        Args:
            update: its number.
            named: gives the names of the parameters that have it; not called without need.
        """
        if self._policy == "skip":
            return
        names = named()
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise NonFiniteError(
            f"the loss of update {update} is finite, but the gradient became NaN or infinite, in "
            f"{', '.join(names[:_NAMED])}{more}; {_REMEDIES}"
        )

    def _where(self, step: int | None) -> str:
        """The ranks and their micro-steps, in words, equal on all ranks."""
        mine = torch.tensor([-1 if step is None else step], device=self._group.device)
        steps = self._group.all_gather(mine).tolist()
        places = [f"rank {rank}, micro-step {s}" for rank, s in enumerate(steps) if s >= 0]
        more = f" and {len(places) - _NAMED} more ranks" if len(places) > _NAMED else ""
        return "; ".join(places[:_NAMED]) + more
