"""The order of files: none is named that is not there, and none is torn apart."""

import pytest

from tests.helpers import ROOT
from tests.order import CALM, LANE, LONG, place_of, unit_of


@pytest.mark.parametrize("path", [*LANE, *LONG, *CALM])
def test_what_is_named_is_there(path):
    assert (ROOT / path).exists()


def test_a_worker_gets_whole_files_and_two_share_slurm():
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    assert all(unit_of(f"{file}::a") == unit_of(f"{file}::b[c::d]") for file in files)
    shared = {unit_of(file) for file in files if file.startswith("tests/slurm/")}
    assert len(shared) == 2
    assert len({unit_of(file) for file in files} - shared) == len(
        [file for file in files if not file.startswith("tests/slurm/")]
    )


def test_slurm_begins_first_and_then_what_takes_longest():
    order = sorted(
        ["tests/plan/test_wire.py", *LONG[::-1], "tests/slurm/test_verbs.py"], key=place_of
    )
    assert order == ["tests/slurm/test_verbs.py", *LONG, "tests/plan/test_wire.py"]
