"""Which parameters of a model train, and which of its modules are in training mode.

A job may change both while it trains: freeze a layer after some updates, or put a batch norm into
evaluation mode. The model that a restart builds has none of these changes, so checkpoints hold
them. They hold only what differs from the model as it was built, so that changed code (`resume
--changed`) still decides all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any

from orchestrator.errors import RunFolderError

Changes = Mapping[str, Mapping[str, bool]]
"""New values by mode ("requires_grad", "training") and by name of the part."""


class ModelModes:
    """The modes of a model's parts, now and as it was built.

    Args:
        parts: named parts by the attribute that is their mode. Several may have one name.
        set_mode: sets the attribute of a part.
    """

    def __init__(
        self,
        parts: Mapping[str, Iterable[tuple[str, Any]]],
        set_mode: Callable[[Any, str, bool], None] = setattr,
    ) -> None:
        self._parts = [(mode, name, part) for mode, named in parts.items() for name, part in named]
        # `keep` is called once an update, so a large model is read in few steps of Python.
        self._read = [
            (attrgetter(mode), [part for own_mode, _, part in self._parts if own_mode == mode])
            for mode in parts
        ]
        self._set_mode = set_mode
        self._built = self._kept = self._now()

    def _now(self) -> list[bool]:
        return list(chain.from_iterable(map(read, parts) for read, parts in self._read))

    def _set(self, values: Iterable[bool]) -> None:
        for (mode, _, part), value in zip(self._parts, values, strict=True):
            if bool(getattr(part, mode)) != value:
                self._set_mode(part, mode, value)

    def keep(self) -> None:
        """Keep the present modes for `restore`."""
        self._kept = self._now()

    def restore(self) -> None:
        """Return to the modes of the last `keep`."""
        self._set(self._kept)

    def changes(self) -> dict[str, dict[str, bool]]:
        """Return the modes that differ from those of the model as it was built."""
        changes: dict[str, dict[str, bool]] = {}
        for (mode, name, _), now, built in zip(self._parts, self._now(), self._built, strict=True):
            if now != built:
                changes.setdefault(mode, {})[name] = now
        return changes

    def apply(self, changes: Changes) -> None:
        """Set all modes to those of the model as it was built, but for `changes`.

        Raises:
            RunFolderError: the model has no such part.
        """
        known = {(mode, name) for mode, name, _ in self._parts}
        for mode, named in changes.items():
            for name in named:
                if (mode, name) not in known:
                    raise RunFolderError(
                        f"the checkpoint is of another model: it says {mode}={named[name]} of "
                        f"'{name}', which this model does not have"
                    )
        self._set(
            changes.get(mode, {}).get(name, built)
            for (mode, name, _), built in zip(self._parts, self._built, strict=True)
        )

    @contextmanager
    def as_built(self) -> Generator[None]:
        """Within it, all modes are those of the model as it was built."""
        now = self._now()
        self._set(self._built)
        try:
            yield
        finally:
            self._set(now)
