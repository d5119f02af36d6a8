"""A worker's part in the next generations, by the messages that it gets, without other ranks."""

from types import SimpleNamespace

import pytest

from orchestrator.engine.api import GroupSpec
from orchestrator.errors import Evicted
from orchestrator.rundir.generations import GenerationRecord, message_of
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

    def __init__(self, folder, rank, incarnation=0, silence_s=POLL_S / 4):
        self.events, self.engine = [], Engine()
        self.link = SimpleNamespace(
            run_failed=False,
            send_event=lambda event, **values: self.events.append(event),
        )
        self.membership = GroupMembership(
            GroupSpec(
                rank=rank, size=3, local_rank=0, node="n", address="127.0.0.1", folder=folder
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
