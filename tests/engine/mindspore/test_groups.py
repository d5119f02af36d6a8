"""A group of 3 real processes over MCCL: conformance, adjoint laws, the engine's update."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.mindspore.program import checks
from tests.helpers import ROOT, alive, environment


@pytest.mark.timeout(600)  # it compiles, which takes minutes if the machine is busy
def test_every_check_holds_on_every_rank_and_the_scheduler_ends_with_the_group(tmp_path):
    def be(rank):
        words = ("-m", "tests.engine.mindspore.program", str(tmp_path), str(rank), "3")
        done = subprocess.run(
            [sys.executable, *words], env=environment(GLOG_v="3", OMP_NUM_THREADS="1"), cwd=ROOT,
            capture_output=True, text=True, errors="replace", check=False, timeout=500,
        )  # fmt: skip
        path = tmp_path / f"report-{rank}.json"
        assert path.exists(), f"rank {rank} left no report: {(done.stdout + done.stderr)[-4000:]}"
        return json.loads(path.read_text())

    with ThreadPoolExecutor(3) as threads:
        reports = list(threads.map(be, range(3)))
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
    assert max(report["close_s"] for report in reports) < 5.0  # as long as it would linger
