"""From the command line to trained weights: as planned, silent, private."""

import json
import re
import signal
import subprocess
import sys

import pytest

from orchestrator import launch
from tests import helpers
from tests.helpers import TINY

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]


def test_a_run_does_as_planned_and_says_so(run, capsys):
    asked = [TINY, "train.epochs=2", "accumulation.global_batch=50", f"run.dir={run}"]
    done = helpers.call(*asked, code=0)
    before = signal.getsignal(signal.SIGINT)
    assert launch.main([*asked, "--cfg", "job"]) == 0
    assert signal.getsignal(signal.SIGINT) is before, "it is its caller's again"
    written = (run / "config.yaml").read_text()
    assert capsys.readouterr().out == written.rpartition("# run ")[0], "all but the seal"
    plan = json.loads((run / "plan.json").read_text())
    records = helpers.records(run)
    assert plan["updates"] == len(records) == 10
    assert [r["samples"] for r in records] == [50, 50, 50, 50, 40] * 2
    assert {r["collectives"] for r in records} == {plan["collectives_per_update"]} == {1}
    assert {r["bytes_on_wire"] for r in records} == {plan["bytes_on_wire_per_update"]}
    assert {r["micro_steps"] for r in records} == {4}
    result = helpers.result(run)
    assert (result["state"], result["updates"], result["samples"]) == ("finished", 10, 480)
    assert len(result["peak_memory_bytes"]) == 4
    assert result["culprit"] is None
    used = json.loads((run / "environment.json").read_text())["optimizer"]
    assert result["optimizer"] == used
    assert (used["class"], used["from"]) == ("torch.optim.adam.Adam", "the configuration")
    assert re.search(r"collectives per update +1, as planned", done.stdout)
    assert "\x1b" not in done.stdout, "it is no terminal"
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["transport"] == "gloo"
    assert list((run / "tensorboard").iterdir())
    assert len(list((run / "logs").glob("rank-*.log"))) == 4


def test_no_verb_and_no_launch_imports_a_framework(tmp_path):
    for module, arguments in (
        ("orchestrator", ("plan", "experiment=jepa_240", "--json")),
        ("orchestrator", ("resume", str(tmp_path))),
        ("orchestrator.launch", ("accumulation.steps=0",)),
    ):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", module, *arguments],
            env=helpers.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
        assert "orchestrator.errors" in imported
        assert not {"torch", "mindspore", "sklearn"} & imported


MASKED = """
import torch
from torch.nn.functional import cross_entropy
from orchestrator import Job, Loss

class Masked(Job):
    def __init__(self, all=False):
        self.all = all

    def model(self):
        return torch.nn.Linear(4, 3)

    def dataset(self):
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, x[:, :3].argmax(1), torch.arange(32))

    def loss(self, model, batch):
        x, y, number = batch
        y = torch.where((number == 3) & (not self.all), y, -100)
        return Loss(cross_entropy(model(x), y, reduction="sum"), weight=(y >= 0).sum())
"""


def test_updates_in_which_nothing_counts_are_skipped_but_not_all_of_them(tmp_path):
    (tmp_path / "masked.py").write_text(MASKED)
    asked = ["job._target_=masked.Masked", "accumulation.global_batch=16", "train.epochs=1"]
    asked += [helpers.SMALL, "tracker=none"]
    one = helpers.call(*asked, f"run.dir={tmp_path / 'one'}", cwd=tmp_path, code=0)
    assert sorted(r["applied"] for r in helpers.records(tmp_path / "one")) == [False, True]
    assert "add up to 0 over all ranks" in one.stdout + one.stderr
    assert re.search(r"not applied +1 update, without weight", one.stdout)
    none = helpers.call(*asked, "job.all=true", f"run.dir={tmp_path / 'none'}", cwd=tmp_path)
    assert none.returncode == 1
    assert "none of 2 updates was applied" in none.stdout + none.stderr
