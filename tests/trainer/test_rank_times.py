"""All ranks' seconds of a few windows, brought together at a few checkpoints."""

import json

import torch

from orchestrator.client.loop import Done
from orchestrator.engine.api import BoundaryReport
from orchestrator.engine.torch import run_in_threads
from orchestrator.trainer.recorder import RankTimes


class Gathers:
    """All that is needed of an engine here; counts."""

    def __init__(self, group):
        self._group, self.calls = group, 0

    def gather(self, numbers):
        self.calls += 1
        return self._group.all_gather(torch.tensor([numbers], dtype=torch.float64)).tolist()


def told(file, updates, *, slow, meet):
    """Three ranks of so many updates that meet after each of `meet`; gathers of each rank."""

    def be(group):
        engine = Gathers(group)
        times = RankTimes(engine.gather, file if group.rank == 0 else None)
        for update in range(updates):
            wait = 5.0 if update == slow else 0.1 * group.rank + 0.001 * update
            report = BoundaryReport(update=update, loss=0, weight=1, wait_s=wait)
            times.on_boundary(Done(None, report, 1 + wait))
            if update + 1 in meet:
                times.on_meeting(last=update + 1 == updates)
        return engine.calls

    return run_in_threads(3, be)


def test_the_first_a_typical_the_slowest_and_the_last_window_of_all_ranks_are_kept(tmp_path):
    file = tmp_path / "timeline.json"
    told(file, 40, slow=3, meet={10, 20, 30, 40})
    found = {one["kind"]: one for one in json.loads(file.read_text())["windows"]}
    assert list(found) == ["first", "typical", "slowest", "last"]
    assert [found[kind]["update"] for kind in ("first", "slowest", "last")] == [0, 3, 39]
    assert found["slowest"]["wait_s"] == [5.0] * 3
    assert found["last"]["wait_s"] == [0.039, 0.139, 0.239]
    told(file, 33, slow=3, meet={8, 16, 32, 33})
    found = {one["kind"]: one["update"] for one in json.loads(file.read_text())["windows"]}
    assert found["typical"] < found["last"], "though one window alone came since they met"


def test_of_many_checkpoints_only_a_few_cost_anything(tmp_path):
    assert told(tmp_path / "t", 100, slow=3, meet=range(1, 101)) == [16] * 3
    assert told(tmp_path / "t", 1, slow=3, meet=[1]) == [2] * 3, "1, 2, 4, ... 64, and the last"


def test_a_disk_without_room_costs_the_picture_and_nothing_else(tmp_path, recwarn):
    assert told(tmp_path / "nowhere" / "t", 4, slow=3, meet=[4]) == [2] * 3
    assert "t could not be written" in str(recwarn.pop().message)
