"""A wrong request ends with one message and exit code 2, and leaves nothing behind."""

import gzip

import pytest

from jobs.idx import NAMES, bundled_digits, read_digits
from orchestrator.errors import DataError
from tests import helpers
from tests.helpers import SMALL


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
        (("transport=nccl",), "transport=gloo"),
        (
            ("optimizer=3",),
            "a group (cluster, experiment, job, optimizer or tracker) takes",
        ),
        (("-m", "train.seed=1,1"), "all points: they are equal; leave all but one of them out"),
        (
            (
                "engine.shard_optimizer=true",
                "accumulation.reduction=reproducible",
                "accumulation.micro_batch=8",
            ),
            "try accumulation.reduction=fast",
        ),
        (("engine.shard_optimizer=true", "job=line"), "not available with mindspore"),
        (
            (
                "engine.shard_optimizer=true",
                "~optimizer",
                "+optimizer._target_=torch.optim.Adagrad",
            ),
            "there are SGD, Adam",
        ),
        (("job.data_dir=/absent", SMALL), "/absent"),
        (("notify.command='nosuchprogram x'",), "there is no such program"),
        (("--config-dir=" + "x" * 300,), "File name too long"),
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


def test_a_packed_data_file_that_is_not_whole_is_named(digits):
    path = digits / NAMES["train", "images"]
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes())[:1000])
    path.unlink()
    with pytest.raises(DataError, match=r"ubyte\.gz cannot be read: Compressed file ended"):
        read_digits(digits, "train")


def test_ones_own_mnist_folder_is_read(tmp_path, digits):
    helpers.call(
        f"job.data_dir={digits}", SMALL, "train.updates=2", "run.dir=run", cwd=tmp_path, code=0
    )


@pytest.mark.parametrize("verb", [(), ("plan",)])
def test_a_traceback_that_is_asked_for_leaves_the_sentence_and_the_exit_code(tmp_path, verb):
    module = "orchestrator" if verb else "orchestrator.launch"
    for more in ((), ("-v",)):
        done = helpers.call(*verb, "train.seed='", *more, module=module, cwd=tmp_path)
        said = done.stdout + done.stderr
        assert done.returncode == 2
        assert ("Traceback" in said) == bool(more)
        assert "error: the command line cannot be read at train.seed" in said
