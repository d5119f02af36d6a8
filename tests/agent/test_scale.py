"""Growth with the number of nodes, in counts: opened files, bytes, looks at all ranks."""

import random
import sys
from collections import Counter

import pytest

from benchmarks.hollow import HollowRun
from orchestrator.agent import agent as agent_module
from orchestrator.agent import agent_registry
from orchestrator.agent.agent_registry import AGENT_GONE, MOST_PROBES, MOST_READ
from orchestrator.agent.coordinator import Coordinator
from orchestrator.agent.links import Link, Peer, Port, line_of, probe_ports
from orchestrator.engine.common.rendezvous import listen
from orchestrator.rundir.generations import GenerationRecord, members_of, message_of
from orchestrator.rundir.outcome import NODE_WENT_AWAY
from tests.agent.test_coordinator import Attempt

NODES, RANKS_PER_NODE = 300, 8


@pytest.mark.parametrize("seed", range(2))
def test_every_healthy_rank_survives_a_takeover(tmp_path, seed):
    """The file system may be slow, and the agents may not reach the next coordinator at once."""
    chance = random.Random(seed)
    slow = {"open_s": chance.choice([0.0, 0.005]), "late_s": chance.choice([0.0, 5.0])}
    with HollowRun(
        tmp_path / "run", nodes=NODES, ranks_per_node=RANKS_PER_NODE, seed=seed, **slow
    )() as run:
        run.form()
        assert sum(run.opened.values()) <= 4 * NODES
        formation_bytes = sum(run.sent.values())
        assert formation_bytes <= 2000 * NODES  # the workers' starts, mostly
        run.opened.clear()
        seconds = run.take_over()
        seconds += run.until(lambda: run.reached(1), 10.0)
        assert seconds <= 5.1, "who connects is heard at once"
        newest = run.newest
        assert newest["members"] == list(range(RANKS_PER_NODE, NODES * RANKS_PER_NODE))
        assert newest["why"] == [f"on node0: {AGENT_GONE.removeprefix(NODE_WENT_AWAY)}"]
        for _ in range(100):
            run.step()
        assert run.newest == newest, "none is lost later"
        assert sum(run.opened.values()) <= 12 * NODES


def test_a_rack_that_is_lost_with_the_coordinator_costs_no_other_rank(tmp_path):
    with HollowRun(tmp_path / "run", nodes=40, ranks_per_node=2)() as run:
        run.form()
        for index in range(1, 10):
            run.kill(index)
        run.take_over()
        run.until(lambda: run.reached(1), 10.0)
        assert run.newest["members"] == list(range(20, 80))
        assert run.newest["generation"] == 1, "what is lost together costs one generation"


def test_a_coordinator_looks_at_all_ranks_by_the_clock_and_not_at_each_heartbeat(
    tmp_path, monkeypatch
):
    ticks = []
    tick = Coordinator.tick
    monkeypatch.setattr(Coordinator, "tick", lambda self: (ticks.append(1), tick(self)))
    with HollowRun(tmp_path / "run", nodes=50, ranks_per_node=2)() as run:
        run.form()
        run.step()
        ticks.clear()
        turns = 0
        for number in range(1, 501):
            run.now += 0.01
            run.turn(1 + number % 49)
            run.turn(0)
            turns += 1
    assert turns == 500
    assert len(ticks) <= 55


@pytest.mark.parametrize("took_over", [True, False])
def test_a_tick_reads_few_addresses_and_probes_few_ports_however_many_nodes_are_lost(
    tmp_path, monkeypatch, took_over
):
    reads, probes = [], []
    read, probe = agent_registry.agent_file, agent_registry.probe_ports

    def count_read(*node):
        reads.append(node)
        return read(*node)

    def count_probes(peers, timeout_s):
        probes.extend(peers)
        return probe(peers, timeout_s)

    monkeypatch.setattr(agent_registry, "agent_file", count_read)
    monkeypatch.setattr(agent_registry, "probe_ports", count_probes)
    nodes = 3 * MOST_PROBES
    attempt = Attempt(tmp_path, nodes=nodes)
    if took_over:
        attempt = Attempt(tmp_path, nodes=nodes, index=1, gone=[0], begin=False)
        attempt.join(1)
    own = int(took_over)
    others = [index for index in range(nodes) if index != own]
    for index in others:
        attempt.lose_agent(index)
    each_tick = []
    while attempt.newest["members"] != [own]:
        reads.clear(), probes.clear()
        attempt.tick(0.02)
        each_tick.append((len(reads), len(probes)))
        assert len(each_tick) < 1000
    assert each_tick[0][0] <= MOST_PROBES
    assert max(read for read, _ in each_tick[1:]) <= MOST_READ
    assert max(probed for _, probed in each_tick) <= MOST_PROBES
    assert sum(read for read, _ in each_tick) <= nodes, "the file of a lost agent once"
    if not took_over:  # else those that have not connected are probed more slowly
        assert attempt.newest["generation"] == 1, "what is lost together costs one generation"


@pytest.mark.parametrize("survive", [True, False])
def test_a_failed_run_costs_one_look_at_all_ranks_and_not_one_for_each_end(tmp_path, survive):
    class Counted(dict):
        looks = 0

        def values(self):
            type(self).looks += 1
            return super().values()

    attempt = Attempt(tmp_path, nodes=20, ranks_per_node=8, survive=survive)
    attempt.coordinator.workers = Counted(attempt.coordinator.workers)
    for rank in range(160):
        attempt.end(rank, status=1, final_state="failed")
    attempt.tick()
    assert attempt.coordinator.outcome["state"] == "failed"
    assert Counted.looks <= 20


def cost_of_end(folder, nodes, survive, **end):
    """Return how many functions a coordinator calls for the end of a run, and how many messages it
    sends.
    """
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event in ("call", "c_call")

    attempt = Attempt(folder, nodes=nodes, ranks_per_node=8, survive=survive)
    attempt.commands.clear()
    sys.setprofile(count)
    try:
        for rank in range(8 * nodes):
            attempt.end(rank, **end)
        attempt.tick()
    finally:
        sys.setprofile(None)
    assert attempt.coordinator.outcome["state"] == end["final_state"]
    return calls, sum(nodes if agent is None else 1 for agent, _ in attempt.commands)


@pytest.mark.parametrize("survive", [True, False])
@pytest.mark.parametrize("final_state", ["finished", "stopped", "failed"])
def test_the_end_of_a_run_costs_calls_and_messages_by_the_number_of_its_ranks(
    tmp_path, final_state, survive
):
    end = {"status": int(final_state == "failed"), "final_state": final_state}
    calls, messages = cost_of_end(tmp_path / "small", 25, survive, **end)
    more_calls, more_messages = cost_of_end(tmp_path / "large", 100, survive, **end)
    assert more_calls <= 4.2 * calls
    assert calls <= 45 * 200, "for each rank"
    assert more_messages == 4 * messages
    assert messages <= 4 * 25, "left, failed, positions, end; to each node"


@pytest.mark.parametrize("fails", [True, False])
def test_messages_between_nodes_at_a_runs_end_are_sent_together(tmp_path, monkeypatch, fails):
    nodes, sends = 40, Counter()
    with HollowRun(tmp_path / "run", nodes=nodes, ranks_per_node=8, survive=not fails)() as run:
        run.form()
        run.step()
        run.forget_costs()
        send_line = Link.send_line

        def count(link, line):
            sends[run.current] += line != line_of({})  # besides heartbeats
            return send_line(link, line)

        monkeypatch.setattr(Link, "send_line", count)
        run.fail(0) if fails else run.finish()
        assert run.outcome["state"] == ("failed" if fails else "finished")
        assert sends[0] <= 3 * nodes, "one for each decision"
        assert sum(sends.values()) - sends[0] <= 8 * nodes, "one for each rank's end"
        assert sum(run.sent.values()) <= 4000 * nodes
        assert sum(run.opened.values()) <= 4, "the record and the outcome"


def test_a_generation_is_formed_with_few_bytes_to_each_of_4000_nodes(tmp_path):
    nodes = 4000
    attempt = Attempt(tmp_path, nodes=nodes, ranks_per_node=8)
    assert attempt.newest["members"] == list(range(8 * nodes))
    commands = attempt.commands
    sizes = [len(line_of(command)) * (nodes if to is None else 1) for to, command in commands]
    assert commands
    assert sum(sizes) <= 500 * nodes, "2 MB to all nodes"


def test_messages_of_generations_do_not_grow_with_the_number_of_ranks(tmp_path):
    lost = [member for member in range(32_000) if member // 8 not in (7, 8, 1999)]
    why = [f"on node{n}" for n in range(99)]
    record = GenerationRecord(tmp_path).publish(3, [*lost, 32_056], why=why)
    message = message_of(record)
    assert members_of(message) == record["members"]
    assert len(str(message)) < 1000
    assert "83" in message["why"][-1].split(), "so many more"


def test_a_coordinator_encodes_a_message_to_all_nodes_once(tmp_path, monkeypatch):
    encoded = []
    line_of = agent_module.line_of
    monkeypatch.setattr(
        agent_module, "line_of", lambda message: (encoded.append(message), line_of(message))[1]
    )
    with HollowRun(tmp_path / "run", nodes=30, ranks_per_node=1)() as run:
        run.form()
        encoded.clear()
        run.agents[0]._relay({"command": "tell", "rank": None, "message": {}})
        assert len(encoded) == 1


def test_ports_are_probed_together_and_closed_ones_are_told_from_silent_ones():
    listener, closed = listen("127.0.0.1"), listen("127.0.0.1")
    ports = {"open": listener.getsockname()[1], "closed": closed.getsockname()[1]}
    closed.close()
    peers = {name: Peer("127.0.0.1", port, 0) for name, port in ports.items()}
    assert probe_ports(peers, 1.0) == {"open": Port.OPEN, "closed": Port.CLOSED}
    late = probe_ports(peers, 0.0)  # as for a process that was kept from its core meanwhile
    assert late == {"open": Port.OPEN, "closed": Port.CLOSED}
    listener.close()
