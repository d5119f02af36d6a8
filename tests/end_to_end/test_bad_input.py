"""What is wrong is said in one message, with exit code 2, and leaves nothing behind."""

import struct

import pytest

from jobs.idx import NAMES, bundled_digits
from tests import helpers
from tests.helpers import SMALL, TINY


def refused(tmp_path, *arguments, code=2, **more):
    run = tmp_path / "run"
    done = helpers.call(f"run.dir={run}", *arguments, cwd=tmp_path, **more)
    assert done.returncode == code, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert not run.exists(), "a refused run leaves no folder"
    return said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("+clutser=slurm",), "did you mean 'cluster'"),
        (("accumulation.stpes=4",), "did you mean 'steps'"),
        (("accumulation.steps=0",), "at least 1"),
        (
            ("accumulation.global_batch=100", "accumulation.steps=2", "accumulation.micro_batch=3"),
            "accumulation.",
        ),
        (("job._target_=nowhere.Job",), "no module 'nowhere'"),
        (("job._target_=tests.helpers.call",), "is a function"),
        (("job._target_=tests.tiny_job.Tinny",), "did you mean 'Tiny'"),
        (("transport=nccl",), "transport=gloo"),
        (("engine.wire=bf16",), "bfloat16"),
        (
            (
                "engine.wire=bfloat16",
                "accumulation.reduction=reproducible",
                "accumulation.micro_batch=16",
            ),
            "try accumulation.reduction=fast",
        ),
        (("engine.wire=bfloat16", "job=line"), "engine.wire=own"),
        (
            (
                "engine.shard_optimizer=true",
                "accumulation.reduction=reproducible",
                "accumulation.micro_batch=16",
            ),
            "try accumulation.reduction=fast",
        ),
        (("engine.shard_optimizer=true", "engine.wire=bfloat16"), "try engine.wire=own"),
        (("engine.shard_optimizer=true", "job=line"), "not available with MindSpore"),
        (
            (
                "engine.shard_optimizer=true",
                "~optimizer",
                "+optimizer._target_=torch.optim.Adagrad",
            ),
            "there are SGD, Adam",
        ),
        (("job.data_dir=/absent", SMALL), "/absent"),
    ],
)
def test_wrong_requests_are_refused_without_a_trace(tmp_path, arguments, words):
    assert words in refused(tmp_path, *arguments)


@pytest.fixture
def digits(tmp_path):
    """A copy of the bundled digits that a test may damage."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name in NAMES.values():
        (folder / name).write_bytes((bundled_digits() / name).read_bytes())
    return folder


def test_a_truncated_data_file_is_named_once(tmp_path, digits):
    path = digits / NAMES["train", "images"]
    path.write_bytes(path.read_bytes()[:-100])
    said = refused(tmp_path, SMALL, f"job.data_dir={digits}")
    assert f"{path.name} is damaged" in said.replace("\n", "")
    assert said.count("is damaged") == 1


def test_a_wrong_magic_number_is_named(tmp_path, digits):
    path = digits / NAMES["train", "labels"]
    path.write_bytes(struct.pack(">i", 77) + path.read_bytes()[4:])
    assert "must be 2049, but is 77" in refused(tmp_path, SMALL, f"job.data_dir={digits}")


def test_a_missing_data_file_is_named(tmp_path, digits):
    (digits / NAMES["train", "labels"]).unlink()
    assert "there is no train-labels" in refused(tmp_path, SMALL, f"job.data_dir={digits}")


def test_ones_own_mnist_folder_is_read(tmp_path, digits):
    done = helpers.call(
        f"job.data_dir={digits}", SMALL, "train.updates=2", "run.dir=run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_runs_folder_is_not_touched(tmp_path):
    run = tmp_path / "run"
    assert helpers.call(TINY, SMALL, "train.updates=2", f"run.dir={run}").returncode == 0
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    again = helpers.call(TINY, SMALL, "train.updates=2", f"run.dir={run}")
    assert again.returncode == 2
    assert "holds another run" in again.stderr
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    done = helpers.call(TINY, "run.dir=/proc/run")
    assert (done.returncode, "cannot be written" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ("Uneven", "dataset() has 240 samples on most ranks, but 200 on rank 1"),
        ("Other", "on rank 1 sample 239 has other values than on most ranks"),
    ],
)
def test_a_data_set_that_differs_between_ranks_is_told(tmp_path, job, told):
    done = helpers.call(f"job._target_=tests.tiny_job.{job}", "train.updates=2", cwd=tmp_path)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, said
    assert told in said


@pytest.mark.parametrize("verb", [(), ("plan",)])
def test_a_traceback_that_is_asked_for_leaves_the_sentence_and_the_exit_code(tmp_path, verb):
    module = "orchestrator" if verb else "orchestrator.launch"
    for more in ((), ("-v",)):
        done = helpers.call(*verb, "train.seed='", *more, module=module, cwd=tmp_path)
        said = done.stdout + done.stderr
        assert done.returncode == 2
        assert ("Traceback" in said) == bool(more)
        assert "error: the command line cannot be read at train.seed" in said
