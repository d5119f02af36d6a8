"""`make gpu-check` where there is no GPU: what it can check runs over gloo."""

import pytest

from benchmarks import gpu_check


def test_checks_that_need_no_gpu_pass_over_gloo():
    names = [
        "versions", "binding", "late rank", "same bits", "lost rank", "fully sharded",
    ]  # fmt: skip
    rows = gpu_check.run_checks("gloo", 2, [*names, "silent micro steps"])
    results = {row["check"]: row["result"] for row in rows}
    assert results == {**dict.fromkeys(names, "pass"), "silent micro steps": "skip"}, rows


def test_a_check_that_fails_says_why_and_the_others_go_on(monkeypatch):
    def wrong(machine):
        raise ValueError(f"on {machine.ranks} ranks")

    monkeypatch.setattr(gpu_check, "CHECKS", (wrong, gpu_check.versions))
    failed, passed = gpu_check.run_checks("gloo", 2, [])
    assert (failed["result"], failed["words"]) == ("fail", "ValueError: on 2 ranks")
    assert "Traceback" in failed["details"]
    assert passed["result"] == "pass"


@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_distances_are_relative_and_in_float64(off):
    found = gpu_check._farthest([[1.0, 2.0], [3.0]], [[1.0, 2.0], [3.0 - 3 * off]])
    assert found == pytest.approx(off / (1 - off), abs=1e-15)
