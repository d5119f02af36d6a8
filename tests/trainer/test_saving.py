"""Checkpoints in the background: one at a time, each told once, errors in the main thread."""

import threading

import pytest

from orchestrator.errors import ConfigError
from orchestrator.trainer.recorder import Saving


class State:
    """Its copy fails with an error where there is one."""

    def __init__(self, error=None):
        self.error = error

    def snapshot(self):
        return self

    def take(self):
        if self.error:
            raise self.error

    def save_state(self, folder):
        return {}


def test_training_goes_on_until_somebody_waits_and_what_came_of_it_is_told_once():
    saving, go = Saving(State(), background=True), threading.Event()
    saving.begin(4, lambda state: go.wait(60))
    assert saving.running
    assert saving.ended(wait=False) is None
    go.set()
    written = saving.ended(wait=True)
    assert (written.updates, written.error, saving.running) == (4, None, False)
    assert saving.ended(wait=True) is None


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("where", ["copy", "disk"])
def test_an_error_is_told_whoever_writes(background, where):
    error = OSError(28, "No space left on device")
    saving = Saving(State(error if where == "copy" else None), background=background)

    def write(state):
        if where == "disk" or not background:
            raise error

    saving.begin(4, write)
    assert saving.ended(wait=True).error is error


def test_an_engine_that_gives_no_copy_is_refused():
    with pytest.raises(ConfigError, match="checkpoint_in_background=true is not available"):
        Saving(object(), background=True)
    Saving(object(), background=False)
