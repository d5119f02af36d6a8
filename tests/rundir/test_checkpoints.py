"""Checkpoints appear whole or not at all; only the newest attempt writes them."""

import errno
import itertools
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from orchestrator.errors import RunFolderError
from orchestrator.rundir import checkpoints as checkpoint
from orchestrator.rundir.checkpoints import Fence, StaleAttempt, read_newest_attempt
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import INITIAL_DIGEST, RESUMES, RunDir
from tests.run_folders import make_run


class Engine:
    """Writes a few bytes; can run out of disk in the middle, with this error."""

    def __init__(self, content=b"weights", fails=None):
        self.content, self.fails = content, fails

    def save_state(self, folder):
        (folder / checkpoint.WEIGHTS).write_bytes(self.content)
        if self.fails:
            raise self.fails
        return {"scale": 2.0}


def save(folder, updates, engine=None, keep=10, run=None):
    return checkpoint.save(
        folder, engine or Engine(), updates=updates, samples=10 * updates, keep=keep, run=run
    )


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (SafetensorError("I/O error: No space left on device"), errno.EIO),
    ],
)
def test_a_full_disk_leaves_the_last_good_one_and_nothing_else(tmp_path, error, number):
    save(tmp_path, 1)
    with pytest.raises(OSError, match="No space") as raised:
        save(tmp_path, 2, Engine(fails=error))
    assert raised.value.errno == number
    assert [p.name for p in tmp_path.iterdir()] == ["update-000000001"]


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


def test_damaged_checkpoint_is_skipped_and_replaced(tmp_path):
    save(tmp_path, 1)
    damaged = save(tmp_path, 2) / checkpoint.WEIGHTS
    damaged.write_bytes(b"wrong")
    found, passed_over = checkpoint.newest(tmp_path)
    assert found.updates == 1
    assert "is damaged" in passed_over[0]
    save(tmp_path, 2)
    assert checkpoint.newest(tmp_path)[0].updates == 2


@pytest.fixture
def unreadable(monkeypatch):
    """By the end of a path: errors of the next times that it is opened or listed."""
    monkeypatch.setattr("orchestrator.rundir.files.READ_POLL_S", 0.0)
    errors, calls = {}, {"open": os.open, "scandir": os.scandir}

    def replace(name):
        def call(path, *arguments, **more):
            for part, left in errors.items():
                if str(path).endswith(part) and left:
                    raise OSError(left[0], os.strerror(left.pop(0)), str(path))
            return calls[name](path, *arguments, **more)

        monkeypatch.setattr(os, name, call)

    replace("open")
    replace("scandir")
    return errors


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ETIMEDOUT])
@pytest.mark.parametrize("part", ["", "/update-000000002", "/state.json", "/weights.safetensors"])
def test_what_cannot_be_read_for_now_is_read_again(tmp_path, unreadable, number, part):
    save(tmp_path, 2)
    unreadable[part or f"/{tmp_path.name}"] = [number] * 3
    with pytest.warns(match="; reading it again, for up to 60 s") as warned:
        newest, passed_over = checkpoint.newest(tmp_path)
    assert (newest.updates, passed_over, len(warned)) == (2, [], 1)
    assert not any(unreadable.values())


@pytest.mark.parametrize("part", ["/state.json", "/weights.safetensors"])
@pytest.mark.parametrize("next_updates", [2, 3])
def test_what_could_not_be_read_is_skipped_and_never_removed(
    tmp_path, monkeypatch, unreadable, part, next_updates
):
    save(tmp_path, 1)
    intact = save(tmp_path, 3)
    monkeypatch.setattr("orchestrator.rundir.files.READ_PATIENCE_S", 0.0)
    for aside in ("skipped-update-000000003", "skipped-update-000000003-1"):
        unreadable[f"{intact.name}{part}"] = [errno.ESTALE] * 1000
        newest, [sentence] = checkpoint.newest(tmp_path)
        assert newest.updates == 1
        assert "cannot be read: Stale file handle; the next checkpoint renames this" in sentence
        save(tmp_path, next_updates, Engine(b"others"), keep=2)
        unreadable.clear()
        kept = [path.name for path in checkpoint.list_checkpoints(tmp_path)]
        assert kept == ["update-000000001", f"update-{next_updates:09d}"]
        assert (tmp_path / aside / checkpoint.WEIGHTS).read_bytes() == b"weights"
        assert checkpoint.newest(tmp_path)[0].updates == next_updates
        shutil.rmtree(tmp_path / kept[1])
        intact = save(tmp_path, 3)


def test_no_readable_checkpoint_is_refused(tmp_path, monkeypatch, unreadable):
    save(tmp_path, 1)
    monkeypatch.setattr("orchestrator.rundir.files.READ_PATIENCE_S", 0.0)
    unreadable["/state.json"] = [errno.EIO] * 1000
    with pytest.raises(RunFolderError, match="or resume once it can be read"):
        checkpoint.newest(tmp_path)


def test_a_damaged_later_one_is_kept_aside(tmp_path):
    save(tmp_path, 1)
    damaged = save(tmp_path, 3) / checkpoint.WEIGHTS
    damaged.write_bytes(b"wrong")
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "skipped-update-000000003",
        "update-000000001",
        "update-000000002",
    ]


def test_weights_that_are_a_link_are_damage_and_not_an_error(tmp_path):
    save(tmp_path, 1)
    weights = save(tmp_path, 2) / checkpoint.WEIGHTS
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    newest, [sentence] = checkpoint.newest(
        tmp_path, contents=False, damage=lambda found: found.damage(found.files)
    )
    assert (newest.updates, "is a link" in sentence) == (1, True)


@pytest.mark.parametrize("name", ["../update-000000001/weights.safetensors", "/etc/hostname"])
def test_a_state_that_names_files_outside_its_folder_is_damage(tmp_path, name):
    folder = save(tmp_path, 2)
    digest = checkpoint.file_sha256(folder / checkpoint.WEIGHTS)
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


def test_only_the_newest_are_kept_without_damaged_later_ones(tmp_path):
    left = tmp_path / f".partial-000000005-{os.getpid()}"
    left.mkdir()
    (left / "old.safetensors").write_bytes(b"of a killed process with this number")
    (save(tmp_path, 8) / checkpoint.WEIGHTS).write_bytes(b"damaged")
    for updates in range(1, 6):
        save(tmp_path, updates, keep=2)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == [
        "update-000000004",
        "update-000000005",
    ]
    found = checkpoint.load(tmp_path / "update-000000005")
    assert (found.updates, found.samples, found.extra) == (5, 50, {"scale": 2.0})


def test_the_first_after_each_multiple_is_kept_for_good(tmp_path):
    for updates in range(3, 40, 3):
        checkpoint.save(
            tmp_path, Engine(), updates=updates, samples=10 * updates, keep=2, keep_every=10
        )
    kept = [checkpoint.updates_after(folder) for folder in checkpoint.list_checkpoints(tmp_path)]
    assert kept == [12, 21, 30, 36, 39]


def test_a_checkpoint_under_the_name_of_another_is_damage(tmp_path):
    moved = save(tmp_path, 2).rename(tmp_path / "update-000000003")
    with pytest.raises(RunFolderError, match="is of the checkpoint after 2 updates"):
        checkpoint.load(moved)
    elsewhere = moved.rename(tmp_path / "best")
    assert checkpoint.load(elsewhere).updates == 2  # a name that says nothing


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path):
    save(tmp_path, 1, run="a")
    folder = save(tmp_path, 2, run="b")
    assert checkpoint.load(folder, "b").updates == 2
    with pytest.raises(RunFolderError, match="is a checkpoint of another run"):
        checkpoint.load(folder, "a")
    found, passed_over = checkpoint.newest(tmp_path, "a")
    assert (found.updates, len(passed_over)) == (1, 1)
    assert passed_over[0].endswith("; going on from an earlier checkpoint")
    with pytest.raises(RunFolderError, match=r"no checkpoint .* another run.*\. Bring one back"):
        checkpoint.newest(tmp_path, "c")


def test_without_its_contents_a_checkpoint_is_read_by_the_names_of_its_files(tmp_path):
    folder = save(tmp_path, 2)
    weights = folder / checkpoint.WEIGHTS
    weights.write_bytes(b"WEIGHTS")
    assert checkpoint.load(folder, contents=False).updates == 2
    assert checkpoint.newest(tmp_path, contents=False)[0].updates == 2
    with pytest.raises(RunFolderError, match=f"{weights} is damaged: its digest"):
        checkpoint.newest(tmp_path)
    for name in (".state.json.swp", ".nfs000000000"):  # an editor's, and NFS's
        (folder / name).touch()
        assert checkpoint.load(folder, contents=False).updates == 2
    (folder / "more").touch()
    with pytest.raises(RunFolderError, match="more is damaged"):
        checkpoint.load(folder, contents=False)


def test_a_checkpoint_that_is_met_again_is_kept_as_it_is(tmp_path):
    before = save(tmp_path, 2, run="a")
    number = before.stat().st_ino
    assert save(tmp_path, 2, Engine(content=b"others"), run="a") == before
    assert before.stat().st_ino == number
    assert (before / checkpoint.WEIGHTS).read_bytes() == b"weights"


def test_checkpoints_are_in_the_order_of_their_updates_however_long_the_numbers(tmp_path):
    for name in ("update-10", "update-9", "update-000000011", "update-x", "update-", "other"):
        (tmp_path / name).mkdir()
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == [
        "update-9",
        "update-10",
        "update-000000011",
    ]
    assert checkpoint.folder_of(tmp_path, 7) == tmp_path / "update-000000007"


@pytest.mark.parametrize("content", [b"weightz", b"weights and more", b"", None])
def test_initial_weights_are_those_of_the_start_or_refused(tmp_path, content):
    run = RunDir(tmp_path)
    run.initial_weights.write_bytes(b"weights")
    write_json(run.submission, {INITIAL_DIGEST: checkpoint.file_sha256(run.initial_weights)})
    checkpoint.check_initial(run)
    run.initial_weights.unlink()
    if content is not None:
        run.initial_weights.write_bytes(content)
    said = "cannot be read: No such file" if content is None else "is damaged: its digest"
    with pytest.raises(RunFolderError, match=f"{run.initial_weights} {said}"):
        checkpoint.check_initial(run)


@given(own=st.integers(0, 50), newest=st.integers(0, 50))
def test_only_a_higher_number_supersedes(tmp_path_factory, own, newest):
    path = tmp_path_factory.mktemp("fence") / "newest"
    assert read_newest_attempt(path) == -1
    Fence(path, newest).publish()
    fence = Fence(path, own)
    assert fence.is_stale == (newest > own)
    if newest > own:
        with pytest.raises(StaleAttempt, match=f"attempt {newest} of this run has begun"):
            fence.check()
        with pytest.raises(StaleAttempt):
            fence.publish()
        assert read_newest_attempt(path) == newest
    else:
        fence.check()
        fence.publish()
        assert read_newest_attempt(path) == own


@pytest.mark.parametrize("damage", ["1 2", "-3", "1.0", "\u0663"])
def test_what_is_not_the_number_of_an_attempt_is_damage_and_not_before_the_first(tmp_path, damage):
    path = tmp_path / "newest"
    path.write_text(damage)
    with pytest.raises(RunFolderError, match=f"{path} is"):
        read_newest_attempt(path)
    with pytest.raises(RunFolderError):
        Fence(path, 99).publish()
    assert path.read_text() == damage


# ------------------------------------------------------------------ Digests


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with two checkpoints; what a resume reads of it."""
    run = make_run(tmp_path_factory.mktemp("seal") / "run")
    write_json(run.result, {"state": "stopped", "updates": 2, "restarts": []})
    write_json(run.resumes, {RESUMES: [{"attempt": 1, "overrides": []}]})
    for updates in (1, 2):
        engine = Engine(bytes(range(40 * updates)))
        save(run.checkpoints, updates, engine, run=run.identity)
    return run


READERS = {
    "config.yaml": lambda run: RunDir(run.path).identity,
    "submission.json": RunDir.read_submission,
    "plan.json": RunDir.read_plan,
    "result.json": RunDir.read_result,
    "resumes.json": RunDir.read_resumes,
    "handle.json": RunDir.read_handle,
    "attempts/000/restart.json": RunDir.restarts,
    "speeds.json": lambda run: read_json(run.speeds),
    "initial_weights.safetensors": checkpoint.check_initial,
    **dict.fromkeys(
        (f"checkpoints/update-000000002/{name}" for name in ("state.json", "weights.safetensors")),
        lambda run: checkpoint.load(run.checkpoints / "update-000000002", run.identity),
    ),
}


@pytest.fixture(scope="module")
def full(whole, tmp_path_factory):
    """The run with every file that a resume may read."""
    run = RunDir(shutil.copytree(whole.path, tmp_path_factory.mktemp("full") / "run"))
    run.begin_attempt()
    handle = {"kind": "slurm", "job_id": "70", "attempt": 0, "slurm_conf": None, "time": 1.5}
    write_json(run.handle, handle)
    note = {"attempt": 1, "why": "preempted", "resumed_from": 1, "lost_updates": 0}
    write_json(run.restart(0), note)
    write_json(run.speeds, {"run": "runs/a", "speeds": [[0, [1.0, 1.0]], [9, [1.5, 0.5]]]})
    run.initial_weights.write_bytes(bytes(range(100)))
    digest = {INITIAL_DIGEST: checkpoint.file_sha256(run.initial_weights)}
    write_json(run.submission, {**run.read_submission(), **digest})
    return run


@pytest.mark.parametrize("name", READERS)
def test_every_single_bit_of_every_file_that_a_resume_reads_is_under_a_digest(full, name):
    read_it, path = READERS[name], full.path / name
    read_it(full)
    content = path.read_bytes()
    accepted = []
    with path.open("r+b", buffering=0) as file:
        for offset, bit in itertools.product(range(len(content)), range(8)):
            os.pwrite(file.fileno(), bytes([content[offset] ^ 1 << bit]), offset)
            try:
                accepted.append((offset, bit, read_it(full)))
            except RunFolderError as error:
                assert path.name in str(error)  # noqa: PT017  # every bit may end this way
            os.pwrite(file.fileno(), content[offset : offset + 1], offset)
    assert not accepted
    read_it(full)


def test_a_file_does_not_stand_in_for_another(whole, tmp_path):
    run = RunDir(shutil.copytree(whole.path, tmp_path / "run"))
    shutil.copy(run.plan, run.submission)
    with pytest.raises(RunFolderError, match=r"submission\.json is damaged"):
        run.read_submission()


def test_a_rewritten_config_keeps_the_runs_identity(whole, tmp_path):
    run = RunDir(shutil.copytree(whole.path, tmp_path / "run"))
    text = run.config.read_text()
    run.write_config(text[: text.rindex("#")].replace("updates: 3", "updates: 30"))
    assert run.identity == whole.identity
    assert run.read_config()["train"]["updates"] == 30


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[" * 200_000, b'{"updates": 1}'])
def test_a_file_without_a_digest_is_refused_in_one_sentence(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match=f"^{path} is damaged: .{{,80}}$"):
        read_json(path)


def test_an_empty_table_is_read_back(tmp_path):
    write_json(tmp_path / "plan.json", {})
    assert read_json(tmp_path / "plan.json") == {}


def test_a_last_checkpoint_that_is_removed_while_it_is_read_is_replaced_by_the_next(tmp_path):
    def read(found):
        save(tmp_path, min(found.updates + 1, 4), keep=1)
        return found.updates, (found.folder / checkpoint.WEIGHTS).read_bytes()

    assert checkpoint.read_last(tmp_path, None, read) is None
    save(tmp_path, 1)
    assert checkpoint.read_last(tmp_path, None, read) == (4, b"weights")
    save(tmp_path, 5, keep=1)
    (tmp_path / "update-000000005" / checkpoint.WEIGHTS).write_bytes(b"other")
    with pytest.raises(RunFolderError, match="is damaged"):
        checkpoint.read_last(tmp_path, None, read)


def test_reading_a_last_checkpoint_is_given_up_after_some_tries(tmp_path):
    tried = []

    def read(found):
        tried.append(found.updates)
        save(tmp_path, found.updates + 1, keep=1)
        return (found.folder / checkpoint.WEIGHTS).read_bytes()

    save(tmp_path, 1)
    with pytest.raises(FileNotFoundError):
        checkpoint.read_last(tmp_path, None, read)
    assert tried == [1, 2, 3, 4, 5]
