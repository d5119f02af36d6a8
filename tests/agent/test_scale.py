"""Growth with the number of nodes, in counts: opened files, bytes, looks at all ranks."""

import random

import pytest

from benchmarks.hollow import HollowRun
from orchestrator.agent import agent as agent_module
from orchestrator.agent.coordinator import Coordinator
from orchestrator.agent.links import Peer, Port, probe_ports
from orchestrator.engine.common.rendezvous import listen
from orchestrator.rundir.generations import members_of, message_of
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
        assert run.take_over() <= 5.0
        run.until(lambda: run.reached(1), 10.0)
        newest = run.newest
        assert newest["members"] == list(range(RANKS_PER_NODE, NODES * RANKS_PER_NODE))
        assert newest["why"] == ["on node0: its agent is gone"]
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


def test_messages_of_generations_do_not_grow_with_the_number_of_ranks():
    lost = [member for member in range(32_000) if member // 8 not in (7, 8, 1999)]
    record = {
        "generation": 3,
        "members": [*lost, 32_056],
        "why": [f"on node{n}" for n in range(99)],
    }
    message = message_of(record)
    assert members_of(message) == record["members"]
    assert len(str(message)) < 1000
    assert message["why"][-1] == "and 83 more"


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
    listener.close()
