"""Restarts of lost workers: which ones, and when."""

import pytest

from orchestrator.agent.generations import GenerationRecord
from orchestrator.agent.replacements import MOST_IN_VAIN, REST_S, Replacements
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import ProgressWriter
from tests.agent.specs import node_spec

ANYWHERE = lambda _: True  # noqa: E731


class Attempt:
    """Four ranks on two nodes, a clock that is set, and the record that they write."""

    def __init__(self, folder, most=16):
        run = RunDir(folder)
        run.attempt(0).mkdir(parents=True)
        self.now, self.record = 100.0, GenerationRecord(run.attempt(0))
        self.record.publish(0, range(4))
        self.progress = ProgressWriter(run.progress(0))
        spec = node_spec(folder, nodes=2, ranks_per_node=2, replacements=most)
        self.replacements = Replacements(run, spec, self.record, lambda: self.now)

    def lose(self, rank):
        """Gives why it is not started again, and what is started after a while."""
        why_not = self.replacements.lost(rank)
        assert self.replacements.due(ANYWHERE) == []
        self.now += REST_S
        return why_not, self.replacements.due(ANYWHERE)


@pytest.fixture
def attempt(tmp_path):
    return Attempt(tmp_path)


def test_a_rank_that_did_updates_is_started_again_and_again(attempt):
    assert attempt.lose(2) == ("", [(2, 1)])
    attempt.record.publish(1, (0, 1, 3), gone=[2])
    attempt.record.publish(2, (0, 1, 3, 6), joined={"6": []}, updates=7)
    attempt.progress.write(9, 0, 4)
    assert attempt.lose(2) == ("", [(2, 2)])


def test_a_rank_waits_for_its_node(attempt):
    attempt.replacements.lost(2)
    attempt.now += REST_S
    assert attempt.replacements.due(lambda _: False) == []
    assert attempt.replacements.pending
    assert attempt.replacements.due(ANYWHERE) == [(2, 1)]


def test_a_rank_whose_processes_come_to_nothing_is_given_up_with_a_sentence(attempt):
    attempt.lose(2)
    attempt.record.publish(1, (0, 1, 3), gone=[2])
    attempt.record.publish(2, (0, 1, 3, 6), joined={"6": []}, updates=7)
    attempt.progress.write(7, 3, 4)  # in its first update
    assert attempt.lose(2) == ("", [(2, 2)])
    why_not, due = attempt.lose(2)  # on its way in
    assert f"its last {MOST_IN_VAIN} processes did no update" in why_not
    assert due == []
    assert attempt.lose(3) == ("", [(3, 1)]), "another one is"


def test_no_more_than_were_asked_for_and_none_once_the_run_ends(tmp_path):
    attempt = Attempt(tmp_path, most=1)
    assert attempt.lose(1) == ("", [(1, 1)])
    why_not, due = attempt.lose(0)
    assert "run.max_replacements=1" in why_not
    assert due == []
    attempt = Attempt(tmp_path / "at once", most=1)
    assert attempt.replacements.lost(2) == ""
    assert "run.max_replacements=1" in attempt.replacements.lost(3), "the other one is promised"
    attempt.now += REST_S
    assert attempt.replacements.due(ANYWHERE) == [(2, 1)]
    attempt = Attempt(tmp_path / "another")
    attempt.replacements.lost(1)
    attempt.replacements.stop()
    attempt.now += REST_S
    assert not attempt.replacements.pending
    assert attempt.replacements.due(ANYWHERE) == []
