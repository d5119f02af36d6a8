"""Checkpoints appear whole or not at all, and a damaged one is passed over."""

import errno

import pytest

from orchestrator.errors import RunFolderError
from orchestrator.rundir import write_json
from orchestrator.worker import checkpoint


class Engine:
    """Writes a few bytes; can run out of disk in the middle."""

    def __init__(self, content=b"weights", fails=False):
        self.content, self.fails = content, fails

    def save_state(self, folder):
        (folder / checkpoint.WEIGHTS).write_bytes(self.content)
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return {"scale": 2.0}


def save(folder, updates, engine=None, keep=10, run=None):
    return checkpoint.save(
        folder, engine or Engine(), updates=updates, samples=10 * updates, keep=keep, run=run
    )


def test_what_was_saved_is_read_back(tmp_path):
    save(tmp_path, 3)
    found, passed_over = checkpoint.newest(tmp_path)
    assert (found.updates, found.samples, found.extra, passed_over) == (3, 30, {"scale": 2.0}, [])


def test_a_full_disk_leaves_the_last_good_one_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2, Engine(fails=True))
    assert [p.name for p in tmp_path.iterdir()] == ["update-000000001"]


def test_a_crash_between_writing_and_renaming_is_not_mistaken_for_a_checkpoint(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / ".partial-000000002-77")
    assert checkpoint.newest(tmp_path)[0].updates == 1


def test_what_killed_attempts_left_half_written_is_removed_and_nothing_else(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    kept = save(folder, 3)
    (folder / ".partial-000000004-77").mkdir()
    (folder / ".partial-000000004-77" / checkpoint.WEIGHTS).write_bytes(b"x")
    (folder / ".partial-000000005-78").symlink_to(elsewhere)
    checkpoint.remove_partial(folder)
    assert list(folder.iterdir()) == [kept]
    assert (elsewhere / "mine").exists()


def test_a_damaged_one_is_passed_over_with_a_sentence_and_later_replaced(tmp_path):
    save(tmp_path, 1)
    damaged = save(tmp_path, 2) / checkpoint.WEIGHTS
    damaged.write_bytes(b"wrong")
    found, passed_over = checkpoint.newest(tmp_path)
    assert found.updates == 1
    assert "is damaged" in passed_over[0]
    save(tmp_path, 2)
    assert checkpoint.newest(tmp_path)[0].updates == 2


def test_a_missing_file_is_damage(tmp_path):
    folder = save(tmp_path, 2)
    (folder / checkpoint.WEIGHTS).unlink()
    with pytest.raises(RunFolderError, match="is damaged"):
        checkpoint.load(folder)


def test_where_no_checkpoint_is_sound_a_run_does_not_begin_again_in_silence(tmp_path):
    for updates in (1, 2):
        (save(tmp_path, updates) / checkpoint.STATE).write_text("7")
    with pytest.raises(RunFolderError, match=r"no checkpoint .* is sound"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize("name", ["../update-000000001/weights.safetensors", "/etc/hostname"])
def test_a_state_that_names_files_outside_its_folder_is_damage(tmp_path, name):
    folder = save(tmp_path, 2)
    digest = checkpoint.digest_of(folder / checkpoint.WEIGHTS)
    state = {"updates": 2, "samples": 20, "run": None, "files": {name: digest}, "extra": {}}
    write_json(folder / checkpoint.STATE, state)
    with pytest.raises(RunFolderError, match="is damaged"):
        checkpoint.load(folder)


def test_a_checkpoint_that_is_a_link_is_passed_over_and_what_it_points_to_stays(tmp_path):
    (tmp_path / "c").mkdir()
    save(tmp_path / "c", 1)
    elsewhere = save(tmp_path, 2)
    (tmp_path / "c" / elsewhere.name).symlink_to(elsewhere)
    found, passed_over = checkpoint.newest(tmp_path / "c")
    assert (found.updates, "is a link" in passed_over[0]) == (1, True)
    save(tmp_path / "c", 2)
    assert not (tmp_path / "c" / elsewhere.name).is_symlink()
    assert checkpoint.load(elsewhere).updates == 2


def test_only_the_newest_are_kept(tmp_path):
    for updates in range(1, 6):
        save(tmp_path, updates, keep=2)
    assert [p.name for p in checkpoint.complete(tmp_path)] == [
        "update-000000004",
        "update-000000005",
    ]


def test_an_empty_folder_has_none(tmp_path):
    assert checkpoint.newest(tmp_path) == (None, [])
