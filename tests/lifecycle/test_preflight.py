"""What ranks find out of their nodes before they train, and which node is called bad."""

import math
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.compose.composer import compose
from orchestrator.errors import NodeUnfit
from orchestrator.lifecycle import quarantine
from orchestrator.lifecycle.preflight import links, look
from orchestrator.lifecycle.preflight.judging import (
    SLOWER,
    Seen,
    best_links,
    judged,
    to_be_recorded,
)
from orchestrator.lifecycle.survival.links import Peer
from orchestrator.lifecycle.topology import Topology
from orchestrator.rank.failure import failure_of
from orchestrator.rank.preflight import preflight
from orchestrator.run_folder.rundir import RunDir

WELL = {"interface": "eth0", "address": "10.0.0.1", "memory": 1e10, "scratch": 1e10}
OURS, THEIRS = "of this run", "of another"


def seen(nodes):
    return [Seen(**{**WELL, "node": f"n{place}", **of}) for place, of in enumerate(nodes)]


@given(
    count=st.integers(3, 12), data=st.data(), jitter=st.floats(1.0, math.sqrt(SLOWER) - 0.01)
)  # fmt: skip
def test_exactly_the_nodes_with_slow_cards_are_named_whichever_they_are(count, data, jitter):
    """A link is as slow as the slower of its ends, and busy by chance."""
    slow = data.draw(st.sets(st.integers(0, count - 1), max_size=(count - 1) // 2))
    apart = [d for d in look.DISTANCES if d < count]
    slow = {n for n in slow if not any((n + d) % count in slow for d in apart)}
    speed = [1e8 if node in slow else 1e9 for node in range(count)]
    rates = [
        {d: min(speed[n], speed[(n + d) % count]) * data.draw(st.sampled_from([1.0, jitter]))
         for d in apart} for n in range(count)
    ]  # fmt: skip
    best = best_links(rates)
    found = judged(seen([{"bytes_per_s": rate} for rate in best]))
    if len(slow) * 2 < count:
        assert {bad.node for bad in found} == {f"n{node}" for node in slow}
    assert not any(bad.unfit for bad in found)


@pytest.mark.parametrize(
    ("one", "words", "unfit"),
    [
        ({"memory": 1e6}, "of memory are free", True),
        ({"scratch": -1.0}, "(TMPDIR) cannot be written", True),
        ({"scratch": 1e6}, "(TMPDIR) has", True),
        ({"device_taken": 0.5}, "50% of a device's memory", False),
        ({"clock_s": -60.0}, "its clock is -60.0 s off", False),
        ({"bytes_per_s": 1e7}, "over eth0 (10.0.0.1), where the median is", False),
    ],
)
def test_each_thing_that_may_be_wrong_with_a_node_is_told_of_that_node(one, words, unfit):
    nodes = seen([{"bytes_per_s": 1e9}, {"bytes_per_s": 1e9, **one}, {"bytes_per_s": 1e9}])
    (bad,) = judged(nodes)
    assert (bad.node, bad.unfit, words in bad.why) == ("n1", unfit, True)
    assert to_be_recorded([bad], 3) == [bad]
    assert to_be_recorded([bad], 2) == []  # of two nodes nobody knows which is odd
    assert judged(seen([{}, {}])) == []


def test_who_has_part_in_most_damage_is_unfit():
    (bad,) = judged(seen([{}, {}, {}]), [("n0", "n2"), ("n2", "n1"), ("n2", "n0")])
    assert (bad.node, bad.unfit) == ("n2", True)


class Ranks:
    """Ranks as threads that gather. `damage`: what becomes of a row on its way to a rank."""

    def __init__(self, size, damage=lambda row, of, to: row):
        self._meet, self._rows = threading.Barrier(size), [None] * size
        self._damage = damage

    def gather(self, rank, row):
        self._rows[rank] = list(map(float, row))
        self._meet.wait(20)
        rows = [self._damage(list(r), of, rank) for of, r in enumerate(self._rows)]
        self._meet.wait(20)
        return rows

    def each(self, do):
        """`do(rank, gather)` on all of them."""
        ranks = range(len(self._rows))
        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(lambda rank: do(rank, partial(self.gather, rank)), ranks))


def from_two(row, of, to):
    return [row[0] + 1, *row[1:]] if of == 2 and to != 2 and len(row) > 9 else row


@pytest.fixture
def topologies(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-2]")

    def made(width):
        return [
            Topology(
                rank=r, size=3 * width, local_rank=r % width, node_index=r // width, nodes=3,
                node=f"n{r // width}", address=f"127.0.9.{1 + r // width}", job_id="7",
                base_attempt=0,
            )
            for r in range(3 * width)
        ]  # fmt: skip

    return made


def test_all_ranks_find_the_same_of_each_node(monkeypatch, topologies):
    monkeypatch.setattr(look, "is_loopback", lambda address: False)  # so links are measured, too
    ranks = topologies(2)
    found = Ranks(6).each(lambda r, gather: look.look(gather, ranks[r], 0.1 * r))
    assert all(one == found[0] for one in found)
    nodes, damaged = found[0]
    assert [one.node for one in nodes] == ["n0", "n1", "n2"]
    assert [round(one.device_taken, 1) for one in nodes] == [0.1, 0.3, 0.5]
    assert all(one.bytes_per_s and abs(one.clock_s) < 5 and one.memory > 0 for one in nodes)
    assert damaged == []


@pytest.fixture
def flown(tmp_path, monkeypatch, topologies):
    """Gives what `preflight` raised on three ranks, what was warned of, and recorded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run, config, ranks = RunDir(tmp_path / "run"), compose(["+cluster=slurm"]), topologies(1)
    run.attempt(0).mkdir(parents=True)
    warned = []
    monkeypatch.setattr("orchestrator.rank.preflight.warn", warned.append)

    def fly(damage, taken):
        def one(rank, gather):
            engine = SimpleNamespace(gather=gather, device_taken=lambda: taken[rank])
            try:
                preflight(run, 0, config, ranks[rank], engine)
            except NodeUnfit as error:
                return failure_of(rank, ranks[rank].node, error)

        return Ranks(3, damage).each(one), warned, quarantine.of_cluster(None)

    return fly


def test_a_run_fails_of_an_unfit_node_which_is_blamed_and_left_out_next_time(flown):
    failures, warned, [kept] = flown(from_two, [0.0, 0.0, 0.0])
    assert [one["secondary"] for one in failures] == [True, True, False]
    assert "node n2 is not fit to compute on: what a collective carried" in failures[2]["cause"]
    assert (kept.node, "in quarantine for 24 hours" in warned[0]) == ("n2", True)


def test_of_a_node_that_is_only_worse_a_run_warns_and_goes_on(flown):
    failures, [warned], [kept] = flown(lambda row, of, to: row, [0.0, 0.9, 0.0])
    assert failures == [None] * 3
    assert (kept.node, "90% of a device's memory" in kept.reason) == ("n1", True)
    assert warned.startswith("node n1: 90% of a device's memory")


def test_whatever_a_kernel_takes_at_a_time_all_of_it_is_counted(monkeypatch):
    """A real card takes a part of a block; an earlier count went past the end, and waited."""
    monkeypatch.setattr(links, "BYTES", (1 << 20) + 1)
    monkeypatch.setattr(links, "LONGEST_S", 1.0)
    sink = links.Sink("127.0.0.1", 1)
    sink.open(OURS)
    assert links.rate(Peer("127.0.0.1", sink.port, 1), secret=OURS, me=0) > links.BYTES
    sink.close()


def test_a_sink_takes_nothing_from_who_does_not_know_the_secret():
    sink = links.Sink("127.0.0.1", 1)
    sink.open(OURS)
    peer = Peer("127.0.0.1", sink.port, 1)
    with socket.create_connection(("127.0.0.1", sink.port)) as garbage:
        garbage.sendall(b"GET / HTTP/1.0\r\n" * 8)
        assert links.rate(peer, secret=OURS, me=0) > 0
        assert links.rate(peer, secret=THEIRS, me=0) == 0
    sink.close()
    assert links.rate(peer, secret=OURS, me=0) == 0  # nobody is there any more
