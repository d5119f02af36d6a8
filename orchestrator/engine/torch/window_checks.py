"""Checks of every window, so that no update is silently wrong.

Weights that differ between ranks or change in mid-window, collectives in mid-window, and a mean
instead of a sum raise an error.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.engine.api import AccumulationOptions
from orchestrator.engine.common.job_checks import check_metric_names, norm_advice
from orchestrator.engine.common.replicas import LARGEST_PIECE, Piece, Replicas
from orchestrator.engine.torch.buffers import Named
from orchestrator.engine.torch.group import BaseGroup, gather_numbers, version_of
from orchestrator.engine.torch.model import IN_A_LOOP, batch_norms_of
from orchestrator.errors import JobError, SilenceError
from orchestrator.job import Loss

# ------------------------------------------------------------------ Losses
# `Loss` takes sums, and a mean is the commonest mistake: `cross_entropy` returns one by default.
# The last operations of the loss's graph reveal it, for the price of reading a name or two.


_MEAN = 1  # as `torch.nn.functional` numbers its reductions
_ONLY_PASS = ("ToCopy", "Clone", "View", "Squeeze", "Unsqueeze", "Alias", "ReshapeAlias", "Div")
_SUMS = ("Add", "Sub")
_DEEPEST = 8


def averaged_by(node: Any, depth: int = _DEEPEST) -> str | None:
    """Return the operation that made a tensor a mean; None if it is none, or unknown.

    A mean that was multiplied afterwards is ignored: it may be a sum again.

    Args:
        node: the tensor's `grad_fn`.
        depth: how many operations are looked at.

    >>> import torch
    >>> x = torch.ones(4, requires_grad=True)
    >>> [averaged_by(y.grad_fn) for y in (x.mean() / 2, x.mean() * 4, x.sum())]
    ['mean()', None, None]
    """
    if node is None or not depth:
        return None
    name = node.name().partition("Backward")[0]
    if name == "Mean":
        return "mean()" if getattr(node, "_saved_self_sym_numel", None) != 1 else None
    if getattr(node, "_saved_reduction", None) == _MEAN:
        return f"{name}(reduction='mean')"
    if name in _ONLY_PASS or name in _SUMS:
        parts = [part for part, _ in node.next_functions if part is not None]
        if parts and (name in _SUMS or len(parts) == 1):
            found = [averaged_by(part, depth - 1) for part in parts]
            return found[0] if all(found) else None
    return None


_PLAIN = (int, float)


def checked_loss(loss: Loss, names: Sequence[str]) -> list[Any]:
    """Return weight, total and the metrics of these names, without graphs and not waited for.

    Raises:
        JobError: `loss` breaks the contract of `Loss`.
    """
    if isinstance(loss, Tensor):
        raise JobError(
            "loss() must return Loss(total, weight), but returned a plain tensor: a sum and what "
            "to divide it by, as in Loss(cross_entropy(scores, wanted, reduction='sum'), "
            "weight=len(wanted)); from orchestrator import Loss"
        )
    parts = ("total", "weight", "metrics")
    if type(loss) is not Loss and not all(hasattr(loss, part) for part in parts):
        raise JobError(
            f"loss() must return Loss(total, weight), but returned {type(loss).__name__}; "
            "from orchestrator import Loss"
        )
    total: Any = loss.total
    metrics: Any = loss.metrics
    if not isinstance(total, Tensor) or total.numel() != 1 or total.is_complex():
        what = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise JobError(
            f"Loss.total must be a real scalar tensor, but is {what}; use reduction='sum'"
        )
    if not total.requires_grad:
        raise JobError(
            "Loss.total has no graph to back-propagate; was it detached, or computed without grad?"
        )
    if type(metrics) is not dict and not isinstance(metrics, Mapping):
        raise JobError(f"Loss.metrics must be a dictionary, but is {metrics!r:.40}")
    if type(loss.weight) not in _PLAIN:  # a look at an abstract class takes longer than the rest
        _refuse_value("weight", loss.weight)
    for name, value in metrics.items():
        if type(value) not in _PLAIN:
            _refuse_value(f"metrics['{name}']", value)
    made_by = averaged_by(total.grad_fn)
    # With a weight of 1 it may be a mean over one sample's numbers, which is that sample's own.
    if made_by is not None and float(loss.weight) != 1.0:
        raise JobError(
            f"Loss.total is a mean, made by {made_by}, and Loss.weight is {float(loss.weight):g}: "
            "it would be divided twice. Give the sum, with reduction='sum', or multiply the mean "
            "by what it was divided by"
        )
    if metrics or names:
        check_metric_names(metrics, names)
    row = [loss.weight, total, *[metrics[name] for name in names]]
    return [value.detach() if isinstance(value, Tensor) else value for value in row]


def _refuse_value(what: str, value: Any) -> None:
    """Raise `JobError` unless `value` is a real number, or a tensor of one."""
    tensor = isinstance(value, Tensor)
    if (value.numel() == 1 and not value.is_complex()) if tensor else isinstance(value, Real):
        return
    found = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if tensor else repr(value)
    raise JobError(f"Loss.{what} must be a real number, but is {found}")


# ------------------------------------------------------------------ Weights digest
# A sum, modulo 2**64, of the weights' bits times odd numbers. Each place has its own odd 64-bit
# number, so any change of one number changes the sum, and so do two that swap places. It runs at
# some 5 GB/s on a CPU core, and only the sums leave a device. It detects drift, not an adversary.


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2**64 / golden ratio: its multiples are spread evenly
_MIX = 0xBF58476D1CE4E5B9 - 2**64  # of SplitMix64 [Steele, Lea and Flood 2014]


@lru_cache(maxsize=8)
def _multipliers(device: torch.device) -> Tensor:
    """Odd 64-bit numbers, the same on every machine: as many as the largest piece may need."""
    mixed = torch.arange(1, 4 * LARGEST_PIECE + 1, dtype=torch.int64) * _ODD
    mixed = (mixed ^ (mixed >> 30)) * _MIX
    return ((mixed ^ (mixed >> 27)) | 1).to(device)


def digests_of(
    parameters: Sequence[Tensor], pieces: Sequence[Piece], *, joint: bool = False
) -> list[int]:
    """Return a digest of each piece, of its values now.

    Args:
        joint: pieces that are small and alike may have one digest together, which takes less time.
    """
    parts: list[Tensor] = []
    for piece in pieces:
        flat = parameters[piece.number].detach().reshape(-1)[piece.start : piece.end]
        numbers = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
        parts.append(numbers.view(_BITS[min(numbers.element_size(), 4)]))
    small = sum([piece.end - piece.start for piece in pieces]) <= LARGEST_PIECE
    if joint and small and len({(part.device, part.dtype) for part in parts}) == 1:
        parts = [torch.cat(parts)]
    sums = [(part * _multipliers(part.device)[: len(part)]).sum() for part in parts]
    if len({one.device for one in sums}) > 1:
        return [int(one) for one in sums]
    return torch.stack(sums).tolist()  # one wait for the device, not one a piece


# ------------------------------------------------------------------ Checks of a window


_TRAINS, _TRAINING = attrgetter("requires_grad"), attrgetter("training")
_COUNTED = ("gloo", "threads")  # transports whose own count of collectives is known to be reliable


class WindowChecks:
    """All checks of one accumulator's windows.

    Args:
        model: what the accumulator was given.
        named: all parameters of the model, trained or not.
        trained: those that are.
        optimizer, group, options: the accumulator's. With `options.silent` collectives on `group`
            are refused and counted; with `options.advise` batch norms in training mode are warned
            of, once.
    """

    def __init__(
        self,
        model: Any,
        named: Named,
        trained: Named,
        optimizer: Optimizer,
        group: BaseGroup,
        options: AccumulationOptions,
    ) -> None:
        self._trained, self._group, self._silent = trained, group, options.silent
        self._optimizer = optimizer
        every = [parameter for _, parameter in named]
        self.replicas = Replicas(
            [name for name, _ in named],
            [parameter.numel() for parameter in every],
            [parameter.element_size() for parameter in every],
            digests=partial(digests_of, every),
            gather=partial(gather_numbers, group),
            ranks=group.size,
            joint_digests=partial(digests_of, every, joint=True),
        )
        self._norms = batch_norms_of(model) if options.advise else {}
        self._advise()
        known = {id(parameter) for _, parameter in trained}
        self._others = [(name, p) for name, p in named if id(p) not in known]
        self._parameters = [parameter for _, parameter in trained]
        self._layers = list(model.modules()) if isinstance(model, Module) else []
        self._settings: dict[tuple[int, str], Any] = {}  # since the first micro-step
        self._frozen_digest = self._layers_in_training = 0.0  # at this window's start
        self._versions: list[int] = []
        self._transport_mark = 0

    def begin(self, update: int) -> None:
        """Begin a window and its silence.

        Raises:
            JobError: a parameter was unfrozen that the accumulator does not train.
        """
        for name, parameter in self._others:
            if parameter.requires_grad:
                raise JobError(
                    f"parameter {name} began to require gradients after the accumulator was built; "
                    "build another one, so that its gradients are reduced too"
                )
        if self._norms:
            self._advise()
        trains = bytes(map(_TRAINS, self._parameters))
        self._frozen_digest = float(zlib.crc32(trains)) if 0 in trains else 0.0
        self._layers_in_training = float(sum(map(_TRAINING, self._layers)))
        self._versions = list(map(version_of, self._parameters))
        self._settings = {}
        self._transport_mark = self._group.transport_collectives() or 0
        if self._silent:
            self._group.silence.reason = f"in mid-window of update {update}"

    def _advise(self) -> None:
        if any(layer.training for layer in self._norms.values()):
            given = norm_advice(list(self._norms), apart=self._group.size > 1)
            warnings.warn(given + IN_A_LOOP, stacklevel=4)
            self._norms = {}

    def first_micro_step(self) -> None:
        """Note the optimizer's settings, which have to last until the boundary."""
        self._settings = self._settings_now()

    def end(self, update: int, sent: int) -> dict[str, float]:
        """End the window; collectives are allowed again.

        Args:
            sent: collectives of the group since the window began.

        Returns:
            Numbers, with their names, that have to be the same on all ranks.

        Raises:
            JobError: a parameter or a setting of the optimizer was changed in between.
            SilenceError: the transport counted collectives that did not go through our group.
        """
        self._group.silence.reason = None
        versions = list(map(version_of, self._parameters))
        if versions != self._versions:
            pairs = zip(self._trained, versions, self._versions, strict=True)
            changed = next(one[0] for one, now, before in pairs if now != before)
            raise JobError(
                f"parameter {changed} was changed in mid-window of update {update}; weights change "
                "at boundaries only, by the optimizer"
            )
        if self._silent and self._group.transport in _COUNTED:
            counted = (self._group.transport_collectives() or 0) - self._transport_mark
            if counted != sent:
                raise SilenceError(
                    f"{counted - sent} collectives ran on this process group in mid-window of "
                    f"update {update}, besides the {sent} of the gradient's own reduction"
                )
        now = self._settings_now() if self._settings else {}
        for (number, name), before in self._settings.items():
            if now.get((number, name)) != before:
                raise JobError(
                    f"{name} of the optimizer's parameter group {number} was changed in mid-window "
                    f"of update {update}: it would count for all of its micro-steps, or for none. "
                    "A scheduler's step() comes after boundary(), once an update"
                )
        rate = self._optimizer.param_groups[0].get("lr", 0.0)
        return {
            "the number of the update": update,
            # One that is kept on a device is not looked at, as that would wait.
            "the learning rate": 0.0 if isinstance(rate, Tensor) else float(rate),
            "the digest of which parameters are frozen": self._frozen_digest,
            "the number of layers in training mode": self._layers_in_training,
        }

    def _settings_now(self) -> dict[tuple[int, str], Any]:
        """Return the optimizer's settings; of a tensor its identity and version, which takes no
        wait for its device.
        """
        return {
            (number, name): (id(value), version_of(value)) if isinstance(value, Tensor) else value
            for number, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }
