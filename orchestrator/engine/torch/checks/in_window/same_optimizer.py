"""Notices an optimizer that is not the one any more that an accumulator was built for.

Parameters that are added to a group later would be stepped with this rank's own gradient, those
that are taken away by nobody; and a rate that changes in mid-window belongs to neither update.
"""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from orchestrator.engine.torch.comm.tensors import writes_of
from orchestrator.errors import JobError


class SameOptimizer:
    """The groups of one optimizer, as they were; and what is set in them, from `keep` on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = self._parameters_now()
        self._kept: list[tuple[int, str, Any]] | None = None

    def check_parameters(self) -> None:
        """Raise `JobError` if the groups hold other parameters, or there are other groups."""
        now = self._parameters_now()
        if len(now) != len(self._parameters) or not all(map(is_, now, self._parameters)):
            raise JobError(
                f"the {type(self._optimizer).__name__} has other parameters than when the "
                "accumulator was built (add_param_group(), say): their gradients would not be "
                "reduced, or nobody would step them. close() this accumulator and build another "
                "one, with an optimizer of all parameters that there are now"
            )

    def keep(self) -> None:
        """A window's first micro-step comes: from here on rates and the like are to stay."""
        self._kept = self._settings_now()

    def check_settings(self, update: int) -> None:
        """Raise `JobError` if some changed since `keep`, which counts for one boundary."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        for before, after in zip(kept, self._settings_now(), strict=False):
            if before != after:
                group, name, _ = before
                raise JobError(
                    f"{name} of the optimizer's parameter group {group} was changed in mid-window "
                    f"of update {update}: it would count for all of its micro-steps, or for none. "
                    "A scheduler's step() comes after boundary(), once an update"
                )

    def _parameters_now(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _settings_now(self) -> list[tuple[int, str, Any]]:
        return [
            (number, name, _plain(value))
            for number, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        ]


def _plain(value: Any) -> Any:
    """What compares with `==`; of a tensor, at which a look would wait, that it is as it was."""
    if not isinstance(value, Tensor):
        return value
    return id(value), writes_of(value)
