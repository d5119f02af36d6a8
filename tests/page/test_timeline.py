"""What all ranks did in some windows: laid beside each other without comparing clocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import RunFolderError
from orchestrator.page.charts import charts
from orchestrator.page.data import data_of
from orchestrator.page.facts import facts_of
from orchestrator.page.timeline import MOST_RANKS, PARTS, timeline
from orchestrator.rundir.files import write_json
from tests.report.conftest import record, result

SECONDS = st.floats(0, 1e4)
RANKS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=300)


def window(rows, kind="typical", update=7):
    """Each row: compute, wait, optimizer and the rest of a rank's window."""
    columns = zip(*((c, w, o, c + w + o + rest) for c, w, o, rest in rows), strict=True)
    names = ("compute_s", "wait_s", "optimizer_s", "update_s")
    told = dict(zip(names, map(list, columns), strict=True))
    return {"kind": kind, "update": update, **told}


@given(RANKS)
def test_every_second_is_told_once_and_all_leave_the_reduction_together(rows):
    [found] = timeline([window(rows)], {}, None)
    assert found["of_ranks"] == len(rows)
    ends = set()
    for rank in found["ranks"]:
        compute, wait, optimizer, rest = rows[rank["rank"]]
        parts = dict(zip(PARTS, rank["seconds"].values(), strict=True))
        assert abs(sum(parts.values()) - (compute + wait + optimizer + rest)) < 1e-4
        assert parts["waiting for others"] + parts["reduction"] == pytest.approx(wait, abs=1e-5)
        ends.add(round(rank["begins_s"] + sum(parts.values()) - parts["optimizer"], 2))
    assert max(ends) - min(ends) < 0.02
    assert min(rank["begins_s"] for rank in found["ranks"]) >= 0


@given(RANKS)
def test_who_came_last_waited_for_nobody_and_is_always_drawn(rows):
    [found] = timeline([window(rows)], {}, None)
    assert min(rank["seconds"]["waiting for others"] for rank in found["ranks"]) == 0
    assert len(found["ranks"]) <= min(len(rows), MOST_RANKS)


@pytest.mark.parametrize("wrong", [{"wait_s": [1.0]}, {"wait_s": [1.0, float("nan")]}])
def test_what_is_no_time_of_every_rank_is_damage(wrong):
    with pytest.raises(RunFolderError, match="update 7 is damaged"):
        timeline([{**window([(1, 1, 1, 0)] * 2), **wrong}], {}, None)


def test_a_page_has_a_chart_of_each_window_and_marks_restarts_and_the_failure(made):
    again = {"restart": {"attempt": 1, "why": "rank 1 was killed", "resumed_from": 2,
                         "lost_updates": 0}}  # fmt: skip
    lines = [record(n, attempt=n // 2, **(again if n == 2 else {})) for n in range(4)]
    culprit = {"rank": 1, "node": "node0", "cause": "killed", "log_tail": []}
    run = made("one", records=lines, ended=result(state="failed", culprit=culprit))
    rows = [(1.0, 2.0, 0.1, 0.0), (2.5, 0.5, 0.1, 0.0)]
    told = [window(rows, "first", 0), window(rows, "slowest", 3), window(rows, "last", 3)]
    write_json(run.timeline(0), {"windows": told})
    data = data_of(facts_of(run.path))
    [one] = data["runs"]
    assert [rank["name"] for rank in one["timeline"][0]["ranks"]] == [
        "rank 0 on node0", "✕ rank 1 on node0",
    ]  # fmt: skip
    assert one["timeline"][0]["ranks"][0]["seconds"]["waiting for others"] == 1.5
    assert [(m["what"], m["update"], m["samples"]) for m in one["marks"]] == [
        ("restart", 3, 768), ("failed", 4, 1024),
    ]  # fmt: skip
    drawn = {chart["id"]: chart for chart in charts(data)}
    assert {"ranks-first", "ranks-last"} <= drawn.keys(), "a window once, however it is called"
    assert "ranks-slowest" not in drawn
    assert "✕ rank 1 on node0 came last; others waited up to 1.5 s" in drawn["ranks-last"]["says"]
    assert "one went on at update 3: rank 1 was killed" in drawn["loss-update"]["says"]
