"""A wrong request ends with one message and exit code 2, and leaves nothing behind."""

import gzip

import pytest

from jobs.idx import NAMES, bundled_digits, read_digits
from orchestrator.errors import DataError
from tests import helpers
from tests.helpers import SMALL

pytestmark = pytest.mark.whole_runs


@pytest.fixture
def digits(tmp_path):
    """A copy of the bundled digits that a test may damage."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name in NAMES.values():
        (folder / name).write_bytes((bundled_digits() / name).read_bytes())
    return folder


def test_a_truncated_data_file_is_named_once_and_leaves_no_run(run, digits):
    path = digits / NAMES["train", "images"]
    path.write_bytes(path.read_bytes()[:-100])
    done = helpers.call(SMALL, f"job.data_dir={digits}", f"run.dir={run}", code=2)
    said = (done.stdout + done.stderr).replace("\n", "")
    assert f"{path.name} is damaged" in said
    assert said.count("is damaged") == 1
    assert "Traceback" not in said
    assert not run.exists()


def test_a_packed_data_file_that_is_not_whole_is_named(digits):
    path = digits / NAMES["train", "images"]
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes())[:1000])
    path.unlink()
    with pytest.raises(DataError, match=r"ubyte\.gz cannot be read: Compressed file ended"):
        read_digits(digits, "train")


@pytest.mark.parametrize("verb", [(), ("plan",)])
def test_verbose_keeps_message_and_exit_code(tmp_path, verb):
    module = "orchestrator" if verb else "orchestrator.launch"
    for more in ((), ("-v",)):
        done = helpers.call(*verb, "train.seed='", *more, module=module, cwd=tmp_path)
        said = done.stdout + done.stderr
        assert done.returncode == 2
        assert ("Traceback" in said) == bool(more)
        assert "error: the command line cannot be read at train.seed" in said
    assert not list(tmp_path.iterdir())
