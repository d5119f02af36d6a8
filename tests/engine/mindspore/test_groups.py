"""Groups of 2 and 4 real processes over MCCL: conformance, adjoint laws, the engine's update."""

from __future__ import annotations

import functools
import subprocess

import pytest

from tests.engine.mindspore.processes import alive, run_group
from tests.engine.mindspore.program import checks

SIZES = (2, 4)
# The first test of a size waits for all that its group does: compiling, minutes of it if busy.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The reports of a group of that size, which is started once, also where it fails."""

    @functools.cache
    def ended(size):
        try:
            return run_group(tmp_path_factory.mktemp("group"), size)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return error

    def reports_of(size):
        found = ended(size)
        if isinstance(found, Exception):
            raise found
        return found

    return reports_of


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in SIZES for name in checks(size)]
)
def test_holds_on_every_rank(reports, size, name):
    failed = {rank: report[name] for rank, report in enumerate(reports(size)) if report[name]}
    assert not failed, "\n".join(f"rank {rank}: {trace}" for rank, trace in failed.items())


@pytest.mark.parametrize("size", SIZES)
def test_the_scheduler_ends_with_the_group_at_once(reports, size):
    scheduler = reports(size)[0]["scheduler"]
    assert scheduler is not None
    assert not alive(scheduler)
    assert max(report["close_s"] for report in reports(size)) < 3.0
