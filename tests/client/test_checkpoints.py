"""Ranks restore one checkpoint together, and pass over one together that some cannot read."""

import errno
import os
import threading
import warnings

import pytest

from orchestrator import run_in_threads
from orchestrator.client.checkpoint_manager import CheckpointManager
from orchestrator.engine.torch.group import gather_numbers
from orchestrator.rundir import checkpoints as checkpoint

RANKS = 3


class State:
    """Two files; which folder a rank has loaded."""

    def __init__(self, group=None):
        self.gather = lambda numbers: gather_numbers(group, numbers)
        self.loaded = None

    def save_state(self, folder):
        for name in ("a", "b"):
            (folder / name).write_text(name)
        return {}

    def load_state(self, folder, extra):
        self.loaded = folder.name


@pytest.fixture
def stale(monkeypatch):
    """In each thread: `file`, the end of a path that it cannot open, although the file is there."""
    stale, open_file = threading.local(), os.open

    def call(path, *arguments, **more):
        end = getattr(stale, "file", None)
        if end and str(path).endswith(end):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return open_file(path, *arguments, **more)

    monkeypatch.setattr(os, "open", call)
    monkeypatch.setattr("orchestrator.rundir.files.READ_PATIENCE_S", 0.0)
    return stale


@pytest.mark.parametrize("name", ["state.json", "a", "b"])
@pytest.mark.parametrize("ranks", [(), (0,), (1,), (1, 2), (0, 1, 2)])
def test_ranks_fall_back_together_from_what_one_cannot_read(tmp_path, stale, name, ranks):
    for updates in (1, 2):
        checkpoint.save(tmp_path, State(), updates=updates, samples=10 * updates, keep=2)

    def restore(group):
        stale.file = f"update-000000002/{name}" if group.rank in ranks else None
        state = State(group)
        position = CheckpointManager(tmp_path, state, run=None, keep=2).restore(group.rank)
        return position, state.loaded

    readers = {"a": {0}, "b": {1}}.get(name, {*range(RANKS)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored = run_in_threads(RANKS, restore)
    sentences = [str(warning.message) for warning in caught]
    if readers.isdisjoint(ranks):
        assert restored == [((2, 20), "update-000000002")] * RANKS
        assert not sentences
    else:
        assert restored == [((1, 10), "update-000000001")] * RANKS
        [sentence] = sentences
        assert "cannot be read" in sentence
        assert sentence.endswith("; going on from an earlier checkpoint")
    assert checkpoint.load(tmp_path / "update-000000002").updates == 2
