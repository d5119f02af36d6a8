"""What may not happen between a window's start and its boundary, and is looked for there.

Weights change, parameters begin to be trained, somebody else's collectives run: each would make the
update another one than was asked for, without any error.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from orchestrator.engine.torch.batch_norm.modes import batch_norms_of
from orchestrator.engine.torch.checks.at_start.model_warnings import IN_A_LOOP, norm_advice
from orchestrator.engine.torch.checks.in_window.same_model import SameModel
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.comm.tensors import writes_of
from orchestrator.errors import JobError, SilenceError

_TRAINS, _TRAINING = attrgetter("requires_grad"), attrgetter("training")
_COUNTED = ("gloo", "threads")  # transports whose own count of collectives is known to be reliable


class WindowWatch:
    """Looks at one accumulator's windows.

    Args:
        model: what the accumulator was given.
        named: all parameters of the model, trained or not.
        trained: those that are.
        group: the ranks.
        silent: whether collectives on `group` are refused, and looked for.
        advise: warn of batch norms, once, when they are in training mode.

    Attributes:
        frozen: tells which of the trained parameters were frozen at this window's start.
        training: how many of the model's layers were in training mode then.
    """

    def __init__(
        self,
        model: Any,
        named: Sequence[tuple[str, Tensor]],
        trained: Sequence[tuple[str, Tensor]],
        group: BaseGroup,
        *,
        silent: bool,
        advise: bool,
    ) -> None:
        self._trained, self._group, self._silent = trained, group, silent
        self._same = SameModel(model, trained)
        self._norms = batch_norms_of(model) if advise else {}
        self._advise()
        known = {id(parameter) for _, parameter in trained}
        self._others = [(name, p) for name, p in named if id(p) not in known]
        self._parameters = [parameter for _, parameter in trained]
        self._layers = list(model.modules()) if isinstance(model, Module) else []
        self.frozen = self.training = 0.0
        self._trains = b""
        self._versions: list[int] = []
        self._looked_at: tuple[str, Tensor, Tensor] | None = None
        self._mark = group.mark()
        self._transport_mark = 0

    def begin(self, update: int) -> None:
        """A window begins; silence is kept from now on.

        Raises:
            JobError: the model is not the one any more that the accumulator was built for.
        """
        self._same.check()
        self._advise()
        trains = bytes(map(_TRAINS, self._parameters))
        self.frozen = float(zlib.crc32(trains)) if 0 in trains else 0.0
        self.training = float(sum(map(_TRAINING, self._layers)))
        for name, parameter in self._others:
            if parameter.requires_grad:
                raise JobError(
                    f"parameter {name} began to require gradients after the accumulator was built; "
                    "build another one, so that its gradients are reduced too"
                )
        self._versions = list(map(writes_of, self._parameters))
        # Changes through `.data` are not counted; a few numbers of one parameter tell most of them.
        name, parameter = self._trained[update % len(self._trained)]
        self._looked_at = name, parameter, _some(parameter).clone()
        self._mark = self._group.mark()
        self._transport_mark = self._group.transport_collectives() or 0
        if self._silent:
            self._group.silence.keep(f"in mid-window of update {update}")

    def _advise(self) -> None:
        if any(layer.training for layer in self._norms.values()):
            told = norm_advice(list(self._norms), apart=self._group.size > 1)
            warnings.warn(told + IN_A_LOOP, stacklevel=5)
            self._norms = {}

    def micro_step(self, update: int, *, first: bool) -> None:
        """A micro-step comes.

        Raises:
            JobError: a parameter was frozen or unfrozen since the window's first one.
        """
        trains = bytes(map(_TRAINS, self._parameters))
        if first:
            self._trains = trains
        elif trains != self._trains:
            self._refuse_frozen(trains, update)

    def end(self, update: int) -> None:
        """The boundary is reached; collectives are allowed again.

        Raises:
            JobError: a parameter was changed in between.
            SilenceError: the transport counted collectives that did not go through our group.
        """
        self._group.silence.end()
        versions = list(map(writes_of, self._parameters))
        if versions != self._versions:
            pairs = zip(self._trained, versions, self._versions, strict=True)
            raise _changed(next(one[0] for one, now, before in pairs if now != before), update)
        if self._looked_at is not None:
            name, parameter, before = self._looked_at
            if not torch.equal(_some(parameter), before):
                raise _changed(name, update)
        if self._silent and self._group.transport in _COUNTED:
            ours = self._group.since(self._mark).collectives
            theirs = (self._group.transport_collectives() or 0) - self._transport_mark
            if theirs != ours:
                raise SilenceError(
                    f"{theirs - ours} collectives ran on this process group in mid-window of "
                    f"update {update}, beside the {ours} of the gradient's own reduction"
                )

    def _refuse_frozen(self, trains: bytes, update: int) -> None:
        name, parameter = next(
            one for one, a, b in zip(self._trained, trains, self._trains, strict=True) if a != b
        )
        did = "unfrozen" if parameter.requires_grad else "frozen"
        raise JobError(
            f"parameter {name} was {did} in mid-window of update {update}, so it has the gradient "
            "of some micro-steps only; freeze and unfreeze between boundary() and the next one"
        )


def _changed(name: str, update: int) -> JobError:
    return JobError(
        f"parameter {name} was changed in mid-window of update {update}; weights change at "
        "boundaries only, by the optimizer"
    )


def _some(parameter: Tensor) -> Tensor:
    """The first row of a parameter, which costs next to nothing to keep."""
    return parameter.detach()[:1] if parameter.dim() else parameter.detach()
