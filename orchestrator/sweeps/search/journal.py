"""The trials of a search in Optuna's journal, which any tool of Optuna's reads.

A trial is one record, with all that was drawn: whoever is killed has written it, or has not. One
search writes at a time, the one that holds the sweep's folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna import load_study
from optuna.exceptions import OptunaError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from orchestrator.errors import RunFolderError
from orchestrator.run_folder.files import PRIVATE_FILE

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study

NAME = "search"
DAMAGED = (
    OptunaError, ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError,
)  # fmt: skip
MADE_OF = "made_of"  # attribute of the study: what the search is one of
WHY = "why"  # attributes of a trial: why it has no value;
SAME_AS = "same_as"  # the earlier trial that is the same point


class _FolderIsHeld(JournalFileSymlinkLock):
    """No lock beside the folder's own, which ends with its process; this one would not."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class Journal:
    """The trials of one search.

    Args:
        path: of the file; made where there is none.

    Raises:
        RunFolderError: the file is damaged, or cannot be written.
    """

    def __init__(self, path: Path, direction: str) -> None:
        self._path = path
        try:
            _end_with_a_line(path)
            lock = _FolderIsHeld(str(path))
            self._storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
            studies = self._storage.get_all_studies()
            if not studies:
                self._storage.create_new_study([StudyDirection[direction.upper()]], NAME)
            self.study: Study = load_study(study_name=NAME, storage=self._storage)
            self._id = self._storage.get_study_id_from_name(NAME)
        except OSError as error:
            raise RunFolderError(f"{path} cannot be written: {error.strerror}") from error
        except DAMAGED as error:
            raise RunFolderError(f"{path} is damaged: {error}") from error

    @property
    def made_of(self) -> dict[str, Any] | None:
        """What the search is one of; None where nothing was written yet."""
        found: Any = self._storage.get_study_user_attrs(self._id).get(MADE_OF)
        if not isinstance(found, dict | None):
            raise RunFolderError(f"{self._path} is damaged: it does not say which search it is of")
        return found

    @made_of.setter
    def made_of(self, value: Mapping[str, Any]) -> None:
        self._storage.set_study_user_attr(self._id, MADE_OF, dict(value))

    @property
    def trials(self) -> Sequence[FrozenTrial]:
        """All of them, by their numbers."""
        return self._storage.get_all_trials(self._id, deepcopy=False)

    @property
    def has_value(self) -> bool:
        return any(trial.state is TrialState.COMPLETE for trial in self.trials)

    def check(self, distributions: Mapping[str, BaseDistribution]) -> None:
        """Raise `RunFolderError` where a trial is none that this search could have written."""
        for trial in self.trials:
            try:
                sound = _is_of(trial, distributions)
            except DAMAGED:
                sound = False
            if not sound:
                raise RunFolderError(
                    f"{self._path} is damaged: its trial {trial.number} is none of this search"
                )

    def trial(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(self._trial_id(number))

    def begin(
        self,
        drawn: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        same_as: int | None = None,
    ) -> int:
        """Write down a new trial; gives its number."""
        made = create_trial(
            state=TrialState.RUNNING,
            params=dict(drawn),
            distributions=dict(distributions),
            user_attrs={} if same_as is None else {SAME_AS: same_as},
        )
        return self._storage.get_trial(self._storage.create_new_trial(self._id, made)).number

    def report(self, number: int, update: int, value: float) -> None:
        """What a trial's objective was after an update."""
        self._storage.set_trial_intermediate_value(self._trial_id(number), update, value)

    def complete(self, number: int, value: float) -> None:
        self._end(number, TrialState.COMPLETE, value)

    def prune(self, number: int, why: str) -> None:
        """It ended early: what counts of it is its objective at the last update that was told."""
        self._say_why(number, why)
        told = self.trial(number).intermediate_values
        self._end(number, TrialState.PRUNED, told[max(told)] if told else None)

    def fail(self, number: int, why: str) -> None:
        self._say_why(number, why)
        self._end(number, TrialState.FAIL, None)

    def _say_why(self, number: int, why: str) -> None:
        self._storage.set_trial_user_attr(self._trial_id(number), WHY, why)

    def _end(self, number: int, state: TrialState, value: float | None) -> None:
        values = None if value is None else [value]
        self._storage.set_trial_state_values(self._trial_id(number), state, values)

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)


def _is_of(trial: FrozenTrial, distributions: Mapping[str, BaseDistribution]) -> bool:
    """Raises one of `DAMAGED` where it is no trial at all."""
    create_trial(  # which looks at what it is given
        state=trial.state,
        value=trial.value,
        params=trial.params,
        distributions=dict(distributions),
        user_attrs=trial.user_attrs,
        intermediate_values=trial.intermediate_values,
    )
    same_as, why = trial.user_attrs.get(SAME_AS), trial.user_attrs.get(WHY, "")
    drawn = trial.distributions == distributions and isinstance(why, str)
    return drawn and (same_as is None or same_as in range(trial.number))


def _end_with_a_line(path: Path) -> None:
    """Cut off what a writer that was killed has left of a line: the next would continue it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE_FILE)
    with os.fdopen(descriptor, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
