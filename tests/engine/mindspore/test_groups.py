"""Groups of 3 real processes over MCCL: conformance, adjoint laws, the engine's update."""

from __future__ import annotations

import functools
import subprocess

import pytest

from tests.engine.mindspore.processes import alive, run_group
from tests.engine.mindspore.program import checks

SIZE = 3
# The first test waits for all that its group does: compiling, minutes of it if busy.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The reports of a group, which is started once, also where it fails."""

    @functools.cache
    def ended():
        try:
            return run_group(tmp_path_factory.mktemp("group"), SIZE)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return error

    def found():
        if isinstance(ended(), Exception):
            raise ended()
        return ended()

    return found


@pytest.mark.parametrize("name", checks())
def test_holds_on_every_rank(reports, name):
    failed = {rank: report[name] for rank, report in enumerate(reports()) if report[name]}
    assert not failed, "\n".join(f"rank {rank}: {trace}" for rank, trace in failed.items())


def test_the_scheduler_ends_with_the_group_at_once(reports):
    scheduler = reports()[0]["scheduler"]
    assert scheduler is not None
    assert not alive(scheduler)
    assert max(report["close_s"] for report in reports()) < 3.0
