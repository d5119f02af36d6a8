"""Checkpoints in the background: one at a time, each reported once, errors in the main thread."""

import threading
from functools import partial

import pytest

from orchestrator.client.checkpoint_manager import CheckpointManager
from orchestrator.errors import ConfigError

pytestmark = pytest.mark.whole_runs


class State:
    """A state whose copy, or whose writing, fails with an error where there is one."""

    def __init__(self, copy=None, write=None):
        self.copy, self.write, self.go = copy, write, threading.Event()

    def part(self):
        return None  # rank 0 saves all of it

    def snapshot(self):
        return self

    def take(self):
        if self.copy:
            raise self.copy

    def save_state(self, folder):
        self.go.wait(60)
        if self.write:
            raise self.write
        return {}


@pytest.fixture
def build(tmp_path):
    return partial(CheckpointManager, tmp_path, run=None, keep=2)


def save(saving, updates):
    saving.on_checkpoint(updates, 10 * updates)
    saving.wait()


def test_training_goes_on_until_it_waits_and_each_end_is_reported_once(build):
    state, written = State(), []
    saving = build(state, background=True, on_written=written.append)
    saving.on_checkpoint(4, 40)
    saving.on_boundary(None)
    assert written == []
    state.go.set()
    saving.wait()
    saving.wait()
    assert (written, saving.unsaved, saving.has(4)) == ([4], None, True)
    assert saving.save_s > 0


@pytest.mark.parametrize(
    ("background", "where"), [(False, "write"), (True, "write"), (True, "copy")]
)
def test_a_full_disk_is_warned_of_and_any_other_error_raised(build, background, where):
    state = State(**{where: OSError(28, "No space left on device")})
    state.go.set()
    saving = build(state, background=background)
    with pytest.warns(UserWarning, match="after update 4 could not be written: No space left"):
        save(saving, 4)
    assert "No space left" in saving.unsaved
    state.copy = state.write = None
    with pytest.warns(UserWarning, match="there is room again: the checkpoint after update 5"):
        save(saving, 5)
    assert saving.unsaved is None
    setattr(state, where, ValueError("of the state"))
    with pytest.raises(ValueError, match="of the state"):
        save(saving, 6)


def test_an_engine_that_gives_no_copy_is_refused(build):
    with pytest.raises(ConfigError, match="checkpoint_in_background=true is not available"):
        build(object(), background=True)
    build(object(), background=False)
