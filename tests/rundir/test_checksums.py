"""Every bit that a resume reads is under a digest: damage is refused, or passed over and said."""

import itertools
import os
import shutil

import pytest

from orchestrator.errors import RunFolderError
from orchestrator.rundir import checkpoints as checkpoint
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import INITIAL_DIGEST, RESUMES, RunDir
from tests.run_folders import make_run
from tests.rundir.test_checkpoints import Engine, save


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
