"""Watches of a model in training: what code of a user changes in it that would be lost or differ.

Each compares the model before and after that code and warns once. An engine drops a watch that has
nothing left to see, so later updates do not pay for it.

    ForwardWatch            numbers that the forward counts            the first windows
    AfterUpdateWatch        numbers and gradients that `after_update`  until it has warned of both
                            changes
    warn_of_changed_buffers buffers that the forward changes           the first window
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from orchestrator.engine.common.job_checks import name_layers
from orchestrator.engine.torch.group import version_of
from orchestrator.engine.torch.model import ForwardState
from orchestrator.rundir.warnings import warn
from orchestrator.units import first_few

COUNTING_WINDOWS = 3
"""Windows in each of which the forward has changed a number, so that it counts or anneals. What a
layer caches changes less often.
"""

_OF_ANY_MODULE = frozenset(vars(Module()))


class ModuleNumbers:
    """The numbers that modules have as attributes, such as a dropout's `p`."""

    def __init__(self, model: Module) -> None:
        self._places = [
            (vars(layer), name, path)
            for path, layer in model.named_modules()
            for name, value in vars(layer).items()
            if isinstance(value, int | float)
            and name not in _OF_ANY_MODULE
            # What torch's own layers call private is no business of a job's.
            and not (name.startswith("_") and type(layer).__module__.startswith("torch."))
        ]
        self._before = self._values()

    def _values(self) -> list[Any]:
        return [attributes.get(name) for attributes, name, _ in self._places]

    def note(self) -> None:
        """Note what they are now."""
        self._before = self._values()

    def changed(self) -> list[str]:
        """Return the names of those that are other numbers now than when they were noted."""
        return [
            f"{path}.{name}" if path else name
            for (_, name, path), before, now in zip(
                self._places, self._before, self._values(), strict=True
            )
            if isinstance(now, int | float) and now != before
        ]


class ForwardWatch:
    """Watches the first windows for numbers in modules that the forward changes in each of them.

    Attributes:
        done: nothing is left to see.
    """

    def __init__(self, model: Module) -> None:
        self._model, self._windows, self.done = model, 0, False
        self._before: ModuleNumbers | None = None
        self._counted: set[str] | None = None  # changed in each window so far; None before one

    def begin_window(self) -> None:
        """Note the numbers before the first forward of a window."""
        self._before = ModuleNumbers(self._model)

    def end_window(self) -> None:
        """Compare them after the last forward, in a window in which this rank had one; warn."""
        before, self._before = self._before, None
        if before is None:  # a boundary that failed is called again
            return
        changed = set(before.changed())
        self._counted = changed if self._counted is None else self._counted & changed
        self._windows += 1
        self.done = self._windows == COUNTING_WINDOWS
        if self.done and self._counted:
            warn(
                f"the forward changes {first_few(sorted(self._counted), 3)} of the model, but "
                "checkpoints do not hold such numbers: after a restart they begin anew, and they "
                "depend on the number of micro-steps and ranks. Take what you count from "
                "current_run.update"
            )


class AfterUpdateWatch:
    """Watches a job's `after_update` for numbers in modules and for gradients that it changes.

    Attributes:
        done: nothing is left to see.
    """

    def __init__(self, model: Module) -> None:
        self._model, self._updates = model, 0
        self._numbers = ModuleNumbers(model)
        self._gradients: Mapping[str, tuple[Tensor, int]] = {}
        self._numbers_warned = self._gradients_warned = False

    @property
    def done(self) -> bool:
        return self._numbers_warned and self._gradients_warned

    def begin(self) -> None:
        """Note both before the call."""
        if not self._numbers_warned:
            self._updates += 1
            # New ones are looked for ever more rarely, since that walks through all modules.
            if self._updates.bit_count() == 1:
                self._numbers = ModuleNumbers(self._model)
            self._numbers.note()
        if not self._gradients_warned:
            self._gradients = {
                name: (parameter.grad, version_of(parameter.grad))
                for name, parameter in self._model.named_parameters()
                if parameter.grad is not None
            }

    def end(self) -> None:
        """Compare them after the call; warn once of each."""
        changed = [
            name
            for name, (gradient, version) in self._gradients.items()
            # A gradient that was set to zero is what `zero_grad` leaves: nothing was meant by it.
            if version_of(gradient) != version and bool(gradient.any())
        ]
        self._gradients = {}  # the next window's may be other tensors
        if changed:
            self._gradients_warned = True
            warn(
                f"after_update() changed the gradient of {first_few(changed, 3)}, without effect: "
                "it comes after the optimizer's step. train.clip_norm clips the gradient of the "
                "whole batch before it"
            )
        if not self._numbers_warned and (changed := self._numbers.changed()):
            self._numbers_warned = True
            warn(
                f"after_update() changed {first_few(changed, 3)} of the model, but checkpoints do "
                "not hold such numbers: after a restart they begin anew. Set them in loss(), from "
                "current_run.update, or use a buffer"
            )


def warn_of_changed_buffers(before: ForwardState, where: str, *, depth: int = 0) -> None:
    """Warn of layers whose forward has changed their buffers in training.

    Args:
        before: of the model, at the start of a window that is split over micro-steps or ranks.
        where: the place to change them in.
        depth: see `warn`.
    """
    if layers := before.changed_layers():
        warn(
            f"a forward in training changes the buffers of {name_layers(layers)}, so what they "
            "hold depends on how a batch is split over micro-steps and ranks, and so does the "
            "update if it uses them, as with spectral norm. Change them "
            f"{where}, or take one micro-step of the whole batch on one rank",
            depth=1 + depth,
        )
