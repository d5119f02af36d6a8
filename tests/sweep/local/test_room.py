"""The number of points that run at once: laws over machines, and the messages."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.clusters.api import Share
from orchestrator.clusters.local.cluster import LocalCluster
from orchestrator.config.composer import compose
from orchestrator.config.schema import Config, SweepConfig
from orchestrator.machine import Machine, cores
from orchestrator.runs.follow import OutputOptions
from orchestrator.sweep.local import RANK_BYTES, LocalCapacity, most_at_once
from tests.run_folders import Screen

pytestmark = pytest.mark.whole_runs

machines = st.builds(
    Machine,
    cores=st.integers(1, 9),
    free_memory_bytes=st.integers(1, 12).map(lambda ranks: ranks * RANK_BYTES),
    gpus=st.integers(0, 4).map(lambda count: tuple(map(str, range(count)))),
)
shares = st.integers(1, 6).flatmap(
    lambda ranks: st.builds(
        Share,
        ranks=st.just(ranks),
        cores=st.sampled_from([ranks, 2 * ranks]),
        gpus=st.sampled_from([0, ranks]),
    )
)


@given(
    machines, st.lists(shares, min_size=1, max_size=12), st.none() | st.integers(1, 6), st.data()
)
def test_what_runs_beside_others_never_takes_more_than_there_is(machine, wanted, most, data):
    room, running, waiting = LocalCapacity(most, machine), [], list(wanted)
    while waiting or running:
        for share in list(waiting):
            if place := room.allocate(running, share):
                waiting.remove(share)
                running.append(place)
        assert running, "what has the machine to itself always fits"
        assert len(running) <= (most or len(running))
        given_out = [name for place in running for name in place.gpus]
        assert len(set(given_out)) == len(given_out) <= len(machine.gpus)
        for place in running:
            assert len(place.gpus) in (0, place.share.gpus)
            assert place.gpus or place.share.gpus in (0, *range(len(machine.gpus) + 1, 9))
        if len(running) > 1:
            ranks = sum(place.share.ranks for place in running)
            assert ranks * RANK_BYTES <= machine.free_memory_bytes
            assert most or sum(place.share.cores for place in running) <= machine.cores
        running.remove(data.draw(st.sampled_from(running)))


def test_what_nothing_may_run_beside_has_the_machine_to_itself():
    machine = Machine(cores=8, free_memory_bytes=99 * RANK_BYTES, gpus=())
    small, room = Share(ranks=1, cores=1, gpus=0), LocalCapacity(None, machine)
    alone = room.allocate([], None)
    assert room.allocate([alone], small) is None
    running = room.allocate([], small)
    assert room.allocate([running], small)
    assert room.allocate([running], None) is None


def test_a_run_takes_the_cores_of_all_its_ranks_and_a_gpu_for_each_unless_it_says_cpus():
    def share(*more):
        asked = ("cluster.nodes=2", "cluster.ranks_per_node=3", "cluster.cpus_per_rank=2")
        return LocalCluster(compose([*asked, *more])).share

    assert share() == Share(ranks=6, cores=12, gpus=6)
    assert share("transport=gloo").gpus == 0
    assert 1 <= cores() <= len(os.sched_getaffinity(0))


def most(key, values, parallel="auto"):
    screen = Screen(width=200)
    configs = [Config(sweep=SweepConfig(parallel=parallel)) for _ in values]
    section, _, name = key.rpartition(".")
    for config, value in zip(configs, values, strict=True):
        setattr(getattr(config, section) if section else config, name, value)
    return most_at_once(configs, OutputOptions(console=screen)), screen.text


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("accumulation.steps", (1, 2)),
        ("cluster.ranks_per_node", (1, 2)),
        ("engine.shard_optimizer", (False, True)),
        ("transport", ("auto", "gloo")),
    ],
)
def test_points_whose_speeds_are_compared_run_one_at_a_time(key, values):
    found, said = most(key, values)
    assert found == 1
    assert f"they differ in {key.partition('.')[0]}" in said
    assert most(key, values, parallel=2) == (2, "")


def test_other_points_run_as_many_at_once_as_there_is_room_for():
    assert most("train.seed", (1, 2, 3)) == (None, "")
    assert most("train.seed", (1,)) == (None, "")
