"""Which lost ranks are started again, and when; by the records that ranks leave."""

import pytest

from orchestrator.clusters.local.replacements import MOST_IN_VAIN, REST_S, Replacements
from orchestrator.clusters.request import Request
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import ProgressWriter

LISTENS = [4.0, 127.0, 0.0, 0.0, 0.0, 80.0, 0.0]


class Attempt:
    """Four ranks on two nodes, a clock that is set, and the record that they write."""

    def __init__(self, folder, most=16):
        run = RunDir(folder)
        run.attempt(0).mkdir(parents=True)
        self.now, self.record = 100.0, GenerationRecord(run.attempt(0))
        self.record.publish(0, range(4))
        self.progress = ProgressWriter(run.progress(0))
        details = {"replacements": most}
        request = Request(run=folder, attempt=0, ranks_per_node=2, nodes=2, details=details)
        self.replacements = Replacements(run, request, lambda: self.now)

    def lose(self, rank):
        """Gives why it is not started again, and what is started after a while."""
        why_not = self.replacements.lost(rank)
        assert self.replacements.due() == []
        self.now += REST_S
        return why_not, self.replacements.due()


@pytest.fixture
def attempt(tmp_path):
    return Attempt(tmp_path)


def test_each_process_of_a_rank_is_another_member(attempt):
    assert attempt.lose(2) == ("", [(2, 1)])
    assert attempt.replacements.member(2) == 6
    assert not attempt.replacements.let_in(2)
    attempt.record.publish(1, (0, 1, 3), gone=[2])
    attempt.record.publish(2, (0, 1, 3, 6), joined={"6": LISTENS}, updates=7)
    assert attempt.replacements.let_in(2)
    assert attempt.replacements.training({2}) == {2}
    attempt.progress.write(9, 0, 4)
    assert attempt.lose(2) == ("", [(2, 2)])
    assert attempt.replacements.member(2) == 10


def test_a_rank_whose_processes_come_to_nothing_is_given_up_with_a_sentence(attempt):
    attempt.lose(2)
    attempt.record.publish(1, (0, 1, 3), gone=[2])
    attempt.record.publish(2, (0, 1, 3, 6), joined={"6": LISTENS}, updates=7)
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
    assert attempt.replacements.due() == [(2, 1)]
    attempt = Attempt(tmp_path / "another")
    attempt.replacements.lost(1)
    attempt.replacements.stop()
    attempt.now += REST_S
    assert attempt.replacements.wait_s is None
    assert attempt.replacements.due() == []


def test_newcomers_alone_have_nobody_to_go_on_with(attempt):
    attempt.lose(2)
    assert attempt.replacements.training({0, 2}) == {0}
    assert not attempt.replacements.training({2})


def test_whom_the_others_gave_up_does_not_train_though_it_lives(attempt):
    assert attempt.replacements.training({0, 1, 2, 3}) == {0, 1, 2, 3}
    attempt.record.publish(1, (0, 2, 3), gone=[1])
    assert attempt.replacements.training({0, 1, 2, 3}) == {0, 2, 3}
