"""The default tracker and three third-party packages pass the suites that we ship."""

from pathlib import Path

import pytest

from orchestrator.testing import TrackerSuite, TransportSuite
from tests.docs.printed import blocks
from tests.helpers import ROOT
from tests.third_party.test_packages import lines_of

pytestmark = pytest.mark.long


class TestTensorBoard(TrackerSuite):
    @pytest.fixture
    def tracker(self):
        return ["tracker=tensorboard"]

    def read(self, run):
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event

        for path in sorted(run.tensorboard.iterdir()):
            for raw in RawEventFileLoader(str(path)).Load():
                event = Event.FromString(raw)
                if event.summary.value:
                    yield event.step, {one.tag: one.simple_value for one in event.summary.value}


class TestMailbox(TransportSuite):
    @pytest.fixture
    def transport(self):
        return "mailbox"


class TestLines(TrackerSuite):
    @pytest.fixture
    def tracker(self):
        return ["tracker.kind=lines", "tracker.options.file=mine.jsonl"]

    def read(self, run):
        return lines_of(run.path / "mine.jsonl")


def test_the_page_shows_what_is_here():
    here = Path(__file__).parent
    page = ROOT / "docs/how-to/extending.md"
    package, suite = [text for language, text in blocks(page) if language]
    ours = (here / "test_cluster_suite.py").read_text()
    assert suite == ours.replace("pytestmark = [pytest.mark.whole_runs, pytest.mark.long]\n\n", "")
    described = (ROOT / "tests/third_party/cluster/pyproject.toml").read_text().splitlines()
    assert set(package.splitlines()) <= set(described)
