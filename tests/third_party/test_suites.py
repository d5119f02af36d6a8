"""Three third-party packages pass the suites that we ship, and train together."""

import json
import os
from pathlib import Path

import pytest

from orchestrator.testing import TrackerSuite, TransportSuite
from tests.docs.printed import blocks
from tests.helpers import ROOT, TINY, call, records, result


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


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """A run that is placed, connected and tracked by all three."""
    run = tmp_path_factory.mktemp("together") / "run"
    call(
        TINY, f"run.dir={run}", "cluster.kind=listed", "cluster.options.names=[ann,bob]",
        "cluster.ranks_per_node=1", "transport=mailbox", "tracker.kind=lines", "train.updates=4",
        "accumulation.global_batch=40", "accumulation.steps=2",
        PYTHONPATH=f"{target}{os.pathsep}{ROOT}", code=0,
    )  # fmt: skip
    return run


def test_a_run_on_all_three_finishes(trained):
    assert (result(trained)["state"], result(trained)["updates"]) == ("finished", 4)
    assert json.loads((trained / "environment.json").read_text())["transport"] == "mailbox"


def test_its_updates_cost_the_collectives_that_were_planned(trained):
    planned = json.loads((trained / "plan.json").read_text())["collectives_per_update"]
    assert [record["collectives"] for record in records(trained)] == [planned] * 4


def test_its_tracker_has_the_losses_of_its_metrics(trained):
    tracked = [(n, one["train/loss"]) for n, one in lines_of(trained / "scalars.jsonl")
               if "train/loss" in one]  # fmt: skip
    assert tracked == [(record["update"], record["loss"]) for record in records(trained)]


def test_the_page_shows_what_is_here():
    here = Path(__file__).parent
    page = ROOT / "docs/how-to/extending.md"
    package, suite = [text for language, text in blocks(page) if language]
    assert suite == (here / "test_cluster_suite.py").read_text()
    described = (here / "cluster/pyproject.toml").read_text().splitlines()
    assert set(package.splitlines()) <= set(described)
