"""What looks like a slip although it may be meant: said once, as a warning, by rank 0.

Habits from other loops leave traces that a look at a window's sums shows: every rank had the same
samples, each loss was divided by the number of micro-steps, dropout stayed off after an evaluation.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]  # the common base

from orchestrator.engine.common.boundary.packed_sums import Trailer
from orchestrator.engine.torch.batch_norm.modes import listed
from orchestrator.job import Loss

_WINDOWS = 3  # in a row, since a model whose last layer begins with zeros has one loss everywhere


class Habits:
    """Looks at one accumulator's windows.

    Args:
        model: what it was given.
        rank, ranks: this one's number, and how many there are.
    """

    def __init__(self, model: Any, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        layers = dict(model.named_modules()) if isinstance(model, Module) else {}
        self._dropouts = {n: d for n, d in layers.items() if isinstance(d, _DropoutNd) and d.p > 0}
        self._dropped = False  # a window had dropout
        self._divisors: set[float | None] = set()
        self._equal = 0  # windows in a row in which all ranks had the same sums
        self._said: set[str] = set()

    def begin(self) -> None:
        """A window begins."""
        self._divisors = set()
        off = [name for name, layer in self._dropouts.items() if not layer.training]
        if off and self._dropped:
            self._say(
                f"dropout in {listed(off)} was on in updates before and is off now; call "
                "model.train() after an evaluation"
            )
        self._dropped = self._dropped or len(off) < len(self._dropouts)

    def micro_step(self, loss: Loss) -> None:
        """A loss that passed all checks."""
        self._divisors.add(divisor_of(loss.total))

    def end(self, mine: Trailer, totals: Trailer, micro_steps: int) -> None:
        """The boundary's reduction is done."""
        if len(self._divisors) == 1 and (divisor := next(iter(self._divisors))):
            self._look_at(divisor, micro_steps)
        if self._ranks > 1:
            equal = totals.loss.units and all(
                of_all.units == self._ranks * of_one.units and not of_all.odd
                for of_all, of_one in ((totals.loss, mine.loss), (totals.weight, mine.weight))
            )
            self._equal = self._equal + 1 if equal else 0
            if self._equal == _WINDOWS:
                self._say(
                    f"in {_WINDOWS} updates in a row the loss was the same on all ranks, to the "
                    "last digit: they probably all compute the same samples. Give each rank "
                    "samples of its own (a DistributedSampler, or [rank::ranks])"
                )

    def _look_at(self, divisor: float, micro_steps: int) -> None:
        of = {micro_steps * self._ranks: "micro-steps on all ranks"}
        of |= {self._ranks: "ranks", micro_steps: "micro-steps in a window"}
        if divisor in of:
            self._say(
                f"each Loss.total was divided by {divisor:g}, and there are {divisor:g} "
                f"{of[int(divisor)]}: if that is why, leave it out. Sums are divided once, at the "
                "boundary, by what the weights add up to"
            )

    def _say(self, sentence: str) -> None:
        if self._rank == 0 and sentence not in self._said:
            self._said.add(sentence)
            warnings.warn(f"{sentence} (Accumulator(..., advise=False) is silent)", stacklevel=7)


def divisor_of(total: Tensor) -> float | None:
    """What `total` was divided by last, in its graph: a whole number above 1, or None.

    >>> import torch
    >>> x = torch.ones(4, requires_grad=True)
    >>> divisor_of(x.sum() / 4), divisor_of(x.sum() * 0.25), divisor_of(x.sum() * 0.5)
    (4.0, 4.0, None)
    """
    node: Any = total.grad_fn
    name = "" if node is None else node.name()
    if not name.startswith(("Mul", "Div")):
        return None
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.numel() != 1 or other.device.type != "cpu":
        return None
    factor = float(other.detach())
    if name.startswith("Mul") and factor and factor != 0.5:  # half a square is a loss
        factor = round(1 / factor, 9)
    return factor if factor > 1 and factor == int(factor) else None
