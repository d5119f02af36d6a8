"""State that a job keeps on itself, besides its model: saved if the job says how, else watched.

A checkpoint holds the model and the optimizer. What a job counts or averages on `self` begins anew
at every restart, and differs between ranks and with the number of micro-steps, unless the job saves
it by `state_dict` and `load_state_dict`. A job without these is warned, by name, of values that
change from one update to the next.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from orchestrator.engine.common.replicas import minority_ranks
from orchestrator.errors import JobError, RunFolderError
from orchestrator.rundir.warnings import warn
from orchestrator.units import first_few, named_ranks

PLAIN = (bool, int, float, str, bytes, complex, np.generic, types.NoneType)
MOST_ENTRIES = 64
"""Entries of a list, set or dictionary that are compared; of a longer one the length alone is."""

_METHODS = ("state_dict", "load_state_dict")
_UNKNOWN = object()

Version = Callable[[Any], Any]
"""Return a value of a tensor or module that changes when its numbers do; None for anything else."""


@contextmanager
def kept_attributes(holders: Iterable[dict[str, Any]]) -> Generator[None]:
    """Give tables of attributes their present entries back, but for this package's own caches."""
    before = [(attributes, dict(attributes)) for attributes in holders]
    try:
        yield
    finally:
        for attributes, earlier in before:
            for name in [name for name in attributes if name not in earlier]:
                if not name.startswith("_orchestrator_"):
                    del attributes[name]
            attributes.update(earlier)


class JobState:
    """The state of one job.

    Args:
        module: the framework's class of models: the `state_dict` that a job inherits from it is not
            the job's word on its own state.
        version: see `Version`.

    Attributes:
        saved: the job says how its state is saved.

    Raises:
        JobError: the job defines one of `state_dict` and `load_state_dict` alone.
    """

    def __init__(self, job: Any, module: type, version: Version) -> None:
        self._job, self._version = job, version
        own = [
            callable(getattr(job, name, None))
            and getattr(type(job), name, None) is not getattr(module, name, _UNKNOWN)
            for name in _METHODS
        ]
        if any(own) and not all(own):
            has, lacks = _METHODS if own[0] else reversed(_METHODS)
            raise JobError(
                f"{type(job).__name__} defines {has}() but no {lacks}(): checkpoints hold what the "
                "first returns, and a restart gives it to the second; define both"
            )
        self.saved = all(own)
        self._kept: Any = _UNKNOWN
        self._seen: dict[str, tuple[Any, Any]] | None = None
        self._warned: set[str] = set()
        self._first = True

    # ------------------------------------------------------------------ saved

    def state(self) -> Any:
        """Return the job's `state_dict()`; None where it has none."""
        return self._job.state_dict() if self.saved else None

    def load(self, state: Any) -> None:
        """Give the job what `state` returned, perhaps in another process.

        Raises:
            RunFolderError: it was saved by a job that differs from this one in this.
        """
        name = type(self._job).__name__
        if self.saved != (state is not None):
            has, lacks = ("checkpoint", name) if state is not None else (name, "checkpoint")
            raise RunFolderError(
                f"the {has} has state of the job itself, but the {lacks} has none: state_dict() "
                f"and load_state_dict() of {name} were added or removed since it was written"
            )
        if not self.saved:
            return
        try:
            self._job.load_state_dict(state)
        except (ValueError, KeyError, RuntimeError, TypeError) as error:
            raise RunFolderError(
                f"{name}.load_state_dict() does not take what the checkpoint holds of it: "
                f"{type(error).__name__}: {error}"
            ) from error

    def check_same(self, rows: Sequence[Sequence[float]]) -> None:
        """Check the ranks' digests of their states, a row for each rank.

        Raises:
            JobError: they differ: rank 0's would be saved, and given to all at a restart.
        """
        if odd := minority_ranks(rows):
            raise JobError(
                f"{type(self._job).__name__}.state_dict() differs between ranks (that of "
                f"{named_ranks(odd)} from the others'), but rank 0's is saved, and given to all of "
                "them at a restart: keep there only what is the same on all ranks, such as what "
                "after_update() changes"
            )

    def keep(self) -> None:
        """Keep a copy of the state for `restore`, where the job says what it is."""
        if self.saved:
            self._kept = copy.deepcopy(self._job.state_dict())

    def restore(self) -> None:
        """Give the job the state of the last `keep`."""
        if self._kept is not _UNKNOWN:
            self._job.load_state_dict(copy.deepcopy(self._kept))

    @contextmanager
    def isolated(self) -> Generator[None]:
        """Give the job its present state back afterwards, where it says what that is."""
        state = copy.deepcopy(self.state())
        try:
            yield
        finally:
            if self.saved:
                self._job.load_state_dict(state)

    @contextmanager
    def preserved(self) -> Generator[list[str]]:
        """Restore the job's state afterwards, whether it says what that is or not: attributes refer
        to what they did before. The list then names what was changed in place and is not restored.
        """
        changed: list[str] = []
        before = self._values()
        holders = [getattr(self._job, "__dict__", {})]
        holders += [vars(value) for value in holders[0].values() if self._is_own_object(value)]
        with self.isolated(), kept_attributes(holders):
            yield changed
        if not self.saved:
            now = self._values()
            changed += [
                name for name, (_, seen) in before.items() if now.get(name, (None, None))[1] != seen
            ]

    # ------------------------------------------------------------------ watched

    def watch(self) -> None:
        """Warn of values that changed since the call before; call it once an update.

        The first update may fill in what a job builds when it is first needed, so changes count
        from the second on; and so do values that appear later, or that were None.
        """
        if self.saved:
            return
        if self._first:
            self._first = False
            return
        before, self._seen = self._seen, self._values()
        changed = [
            name
            for name, (value, seen) in self._seen.items()
            if before is not None
            and name in before
            and name not in self._warned
            and before[name][0] is not None
            and (value is not before[name][0] or not isinstance(value, PLAIN))
            and seen != before[name][1]
        ]
        if not changed:
            return
        self._warned.update(changed)
        warn(
            f"{first_few(changed, 3)} changed during training, but "
            "checkpoints do not hold it: after a restart it begins anew, and a value that loss() "
            "changes depends on the number of micro-steps and ranks. Take what you count from "
            "current_run (update, epoch, rank), keep tensors in the model's buffers, or define "
            "state_dict() and load_state_dict() in the job",
            kind="state of the job " + " ".join(sorted(changed)),
        )

    def _values(self) -> dict[str, tuple[Any, Any]]:
        """Return each value with what tells whether it has changed, by name."""
        job = type(self._job).__name__
        values = dict(self._of_module())
        for name, value in (*self._of_class(), *getattr(self._job, "__dict__", {}).items()):
            if name.startswith("_orchestrator_"):
                continue
            seen = self._fingerprint(value)
            if seen is not _UNKNOWN:
                values[f"{job}.{name}"] = value, seen
            elif self._is_own_object(value):
                for inner, inner_value in vars(value).items():
                    if (seen := self._fingerprint(inner_value)) is not _UNKNOWN:
                        values[f"{job}.{name}.{inner}"] = inner_value, seen
        return values

    def _of_module(self) -> Generator[tuple[str, tuple[Any, Any]]]:
        """Yield the plain numbers of the module that defines the job, which `global` may count."""
        module = type(self._job).__module__
        for name, value in list(getattr(sys.modules.get(module), "__dict__", {}).items()):
            if type(value) in (int, float) and not name.startswith("__"):
                yield f"{module}.{name}", (value, repr(value))

    def _of_class(self) -> Generator[tuple[str, Any]]:
        """Yield attributes of the job's own classes, which a counter may be kept on as well."""
        package = type(self._job).__module__.partition(".")[0]
        for owner in reversed(type(self._job).__mro__):
            if owner.__module__.partition(".")[0] == package:
                yield from ((n, v) for n, v in vars(owner).items() if not n.startswith("__"))

    def _is_own_object(self, value: Any) -> bool:
        """Return whether a value's attributes may be the job's state: it is of a class of the job's
        own package, and not read by index, as data sets are.
        """
        kind: Any = type(value)
        packages = {owner.__module__.partition(".")[0] for owner in (kind, type(self._job))}
        of_package = hasattr(value, "__dict__") and len(packages) == 1
        return of_package and not hasattr(kind, "__getitem__")

    def _fingerprint(self, value: Any, depth: int = 0) -> Any:
        """Return what differs when `value` changes; `_UNKNOWN` for what cannot be told cheaply."""
        if isinstance(value, PLAIN):
            # NaN is not equal to itself; a long text is not copied.
            return value if isinstance(value, (str, bytes)) else repr(value)
        version = self._version(value)
        if version is not None:
            return version
        if isinstance(value, np.ndarray):
            return value.tobytes() if value.size <= MOST_ENTRIES else (id(value), value.shape)
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, np.random.RandomState):
            return repr(value.get_state(legacy=False))
        if isinstance(value, itertools.count):
            return repr(value)
        if depth < 3 and isinstance(value, (list, tuple, set, frozenset, dict, deque)):
            return type(value), len(value), tuple(self._entries(value, depth))
        return _UNKNOWN

    def _entries(self, values: Any, depth: int) -> Generator[Any]:
        if len(values) > MOST_ENTRIES:
            return
        # Not the pairs of a dictionary, which are new ones each time.
        entries = (*values, *values.values()) if isinstance(values, Mapping) else values
        for value in entries:
            seen = self._fingerprint(value, depth + 1)
            yield id(value) if seen is _UNKNOWN else seen
