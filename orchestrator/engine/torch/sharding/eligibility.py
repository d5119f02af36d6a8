"""Which optimizers can be sharded: those that treat every number by itself, from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, optim
from torch.optim import Optimizer

from orchestrator.errors import ConfigError

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""Their own classes, not what somebody derives from them: a subclass may look at norms or shapes.

Adagrad has state from the beginning, Adafactor and Muon look at matrices."""

SCALARS = ("step", "mu_product", "eta", "mu")
"""What these keep once for a parameter. All else is of the parameter's shape."""


def check_shardable(optimizer: Optimizer, parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise `ConfigError` for an optimizer that cannot be stepped in pieces.

    Args:
        optimizer: over the `parameters`, and perhaps some that are not trained.
        parameters: the trained ones, with names.
    """
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        known = ", ".join(one.__name__ for one in ELEMENTWISE)
        raise ConfigError(
            f"engine.shard_optimizer=true steps pieces of parameters, and {kind.__module__}."
            f"{kind.__qualname__} may need them whole; it works with torch.optim's {known}. Use "
            "one of these, or engine.shard_optimizer=false"
        )
    if optimizer.defaults.get("differentiable"):
        raise ConfigError("engine.shard_optimizer=true is not available with differentiable=True")
    if any(optimizer.state.values()):
        raise ConfigError(
            f"the {kind.__name__} has state already, which engine.shard_optimizer=true cannot "
            "cut up: build the accumulator before the first step, and load a saved state into it"
        )
    _refuse_shared_memory(parameters)


def _refuse_shared_memory(parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Parameters that are views of one memory would be parted where they are moved."""
    ranges = sorted(
        (p.data_ptr(), p.data_ptr() + _bytes_reached(p), name)
        for name, p in parameters
        if p.numel()
    )
    for (_, end, name), (start, _, other) in pairwise(ranges):
        if start < end:
            raise ConfigError(
                f"parameters {name} and {other} share memory; engine.shard_optimizer=true moves "
                "parameters, and would part them. Use one parameter in both places"
            )


def _bytes_reached(parameter: Tensor) -> int:
    """From its first number to behind its last, gaps included."""
    last = sum(
        (n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True)
    )
    return (last + 1) * parameter.element_size()
