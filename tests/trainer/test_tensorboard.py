"""The default tracker, and what is true of all of them."""

import pytest

from orchestrator.config.composer import compose
from orchestrator.engine.common import waiting
from orchestrator.errors import ConfigError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import State
from orchestrator.runs.start import prepare
from orchestrator.trainer import tensorboard
from orchestrator.trainer.recorder import Scalars, check_tracker
from tests.helpers import TINY


def test_without_its_package_the_default_tracker_is_left_out_with_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check_tracker("tensorboard")
    with pytest.warns(UserWarning, match=r"tracker\.kind=tensorboard.*pip install tensorboard"):
        scalars = Scalars(RunDir(tmp_path), compose([TINY]))
    scalars.write(0, {"train/loss": 1.0})
    assert not list(tmp_path.iterdir())


def test_an_option_that_the_default_does_not_have_is_refused_before_the_run():
    config = compose(["tracker=tensorboard", "tracker.options.rate=1"])
    with pytest.raises(ConfigError, match=r"there is no key 'tracker\.options"):
        prepare(config)


def test_a_tracker_that_blocks_is_declared_so_that_it_ends_no_training(run, monkeypatch):
    activities = []
    for name in ("__init__", "write", "close"):
        monkeypatch.setattr(
            tensorboard.TensorBoard, name, lambda *_: activities.append(waiting.declared_activity())
        )
    scalars = Scalars(run, compose([TINY, "tracker=tensorboard"]))
    scalars.write(0, {"train/loss": 0.5})
    scalars.close(State.FINISHED)
    assert activities == ["it waits for its tracker"] * 3
