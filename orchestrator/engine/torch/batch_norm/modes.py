"""Batch norm under gradient accumulation (`engine.norm`): warn, freeze, or use group norm.

The output of a batch norm depends on which samples share its micro-batch, so no split but the
trivial one gives the update of one big batch. With `frozen` or `group` the output of a sample
depends on that sample alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import Module, functional
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]  # the common base

from orchestrator.errors import ConfigError, JobError, did_you_mean

CHOICES = ("warn", "frozen", "group")
_SHOWN = 5


class FrozenBatchNorm(Module):
    """A batch norm that keeps its statistics, in training too. Weight and bias are still trained.

    Its state has the names of a batch norm's, so the state of either loads into the other.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self.eps = layer.eps
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("running_mean", layer.running_mean)
        self.register_buffer("running_var", layer.running_var)
        self.register_buffer("num_batches_tracked", layer.num_batches_tracked)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, channels, *) -> the same."""
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


def batch_norms_of(model: Any) -> dict[str, Module]:
    """The batch norms in `model` by name, "" if it is one itself; none in what is no module."""
    if not isinstance(model, Module):
        return {}
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}


def batch_norms(model: Module) -> list[str]:
    """Names of the batch norms in `model`."""
    return list(batch_norms_of(model))


def listed(names: list[str]) -> str:
    """The first few of some layers' names, in words."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name or "the model itself" for name in names[:_SHOWN]) + more


def with_norms(model: Module, choice: str) -> tuple[Module, list[str]]:
    """Return the model with its batch norms frozen, replaced or left, and a note about it.

    Args:
        model: is changed in place, unless it is a batch norm itself.
        choice: "warn", which leaves it to `advice` to warn; "frozen"; or "group".

    Raises:
        ConfigError: there is no such choice.
        JobError: a layer that cannot be frozen or replaced.
    """
    if choice not in CHOICES:
        raise ConfigError(f"there is no engine.norm={choice}{did_you_mean(choice, CHOICES)}")
    names = batch_norms(model)
    if choice == "warn" or not names:
        return model, []
    make, what = {
        "frozen": (_frozen, "keeps the statistics that it has (load trained ones in model())"),
        "group": (_grouped, "was replaced by group norm"),
    }[choice]
    made: dict[int, Module] = {}
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, _BatchNorm)  # noqa: S101  # `batch_norms` says so
        made[id(layer)] = make(name or "the model itself", layer)
    for parent in list(model.modules()):
        for child, layer in list(parent._modules.items()):  # noqa: SLF001  # named_children leaves shared ones out  # pyright: ignore[reportPrivateUsage]
            if id(layer) in made:
                setattr(parent, child, made[id(layer)])
    sentence = f"engine.norm={choice}: batch norm in {listed(names)} {what}"
    return made.get(id(model), model), [sentence]


def _frozen(name: str, layer: _BatchNorm) -> Module:
    if layer.running_mean is None:
        raise JobError(
            f"engine.norm=frozen: {name} keeps no running statistics to freeze; use "
            "engine.norm=group, or track_running_stats=True"
        )
    return FrozenBatchNorm(layer)


def _grouped(name: str, layer: _BatchNorm) -> Module:
    channels = layer.num_features
    if channels < 1:  # lazy ones do not know yet
        raise JobError(
            f"engine.norm=group: {name} does not know its number of channels before the first "
            "batch; state it in model()"
        )
    # Channels of vectors have no places to take statistics over, so all of them make one group.
    most = 1 if isinstance(layer, nn.BatchNorm1d) else max(1, min(32, channels // 4))
    groups = next(count for count in range(most, 0, -1) if channels % count == 0)
    made = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        made.weight, made.bias = layer.weight, layer.bias
    return made
