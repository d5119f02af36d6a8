"""Sizes of the files of generations, on thousands of ranks."""

import contextlib
import resource

import pytest

from orchestrator.rundir.generations import (
    MOST_OF_REASON,
    MOST_REASONS,
    GenerationRecord,
    message_of,
)

REPLACEMENTS = 3


@contextlib.contextmanager
def largest_file(size):
    """Files of this process cannot grow beyond `size` bytes meanwhile, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("ranks", [2, 1024, 8000])
def test_room_for_a_generation_is_as_large_as_the_largest_one(tmp_path, ranks):
    record = GenerationRecord(tmp_path)
    members = [rank + REPLACEMENTS * ranks for rank in range(ranks)]
    joined = {str(member): [] for member in members}
    record.publish(9999, members, joined=joined, updates=10**9, hung=members, time=1.8e9 + 1 / 3)
    size = record.path(9999).stat().st_size
    with largest_file(size - 1):
        assert not record.has_room(members)
    assert record.has_room(members)
    with largest_file(size + 100):
        assert record.has_room(members), "it asks for hardly more than that"
    assert [path.name for path in tmp_path.iterdir()] == ["generation-9999.json"]


@pytest.mark.parametrize("ranks", [1024, 8000])
def test_reasons_take_the_same_room_however_many_and_long_they_are(tmp_path, ranks):
    record = GenerationRecord(tmp_path)
    remaining, gone = list(range(0, ranks, 2)), list(range(1, ranks, 2))
    why = [f"on node{rank}: {'it hangs in a module ' * 1000}" for rank in gone]
    record.publish(1, remaining, gone=gone, time=1.8e9)
    bare = record.path(1).stat().st_size
    record.publish(2, remaining, gone=gone, time=1.8e9, why=why)
    reasons = record.path(2).stat().st_size - bare
    # A "…" takes 6 bytes, and each reason a line with two quotes; then one says how many are left.
    assert reasons <= (MOST_REASONS + 1) * (MOST_OF_REASON + 12)
    reasons = message_of(record.read(2))["why"]
    assert reasons[0].startswith("on node1: it hangs in a module")
    assert reasons[-1] == f"and {ranks // 2 - MOST_REASONS} more"
