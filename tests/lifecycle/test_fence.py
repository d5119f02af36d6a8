"""Who may write: an attempt that nobody followed, and never one that somebody did."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import RunFolderError
from orchestrator.lifecycle.fence import WIDTH, Fence, Superseded, read_newest


@given(own=st.integers(0, 50), newest=st.integers(0, 50))
def test_only_a_higher_number_supersedes(tmp_path_factory, own, newest):
    path = tmp_path_factory.mktemp("fence") / "newest"
    Fence(path, newest).take()
    fence = Fence(path, own)
    assert fence.superseded == (newest > own)
    if newest > own:
        with pytest.raises(Superseded, match=f"attempt {newest} of this run"):
            fence.check()
        with pytest.raises(Superseded):
            fence.take()
        assert read_newest(path) == newest
    else:
        fence.check()
        fence.take()
        assert read_newest(path) == own


def test_before_the_first_attempt_nobody_is_superseded(tmp_path):
    assert read_newest(tmp_path / "newest") == -1
    assert not Fence(tmp_path / "newest", 0).superseded


def test_a_shorter_number_leaves_nothing_of_a_longer_one(tmp_path):
    path = tmp_path / "newest"
    path.write_text("123456789012")
    path.write_text("")
    Fence(path, 7).take()
    Fence(path, 12).take()
    assert read_newest(path) == 12


@pytest.mark.parametrize("damage", ["x", "1 2", "-3", "1.0", "\u0663", "7" * (WIDTH + 2), "1\n2"])
def test_what_is_not_the_number_of_an_attempt_is_damage_and_not_before_the_first(tmp_path, damage):
    path = tmp_path / "newest"
    path.write_text(damage)
    with pytest.raises(RunFolderError, match=f"{path} is"):
        read_newest(path)
    with pytest.raises(RunFolderError):
        Fence(path, 99).take()
    assert path.read_text() == damage
