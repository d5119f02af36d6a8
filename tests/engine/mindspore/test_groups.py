"""A group of 3 real processes over MCCL: conformance, adjoint laws, the engine's update."""

from __future__ import annotations

import pytest

from tests.engine.mindspore.processes import alive, run_group
from tests.engine.mindspore.program import checks


@pytest.mark.timeout(600)  # it compiles, which takes minutes if the machine is busy
def test_every_check_holds_on_every_rank_and_the_scheduler_ends_with_the_group(tmp_path):
    reports = run_group(tmp_path, 3)
    failed = [
        f"{name}, rank {rank}: {report[name]}"
        for name in checks()
        for rank, report in enumerate(reports)
        if report[name]
    ]
    assert not failed, "\n".join(failed)
    scheduler = reports[0]["scheduler"]
    assert scheduler is not None
    assert not alive(scheduler)
    assert max(report["close_s"] for report in reports) < 3.0
