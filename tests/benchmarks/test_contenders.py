"""All contenders do the same work: contenders' updates coincide, and bytes are counted."""

import pytest

from benchmarks import gpu_check
from benchmarks.contenders import ALL, missing
from benchmarks.link import alone, cannot_make_networks, loopback
from benchmarks.ranks import on_ranks
from tests.helpers import LIMIT_S

PARAMETERS = 784 * 512 + 512 * 256 + 256 * 128 + 128 * 10 + 512 + 256 + 128 + 10


def on_two_ranks(**task):
    with loopback(2) as link:
        return on_ranks(link, {"net": "digits", "leaves": [6], **task}, timeout_s=LIMIT_S)


def test_all_contenders_make_the_same_updates():
    installed = [name for name in ALL if missing(name) is None]
    found = on_two_ranks(kind="losses", updates=4, contenders=installed)
    curves = {row["name"]: row["losses"] for row in found["rows"]}
    assert set(curves) >= {"ours", "ours, reproducible", "DDP + no_sync", "DDP plain", "FSDP2"}
    first, *_, last = curves["ours"]
    assert abs(first - last) > 1e-3
    for curve in curves.values():
        assert curve == pytest.approx(curves["ours"], rel=1e-5)
    assert all(len(row["seconds"]) == 4 for row in found["rows"])


def test_collectives_and_bytes_of_an_update_are_counted():
    found = on_two_ranks(
        kind="times",
        contenders=["ours", "DDP + no_sync", "DDP plain"],
        reference="DDP + no_sync",
        repetitions=[3, 3],
        budget_s=0.0,
    )
    assert found["parameters"] == PARAMETERS
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["ours"]["collectives"] == 1
    assert rows["DDP plain"]["collectives"] == 3 * rows["DDP + no_sync"]["collectives"]
    assert all(row["spread"]["count"] == 3 for row in rows.values())
    if cannot_make_networks():
        assert {row["bytes"] for row in rows.values()} == {None}
        return
    floor = 4 * PARAMETERS
    assert rows["ours"]["bytes"] / floor == pytest.approx(1, abs=0.05)
    assert rows["DDP plain"]["bytes"] / floor == pytest.approx(3, abs=0.15)


def test_a_boundary_is_timed_without_the_optimizers_step():
    task = {"kind": "boundary", "net": "digits", "leaves": [1, 3], "repetitions": 3}
    rows = on_ranks(alone(), task, timeout_s=LIMIT_S)["rows"]
    assert [row["leaves"] for row in rows] == [1, 3]
    for row in rows:
        assert 0 < row["beyond"]["median"] < row["update"]["median"]
        assert 0 < row["share"]["median"] < 1


# ------------------------------------------------------------------ Checks of GPUs, without one


def test_checks_that_need_no_gpu_pass_over_gloo():
    names = [
        "versions",
        "binding",
        "late rank",
        "same bits",
        "late results",
        "lost rank",
        "fully sharded",
    ]
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
