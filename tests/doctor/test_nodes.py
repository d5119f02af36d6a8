"""Measuring nodes and links, and which node `doctor --run` names."""

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.doctor.exchange import DISTANCES, best_links
from orchestrator.doctor.findings import BAD, NOTE
from orchestrator.doctor.trial import SLOWER, node_faults
from tests.helpers import environment

WELL = {
    "interface": "eth0", "address": "10.0.0.1", "memory": 1e10, "scratch": 1e10,
    "device_taken": 0.0, "clock_s": 0.0, "bytes_per_s": None,
}  # fmt: skip
LINKS = """
import json, sys
import torch, torch.distributed as dist
from orchestrator.doctor.exchange import measure_links
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
if rank == 2 and sys.argv[3] == "damage":
    intact = dist.P2POp
    dist.P2POp = lambda op, data, peer: intact(op, data + 1 if op is dist.isend else data, peer)
rates, damaged = measure_links([0, 1, 2], ["n0", "n1", "n2"], torch.device("cpu"))
print(json.dumps([rates, sorted(damaged)]))
dist.destroy_process_group()
"""


def nodes(changes):
    return [{**WELL, "node": f"n{place}", **change} for place, change in enumerate(changes)]


@given(
    count=st.integers(3, 12), data=st.data(), jitter=st.floats(1.0, math.sqrt(SLOWER) - 0.01)
)  # fmt: skip
def test_exactly_the_nodes_with_slow_cards_are_named(count, data, jitter):
    """A link is as slow as the slower of its ends, and busy by chance."""
    slow = data.draw(st.sets(st.integers(0, count - 1), max_size=(count - 1) // 2))
    apart = [d for d in DISTANCES if d < count]
    slow = {n for n in slow if not any((n + d) % count in slow for d in apart)}
    speed = [1e8 if node in slow else 1e9 for node in range(count)]
    rates = [
        {d: min(speed[n], speed[(n + d) % count]) * data.draw(st.sampled_from([1.0, jitter]))
         for d in apart} for n in range(count)
    ]  # fmt: skip
    found = list(node_faults(nodes([{"bytes_per_s": rate} for rate in best_links(rates)]), []))
    if len(slow) * 2 < count:
        assert {one.found.partition(":")[0] for one in found} == {f"n{node}" for node in slow}
    assert {one.state for one in found} <= {NOTE}


@pytest.mark.parametrize(
    ("change", "words", "state"),
    [
        ({"memory": 1e6}, "of memory are free", BAD),
        ({"scratch": -1.0}, "(TMPDIR) cannot be written", BAD),
        ({"scratch": 1e6}, "(TMPDIR) has", BAD),
        ({"device_taken": 0.5}, "50% of a device's memory", NOTE),
        ({"clock_s": -60.0}, "its clock is -60.0 s off", NOTE),
        ({"bytes_per_s": 1e7}, "on eth0 (10.0.0.1)", NOTE),
    ],
)
def test_each_fault_names_its_node_and_how_to_exclude_it(change, words, state):
    (fault,) = node_faults(
        nodes([{"bytes_per_s": 1e9}, {"bytes_per_s": 1e9, **change}, {"bytes_per_s": 1e9}]), []
    )
    assert (fault.found.partition(":")[0], fault.state) == ("n1", state)
    assert words in fault.found
    assert "cluster.exclude=n1" in fault.do


def test_sound_nodes_have_no_faults():
    assert list(node_faults(nodes([{}, {}]), [])) == []


def test_the_node_involved_in_most_damage_is_bad():
    damaged = [("n0", "n2"), ("n2", "n1"), ("n2", "n0")]
    (fault,) = node_faults(nodes([{}, {}, {}]), damaged)
    assert (fault.found.partition(":")[0], fault.state) == ("n2", BAD)


@pytest.mark.parametrize("how", ["sound", "damage"])
def test_all_ranks_measure_the_same_links_and_find_damaged_data(tmp_path, how):
    """Four ranks on three nodes: the fourth rank shares a node, and sends nothing."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LINKS, str(rank), str(tmp_path / "store"), how],
            env=environment(), stdout=subprocess.PIPE, text=True,
        )
        for rank in range(4)
    ]  # fmt: skip
    said = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert all(one == said[0] for one in said)
    rates, damaged = said[0]
    assert [sorted(rate) for rate in rates] == [["1", "2"]] * 3
    assert all(rate > 0 for of_node in rates for rate in of_node.values())
    assert damaged == ([["n2", "n0"], ["n2", "n1"]] if how == "damage" else [])
