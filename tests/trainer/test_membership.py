"""A worker's part in the next generations, by the messages that it gets, without other ranks."""

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.common import waiting
from orchestrator.errors import Evicted, PeerLost
from orchestrator.rundir.generations import GenerationRecord, message_of
from orchestrator.trainer import survival
from orchestrator.trainer.survival import POLL_S, GroupMembership


class Engine:
    """An engine that goes on at once. `during`: called while the ranks catch up."""

    shard_ranks = ()
    during = staticmethod(lambda: None)

    def newcomers_wait(self, waiting): ...
    def before_growth(self): ...
    def regroup(self, group): ...

    def catch_up(self, group, updates, progress):
        del group, updates, progress
        self.during()


class Rank:
    """A rank's membership of three, with a link that the test reads and writes."""

    def __init__(self, folder, rank, incarnation=0, silence_s=POLL_S / 4, timeout_s=POLL_S / 4):
        self.events, self.engine = [], Engine()
        self.link = SimpleNamespace(
            run_failed=False,
            send_event=lambda event, **values: self.events.append(event),
        )
        self.membership = GroupMembership(
            GroupSpec(
                rank=rank,
                size=3,
                local_rank=0,
                node="n",
                address="127.0.0.1",
                folder=folder,
                timeout_s=timeout_s,
            ),
            SimpleNamespace(nodes=3, heartbeat_timeout_s=silence_s),
            SimpleNamespace(form_group=lambda spec: SimpleNamespace(interrupt=lambda: None)),
            self.engine,
            SimpleNamespace(
                topology=SimpleNamespace(incarnation=incarnation, nodes=3), link=self.link
            ),
            updates=100,
            go_back=lambda rank: None,
        )
        self.progress = SimpleNamespace(
            updates=7, done=None, evaluating=False, over=lambda updates: False
        )

    def hear(self, generation, members):
        self.link.on_message(message_of({"generation": generation, "members": members}))


def test_a_replacement_that_is_not_let_in_yet_is_not_stuck_in_the_others_losses(tmp_path):
    """They lose a rank, and their update takes long."""
    GenerationRecord(tmp_path).publish(0, [0, 1, 2], code={})
    rank = Rank(tmp_path, 1, incarnation=1)
    looks = []

    def looked():
        """It looks after each message, and after a while."""
        looks.append(1)
        if len(looks) == 1:
            rank.hear(2, [0])
        rank.link.on_beat()
        return len(looks) == 4

    with pytest.raises(Evicted, match="is to stop"):
        rank.membership.join(object(), rank.progress, looked)
    assert rank.events == ["joins"]


LOST = PeerLost("a peer is lost")


@pytest.mark.whole_runs
def test_survivors_wait_for_a_generation_that_a_full_disk_delays(tmp_path, monkeypatch):
    monkeypatch.setattr(survival, "MARGIN_S", 1.0)
    rank = Rank(tmp_path, 0)

    def coordinate():
        until = time.monotonic() + 2 * survival.MARGIN_S
        while time.monotonic() < until:
            rank.link.on_message({"delayed": True})
            time.sleep(POLL_S / 2)
        rank.hear(1, [0, 2])

    coordinator = threading.Thread(target=coordinate)
    coordinator.start()
    with pytest.warns(UserWarning, match="rank 1 went away"):
        rank.membership.continue_training(LOST, rank.progress)
    coordinator.join()
    assert rank.membership.size == 2


def test_survivors_wait_while_the_coordinator_is_blocked_in_writing_a_generation(
    tmp_path, monkeypatch
):
    rank, now = Rank(tmp_path, 0, timeout_s=60.0), [100.0]

    class Changed(threading.Condition):
        """The generation comes after 20 s, by the clock of this test."""

        def wait(self, timeout=None):
            now[0] += min(timeout, 20.0)
            if now[0] >= 120.0:
                rank.hear(1, [0, 2])
            return True

    monkeypatch.setattr(survival, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rank.membership._changed = Changed()
    with pytest.warns(UserWarning, match="rank 1 went away"):
        rank.membership.continue_training(LOST, rank.progress)
    assert rank.membership.size == 2


def test_survivors_to_which_no_generation_comes_fail_with_what_they_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(survival, "MARGIN_S", 0.0)
    rank = Rank(tmp_path, 0)
    rank.link.on_message({"delayed": True})
    with pytest.raises(PeerLost, match="a peer is lost"):
        rank.membership.continue_training(LOST, rank.progress)


def test_ranks_that_send_each_other_their_state_do_not_wait_for_one_another(tmp_path):
    rank, standings = Rank(tmp_path, 0), []
    rank.engine.during = lambda: standings.append((waiting.waits(), waiting.declared_activity()))
    rank.hear(1, [0, 2])
    with pytest.warns(UserWarning, match="rank 1 went away"):
        rank.membership.continue_training(LOST, rank.progress)
    assert standings == [(False, "it brings the next group to one state")]


def test_the_group_that_is_closed_at_the_end_is_the_one_after_the_last_loss(tmp_path):
    rank, closed = Rank(tmp_path, 0), []

    def form(spec):
        close = partial(closed.append, spec.generation)
        return SimpleNamespace(interrupt=lambda: None, close=close)

    rank.membership._framework = SimpleNamespace(form_group=form)
    rank.hear(0, [0, 1, 2])
    rank.membership.begin(object(), SimpleNamespace(interrupt=lambda: None, close=pytest.fail))
    rank.hear(1, [0, 2])
    with pytest.warns(UserWarning, match="rank 1 went away"):
        rank.membership.continue_training(LOST, rank.progress)
    rank.membership.close()
    assert closed == [1]
