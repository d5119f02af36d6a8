"""Checkpoints of a user's own loop: accumulators, and further state of the user.

Files, digests and names are those of a job's checkpoints; torn or damaged ones are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.nn import Module, ModuleList

from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.group import gather_numbers
from orchestrator.engine.torch.state import load_model, load_optimizer, save_model, save_optimizer
from orchestrator.errors import ConfigError, RunFolderError
from orchestrator.rundir import checkpoints as checkpoint
from orchestrator.rundir.warnings import warn


class Saved:
    """Checkpoints of some accumulators.

    Args:
        folder: that all ranks see.
        run: the run's identity, in a run.
        decided: options that must not change; see `decided_by`.
        keep: number of checkpoints to keep.
        state: further objects with `state_dict`, by name.
    """

    def __init__(
        self,
        folder: Path,
        accumulators: Sequence[Accumulator],
        *,
        run: str | None,
        decided: Mapping[str, Any],
        keep: int,
        state: Mapping[str, Any],
    ) -> None:
        self._folder, self._run, self._keep = folder, run, keep
        self._all, self._decided, self._state = accumulators, dict(decided), state
        self._optimizers: dict[str, Any] = {}
        self._group = accumulators[0].group
        self._unsaved: str | None = None
        self._model = _one_module([one.model for one in accumulators])

    def load(self) -> tuple[int, int]:
        """Load the newest sound checkpoint, the same on every rank. Collective.

        Returns:
            Its updates and samples; 0, 0 without one.

        Raises:
            ConfigError: it was made with another batch, order or number of accumulators.
            RunFolderError: there are checkpoints, but none can be used.
        """
        first = self._group.rank == 0
        if first:
            self._folder.mkdir(parents=True, exist_ok=True)
            checkpoint.remove_partial(self._folder)
        found, passed_over = checkpoint.newest(self._folder, self._run) if first else (None, [])
        for sentence in passed_over:
            warn(sentence)
        updates = int(gather_numbers(self._group, [found.updates if found else -1])[0][0])
        if updates < 0:
            return 0, 0
        folder = checkpoint.folder_of(self._folder, updates)
        chosen = found or checkpoint.load(folder, self._run)
        self._take(chosen)
        return chosen.updates, chosen.samples

    def _take(self, chosen: checkpoint.Checkpoint) -> None:
        extra = chosen.extra
        before = extra.get("windows") or {}
        for name, now in self._decided.items():
            if name in before and before[name] != now:
                raise ConfigError(
                    f"run.windows(): {name} is {now}, but this training began with {before[name]} "
                    f"and has done {chosen.updates} updates with that ({chosen.folder}): its "
                    f"samples would come in another order. Go on with {before[name]}, or begin "
                    "another one elsewhere"
                )
        if sorted(extra.get("state", ())) != sorted(self._state):
            raise ConfigError(
                f"run.windows(): {chosen.folder} was saved with state of "
                f"{', '.join(extra.get('state', ())) or 'nothing'}, but state= has "
                f"{', '.join(self._state) or 'nothing'}"
            )
        load_model(self._model, chosen.folder, extra["model"])
        load_optimizer(chosen.folder, extra["optimizer"], self._restore)
        for one, precision in zip(self._all, extra["precision"], strict=True):
            one.precision.load(precision)

    def _restore(self, saved: dict[str, Any]) -> None:
        for number, one in enumerate(self._all):
            one.load_optimizer_state(saved[f"optimizer {number}"])
        for name, part in self._state.items():
            part.load_state_dict(saved[f"state {name}"])

    def save(self, updates: int, samples: int) -> bool:
        """Write a checkpoint after `updates`; return whether this rank wrote it. Collective."""
        for one in self._all:
            one.check_replicas()  # ranks that disagree about the state must not save it
        states = [one.optimizer_state() for one in self._all]
        if self._group.rank:
            return False
        self._optimizers = {f"optimizer {n}": state for n, state in enumerate(states)}
        self._optimizers |= {f"state {name}": p.state_dict() for name, p in self._state.items()}
        try:
            checkpoint.save(
                self._folder, self, updates=updates, samples=samples, keep=self._keep, run=self._run
            )
        except OSError as error:
            self._unsaved = (
                f"the checkpoint after update {updates} could not be written: "
                f"{error.strerror or error}"
            )
            warn(f"{self._unsaved}; the loop goes on", kind="checkpoint not written")
            return False
        finally:
            self._optimizers = {}
        self._unsaved = None
        return True

    def require_saved(self) -> None:
        """Raise `RunFolderError` if the last checkpoint could not be written."""
        if self._unsaved is not None:
            raise RunFolderError(f"{self._unsaved}; make room, and go on")

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write the state into `folder`; see `rundir.checkpoints.Saves`."""
        return {
            "model": save_model(self._model, folder),
            "optimizer": save_optimizer(self._optimizers, folder),
            "precision": [one.precision.state() for one in self._all],
            "state": list(self._state),
            "windows": self._decided,
        }


def _one_module(models: Sequence[Any]) -> Module:
    if not all(isinstance(model, Module) for model in models):
        raise ConfigError(
            "checkpoints need the torch.nn.Module itself: build the Accumulator with it, not with "
            "its parameters; or keep your own checkpoints, and say first="
        )
    return models[0] if len(models) == 1 else ModuleList(models)
