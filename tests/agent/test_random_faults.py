"""Random faults against agents and coordinators: a run always ends, and no rank waits for ever.

More runs than the test's own: `SIMULATED_RUNS=1000:2000 pytest tests/agent/test_random_faults.py`.
"""

import os
import random

import pytest

from tests.agent.simulation import Simulation

RUNS = range(*map(int, os.environ.get("SIMULATED_RUNS", "0:60").split(":")))
FAULTS_S = 40.0
QUIET_S = 90.0
"""From the first fault until all that can come back has come back."""
END_S = 60.0


@pytest.mark.parametrize("seed", RUNS)
def test_a_run_ends_whatever_happens(tmp_path, monkeypatch, seed):
    chance = random.Random(seed)
    nodes, ranks_per_node = chance.choice([(2, 1), (2, 2), (3, 1), (3, 2), (4, 1)])
    sim = Simulation(
        tmp_path / "run",
        seed,
        monkeypatch,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        replacements=chance.choice([0, 2, 20]),
        whole_nodes=chance.random() < 0.3,
    )
    from_start, stopped = chance.random() < 0.2, chance.random() < 0.2
    try:
        while not from_start and sim.newest()["generation"] < 0:
            sim.step()
        first = sim.now
        burst_s, in_burst = chance.uniform(0, FAULTS_S), chance.random()
        faults = [
            chance.uniform(burst_s, burst_s + 2)
            if chance.random() < in_burst
            else chance.uniform(0, FAULTS_S)
            for _ in range(chance.randint(1, 8))
        ]
        for after_s in faults:
            sim.after(after_s, after_s, sim.fault)
        if stopped:
            sim.after(0, QUIET_S, sim.stop)
        while sim.now < first + QUIET_S and (sim.agents or sim.starts):
            sim.step()
        never_back = [] if sim.stopped else sim.never_back()
        sim.total = 5 + max((one.updates for one in sim.processes), default=0)
        while sim.now < first + QUIET_S + END_S and (sim.agents or sim.starts):
            sim.step()
        assert not sim.agents, "an agent never ended"
        assert not sim.live()
        assert not never_back
        if not (sim.all_agents_lost or sim.unwritten):
            assert sim.outcome is not None
        if not (from_start or sim.all_members_lost or sim.stopped or sim.outcome is None):
            assert sim.outcome["state"] == "finished", sim.outcome["culprit"]
    finally:
        print(*sim.log, sim.newest(), sim.outcome, sep="\n")
        sim.close()
