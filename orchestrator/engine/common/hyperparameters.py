"""An optimizer's hyperparameters belong to the run. No framework is imported.

The learning rate is set at the start of each update; all else when the optimizer is built, or in
the job's `after_update`. What somebody changes in between, or a scheduler of the framework's, would
be overwritten in silence, or be unknown to whoever reads the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from orchestrator.errors import JobError

Values = Mapping[tuple[int, str], Any]
"""By parameter group and name; what compares with `==`."""
RATES = ("lr", "initial_lr")  # the second is a scheduler's mark


class Hyperparameters:
    """Looks whether somebody else has changed them.

    Args:
        read: gives them as they are now.
    """

    def __init__(self, read: Callable[[], Values]) -> None:
        self._read, self._kept = read, read()

    def keep(self) -> None:
        """They are as they should be: the engine, or the optimizer's own step, has set them."""
        self._kept = self._read()

    def check(self, when: str, *, jobs_turn: bool = False) -> None:
        """Raise `JobError` if they are not as they were kept.

        Args:
            when: since then, in words: "in after_update of update 3".
            jobs_turn: it was `after_update`, in which a job may change all but the rates and the
                groups (a weight decay that rises with the updates, say); what it set is kept.
        """
        found = self._read()
        if found == self._kept:
            return
        groups = {group for group, _ in found}, {group for group, _ in self._kept}
        if groups[0] != groups[1]:
            raise JobError(
                f"the optimizer had {len(groups[1])} parameter groups and has {len(groups[0])} "
                f"now, {when}; build it with all of them"
            )
        for group, name in sorted(found.keys() | self._kept.keys()):
            before, after = (held.get((group, name)) for held in (self._kept, found))
            if before != after and not (jobs_turn and name not in RATES):
                raise JobError(self._told(group, name, before, after, when))
        self._kept = found

    def _told(self, group: int, name: str, before: Any, after: Any, when: str) -> str:
        changed = (
            f"{name} of the optimizer's parameter group {group} was changed from {before!r:.40} to "
            f"{after!r:.40} {when}, behind the engine's back"
        )
        if name in RATES:
            return (
                f"{changed}, where it would have no effect: each update sets the rate. Let the job "
                "define learning_rate(self, update) in the place of a scheduler, or use schedule.*"
            )
        return f"{changed}; a job changes it in after_update(model, update), by the update"


def refuse_scheduler(groups: Iterable[Mapping[str, Any]], job: Any) -> None:
    """Raise `JobError` when a scheduler of the framework's hangs on a job's own optimizer.

    Args:
        groups: the optimizer's; both frameworks' schedulers leave their mark in them.
        job: its `optimizer` built it.
    """
    if any("initial_lr" in group for group in groups):
        raise JobError(
            f"{type(job).__name__}.optimizer has a learning-rate scheduler, which would have no "
            "effect: each update sets the rate. Leave it out and define learning_rate(self, "
            "update) in the job, or use schedule.*"
        )
