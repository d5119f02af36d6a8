"""Real sockets, real processes: who is killed or stopped is known, and agreed on, by all others."""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import time
import warnings

import pytest

from orchestrator.engine.common.rendezvous import listen
from orchestrator.engine.common.waiting import for_others
from orchestrator.lifecycle.survival.agreement import Agreement
from orchestrator.lifecycle.survival.connections import MOST_STRANGERS
from orchestrator.lifecycle.survival.lifeline import Lifeline
from orchestrator.lifecycle.survival.links import Peer
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.lifecycle.survival.silence import Borne

SECRET = "of this test"  # noqa: S105  # and of nobody else


def newest(line):
    """The members of the newest generation; the word "broken" where it cannot be known."""
    try:
        return line.latest.members
    except RuntimeError:
        return ["broken"]


class Ranks:
    """Processes with nothing but a lifeline each; they tell every new generation in a pipe."""

    def __init__(self, folder, count, silence_s=1.5, on_a_node=1, never=None, deaf=None):
        listeners = [listen("127.0.0.1") for _ in range(count)]
        self.peers = {
            rank: Peer("127.0.0.1", one.getsockname()[1], rank // on_a_node)
            for rank, one in enumerate(listeners)
        }
        self.pids, self.pipes, self.commands = {}, {}, {}
        for rank in range(count):
            heard, tell = os.pipe()
            obey, command = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(command)
                for other in (*self.commands.values(), *self.pipes.values()):
                    os.close(other)
                for other, listener in enumerate(listeners):
                    if other != rank:
                        listener.close()
                if rank == never:
                    signal.pause()  # it listens, and comes to nobody
                self._deaf = rank == deaf
                self._be(rank, folder, listeners[rank], silence_s, tell, obey)
            os.close(tell)
            os.close(obey)
            self.pids[rank], self.pipes[rank], self.commands[rank] = pid, heard, command
        for listener in listeners:
            listener.close()
        for command in self.commands.values():
            os.write(command, b"g")

    def _be(self, rank, folder, listener, silence_s, tell, obey):
        agreement = Agreement(rank, tuple(range(len(self.peers))))
        record = GenerationRecord(folder)
        line = Lifeline(
            agreement, self.peers, listener, secret=SECRET, record=record, borne=Borne(silence_s)
        )
        line.on_news(lambda: os.write(tell, json.dumps(newest(line)).encode() + b"\n"))
        warnings.simplefilter("ignore")
        os.read(obey, 1)  # all begin together: silences that begin together are told to be so
        line.start()
        os.write(tell, b"[]\n")
        with for_others("a sum") if self._deaf else contextlib.nullcontext():
            os.read(obey, 1)  # whatever it is told
        line.end("finished")
        os._exit(0)

    def heard(self, rank, timeout_s=5.0):
        """The next list of members that this rank is told; None when none comes."""
        if not select.select([self.pipes[rank]], [], [], timeout_s)[0]:
            return None
        text = b""
        while not text.endswith(b"\n"):
            text += os.read(self.pipes[rank], 1)
        return tuple(json.loads(text))

    def kill(self, rank, number=signal.SIGKILL):
        os.kill(self.pids[rank], number)

    def end(self):
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.fixture
def ranks(tmp_path):
    made = Ranks(tmp_path, 4)
    yield made
    made.end()


def settled(ranks):
    """All have started, and follow rank 0."""
    assert all(ranks.heard(rank) == () for rank in ranks.pids)


def test_losses_one_after_another_are_known_to_all_within_a_second_rank_0_included(ranks):
    settled(ranks)
    for victim, left in ((0, (1, 2, 3)), (3, (1, 2))):
        began = time.monotonic()
        ranks.kill(victim)
        assert {ranks.heard(rank) for rank in left} == {left}
        assert time.monotonic() - began < 1.0


def test_one_that_dies_before_it_has_come_to_the_others_is_missed(tmp_path):
    ranks = Ranks(tmp_path, 3, never=1)
    try:
        assert {ranks.heard(rank) for rank in (0, 2)} == {()}
        ranks.kill(1)
        assert {ranks.heard(rank, 3.0) for rank in (0, 2)} == {(0, 2)}
    finally:
        ranks.end()


def test_one_that_was_stopped_is_given_up_and_finds_itself_left_out_when_it_wakes(ranks):
    settled(ranks)
    began = time.monotonic()
    ranks.kill(0, signal.SIGSTOP)
    assert {ranks.heard(rank) for rank in (1, 2, 3)} == {(1, 2, 3)}
    assert 1.0 < time.monotonic() - began < 4.0
    ranks.kill(0, signal.SIGCONT)
    assert ranks.heard(0) == (1, 2, 3)


def test_a_node_that_stops_as_a_whole_costs_one_wait_and_little_more(tmp_path):
    """Its kernel still takes connections: who proposes next is asked, and does not answer."""
    ranks = Ranks(tmp_path, 6, silence_s=4.0, on_a_node=2)
    try:
        settled(ranks)
        began = time.monotonic()
        for rank in (0, 1):
            ranks.kill(rank, signal.SIGSTOP)
        assert {ranks.heard(rank, 8.0) for rank in (2, 3, 4, 5)} == {(2, 3, 4, 5)}
        assert 3.0 < time.monotonic() - began < 6.5
    finally:
        ranks.end()


def test_the_larger_part_goes_first_where_nobody_has_died(ranks):
    settled(ranks)
    for rank in (1, 2, 3):
        ranks.kill(rank, signal.SIGSTOP)
    assert ranks.heard(0, 1.8) is None, "alone, it waits for the others to go on without it"
    for rank in (1, 2, 3):
        ranks.kill(rank, signal.SIGCONT)
    assert {ranks.heard(rank) for rank in ranks.pids} == {(1, 2, 3)}


def test_the_smaller_part_goes_on_at_once_where_the_larger_one_has_died(ranks):
    settled(ranks)
    for rank in (0, 1, 2):
        ranks.kill(rank)
    assert ranks.heard(3, 1.0) == (3,)


def test_strangers_that_say_nothing_leave_descriptors_for_a_loss_to_be_heard(ranks):
    settled(ranks)
    open_there = len(os.listdir(f"/proc/{ranks.pids[0]}/fd"))  # noqa: PTH208
    most = open_there + MOST_STRANGERS + 16
    resource.prlimit(ranks.pids[0], resource.RLIMIT_NOFILE, (most, most))
    where = ("127.0.0.1", ranks.peers[0].port)
    with contextlib.ExitStack() as quiet:
        for _ in range(3 * MOST_STRANGERS):
            quiet.enter_context(socket.create_connection(where))
        ranks.kill(2)
        assert {ranks.heard(rank, 3.0) for rank in (0, 1, 3)} == {(0, 1, 3)}


def test_who_does_not_come_back_from_what_was_broken_off_is_ended_and_who_computes_is_not(tmp_path):
    (tmp_path / "two").mkdir()
    ranks, two = Ranks(tmp_path, 4, deaf=2), Ranks(tmp_path / "two", 2, deaf=1)
    try:
        for some in (ranks, two):
            settled(some)
        ranks.kill(3)
        two.kill(0)
        assert {ranks.heard(rank) for rank in (0, 1, 2)} == {(0, 1, 2)}
        assert {ranks.heard(rank) for rank in (0, 1)} == {(0, 1)}
        assert os.waitpid(ranks.pids.pop(2), 0)[1] == signal.SIGKILL
        assert [ranks.heard(rank, 1.0) for rank in (0, 1)] == [None] * 2
        assert two.heard(1) == (1,)
        os.write(two.commands[1], b"x")  # it comes back after all, and has all that is left
        assert os.waitpid(two.pids.pop(1), 0)[1] == 0
    finally:
        ranks.end()
        two.end()


def test_a_loss_is_written_down_once_there_is_room_again(ranks):
    settled(ranks)
    most = resource.prlimit(ranks.pids[0], resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    ranks.kill(2)
    assert [ranks.heard(rank, 0.5) for rank in (0, 1, 3)] == [None] * 3
    resource.prlimit(ranks.pids[0], resource.RLIMIT_FSIZE, most)
    assert {ranks.heard(rank, 3.0) for rank in (0, 1, 3)} == {(0, 1, 3)}


def test_who_cannot_read_the_record_waits_for_nobody_and_nobody_waits_for_it(ranks, tmp_path):
    settled(ranks)
    GenerationRecord(tmp_path).path(1).write_text("{")
    ranks.kill(3)
    assert {ranks.heard(rank, 3.0) for rank in (0, 1, 2)} == {("broken",)}


def test_who_ends_in_order_is_no_loss_and_garbage_on_the_port_changes_nothing(ranks):
    settled(ranks)
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1, "sign": "no"}\n', b"\0" * 5000, b"{"):
        with socket.create_connection(("127.0.0.1", ranks.peers[0].port)) as stranger:
            stranger.sendall(sent)
    os.write(ranks.commands[1], b"x")
    os.waitpid(ranks.pids.pop(1), 0)
    assert [ranks.heard(rank, 0.5) for rank in (0, 2, 3)] == [None] * 3
