"""Requirements on every tracker, as the class that writes a run's scalars uses it. No framework.

    class TestMine(TrackerSuite):
        @pytest.fixture
        def tracker(self):
            return ["tracker.kind=mine"]

        def read(self, run):
            return [(step, values), ...]

The fixture gives the overrides that choose it; `read` returns what the tracker has written of the
run, in the order of writing, with `values` by name.
"""

from __future__ import annotations

import math
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.config.composer import compose
from orchestrator.config.reading import to_yaml
from orchestrator.config.schema import Config
from orchestrator.engine.conformance import expect
from orchestrator.errors import ConfigError
from orchestrator.plugins import TRACKERS
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import State
from orchestrator.trainer.recorder import Scalars, Tracker

LOSS, ACCURACY = "train/loss", "evaluation/accuracy"


def _create_run(tracker: Sequence[str], folder: Path) -> tuple[RunDir, Config]:
    run = RunDir(folder / "run")
    run.create()
    config = compose(["job=digits", f"run.dir={run.path}", *tracker])
    run.write_config(to_yaml(config))
    return run, config


class TrackerSuite(ABC):
    """Tests of one tracker; see the module."""

    @abstractmethod
    def read(self, run: RunDir) -> Sequence[tuple[int, Mapping[str, float]]]:
        """Return what it has written."""

    def test_written_values_are_there_after_the_close_and_a_later_attempt_adds_to_them(
        self, tracker: Sequence[str], tmp_path: Path
    ) -> None:
        run, config = _create_run(tracker, tmp_path)
        written = [(0, {LOSS: 0.5}), (1, {LOSS: 0.25, ACCURACY: 1.0}), (1, {LOSS: 0.125})]
        for attempt in (written[:2], written[2:]):  # a resume reaches a step for the second time
            scalars = Scalars(run, config)
            for step, values in attempt:
                scalars.write(step, values)
            scalars.close(State.FINISHED)
        expect([(step, dict(values)) for step, values in self.read(run)], written, "what is read")

    def test_non_finite_values_are_accepted(self, tracker: Sequence[str], tmp_path: Path) -> None:
        run, config = _create_run(tracker, tmp_path)
        chosen = TRACKERS.make(config.tracker.kind, Tracker, run, config)
        chosen.write(0, {LOSS: math.nan, ACCURACY: math.inf})
        chosen.close()
        [(_, values)] = self.read(run)
        expect(
            (math.isnan(values[LOSS]), values[ACCURACY]), (True, math.inf), "not a number, infinity"
        )

    def test_a_failing_tracker_ends_no_training_and_warns_at_most_once(
        self, tracker: Sequence[str], tmp_path: Path
    ) -> None:
        run, config = _create_run(tracker, tmp_path)
        scalars = Scalars(run, config)
        shutil.rmtree(run.path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                scalars.write(step, {LOSS: 1.0})
            scalars.close(State.FINISHED)
        expect(
            len(caught) <= 1,
            True,
            f"at most one warning, of {[str(warning) for warning in caught]}",
        )

    def test_an_unknown_option_is_refused(self, tracker: Sequence[str], tmp_path: Path) -> None:
        run, config = _create_run([*tracker, "+tracker.options.no_such_option=1"], tmp_path)
        try:
            Scalars(run, config)
        except ConfigError as error:
            expect("tracker.options.no_such_option" in str(error), True, f"its name in: {error}")
        else:
            raise AssertionError("tracker.options.no_such_option=1 was accepted")
