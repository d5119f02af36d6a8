"""Three third-party packages pass the suites that we ship, and train together."""

import json
import os
from pathlib import Path

import pytest

from orchestrator.testing import TrackerSuite, TransportSuite
from tests.docs.printed import blocks
from tests.helpers import ROOT, TINY, call, records, result

pytestmark = pytest.mark.long


class TestMailbox(TransportSuite):
    @pytest.fixture
    def transport(self):
        return "mailbox"


def lines_of(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(one.pop("step"), one) for one in found]


class TestLines(TrackerSuite):
    @pytest.fixture
    def tracker(self):
        return ["tracker.kind=lines", "tracker.options.file=mine.jsonl"]

    def read(self, run):
        return lines_of(run.path / "mine.jsonl")


def test_a_run_that_is_placed_connected_and_tracked_by_all_three(target, tmp_path):
    run = tmp_path / "run"
    call(
        TINY,
        f"run.dir={run}",
        "cluster.kind=listed",
        "cluster.options.names=[ann,bob]",
        "cluster.ranks_per_node=1",
        "transport=mailbox",
        "tracker.kind=lines",
        "train.updates=4",
        "accumulation.global_batch=40",
        "accumulation.steps=2",
        PYTHONPATH=f"{target}{os.pathsep}{ROOT}",
        code=0,
    )
    assert (result(run)["state"], result(run)["updates"]) == ("finished", 4)
    assert json.loads((run / "environment.json").read_text())["transport"] == "mailbox"
    planned = json.loads((run / "plan.json").read_text())["collectives_per_update"]
    assert [record["collectives"] for record in records(run)] == [planned] * 4
    tracked = [
        (n, one["train/loss"]) for n, one in lines_of(run / "scalars.jsonl") if "train/loss" in one
    ]
    assert tracked == [(record["update"], record["loss"]) for record in records(run)]


def test_the_page_shows_what_is_here():
    here = Path(__file__).parent
    page = ROOT / "docs/how-to/extending.md"
    package, suite = [text for language, text in blocks(page) if language]
    ours = (here / "test_cluster_suite.py").read_text()
    assert suite == ours.replace("pytestmark = [pytest.mark.whole_runs, pytest.mark.long]\n\n", "")
    described = (here / "cluster/pyproject.toml").read_text().splitlines()
    assert set(package.splitlines()) <= set(described)
