"""The plan as a value: what it says, what it warns of, and its way through JSON."""

import json
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.schema import ClusterConfig, Config, FactsConfig
from orchestrator.errors import PlanError
from orchestrator.plan.parts import JobFacts
from orchestrator.plan.plan import Plan
from orchestrator.plan.wire import Wire
from tests.plan.stated import make_plan
from tests.refusals import refused


def plan(**values) -> SimpleNamespace:
    made = make_plan(**{"nodes": 2, "ranks_per_node": 2} | values)
    return SimpleNamespace(**made.figures(), to_json=made.to_json)


def test_the_names_that_scripts_rely_on_are_there():
    data = plan(dataset_samples=1000, parameters=700_000, epochs=2).to_json()
    promised = {
        "ranks",
        "nodes",
        "global_batch",
        "micro_steps",
        "samples_per_rank",
        "micro_batches",
        "bytes_on_wire_per_update",
        "collectives_per_update",
        "updates",
    }
    assert promised <= set(data)
    assert data["updates"] == 8
    assert data["updates_per_epoch"] == 4
    assert data["collectives_per_update"] == 1
    assert data["bytes_on_wire_per_update"] == 6 * (700_000 + 54)


@given(
    nodes=st.integers(1, 4),
    ranks_per_node=st.integers(1, 4),
    global_batch=st.none() | st.integers(1, 100),
    micro_batch=st.none() | st.integers(1, 20),
    ragged=st.sampled_from(["update", "carry"]),
    updates=st.none() | st.integers(1, 50),
    dataset_samples=st.none() | st.integers(1, 500),
    parameters=st.none() | st.integers(1, 10**9),
    decay=st.sampled_from(["cosine", "none"]),
)
def test_a_plan_is_written_as_it_is_shown(**values):
    shown = make_plan(**values).to_json()
    assert json.loads(json.dumps(shown)) == shown


def test_a_plan_of_ten_thousand_ranks_is_quick_and_its_warnings_short():
    began = time.process_time()
    large = plan(nodes=1250, ranks_per_node=8, global_batch=9_001, micro_batch=3)
    assert time.process_time() - began < 1  # some 5 ms
    assert large.warnings == (
        (
            "ranks 9001-9999 of 10000 will be idle: there is no work for them in an update of 9001 "
            "samples"
        ),
    )


WIRES = [
    ({}, {}),
    ({"metric_count": 3}, {"metric_count": 3}),
    ({"precision": "float64"}, {"itemsize": 8}),
    ({"bucket_mib": 2**-7}, {"bucket_bytes": 2**13}),
    ({"parameters": None}, {}),
    ({"shard_optimizer": True}, {"sharded": True}),
    (
        {"shard_optimizer": True, "bucket_mib": 2**-7, "metric_count": 2},
        {"sharded": True, "bucket_bytes": 2**13, "metric_count": 2},
    ),
    ({"parameters": 9_000_000, "framework": "torch"}, {"early": True}),
    ({"nodes": 1, "ranks_per_node": 1}, {"ranks": 1}),
]


@pytest.mark.parametrize(("stated", "same"), WIRES, ids=str)
def test_what_travels_is_counted_with_all_that_bears_on_it(stated, same):
    stated = {"parameters": 30_000, **stated}
    made = plan(**stated)
    wire = Wire(**{"ranks": 4, "itemsize": 4, "metric_count": 0, **same})
    calls = wire.collectives(stated["parameters"])
    assert made.collectives_per_update == calls
    assert made.bytes_on_wire_per_update == wire.bytes_sent(stated["parameters"])
    gathers = (calls - 1) // 2 if wire.sharded else 0
    assert made.gathers_per_update == gathers


def test_of_a_reproducible_update_only_one_ranks_traffic_is_known():
    stated = {"reduction": "reproducible", "micro_batch": 4, "parameters": 300}
    assert plan(**stated).collectives_per_update is plan(**stated).bytes_on_wire_per_update is None
    alone = plan(**stated, nodes=1, ranks_per_node=1)
    assert (alone.collectives_per_update, alone.bytes_on_wire_per_update) == (0, 0)


@pytest.mark.parametrize(
    ("stated", "updates", "epochs"),
    [
        ({}, None, 1.0),
        ({"epochs": 2.5}, None, 2.5),
        ({"updates": 7}, 7, None),
        ({"updates": 7, "epochs": 2.5}, 7, None),
        ({"dataset_samples": 1000}, 4, 1.0),
        ({"dataset_samples": 1000, "epochs": 2.5}, 10, 2.5),
        ({"dataset_samples": 1000, "updates": 6}, 6, 1.5),
        ({"dataset_samples": 1000, "updates": 6, "ragged": "drop"}, 6, 2.0),
        ({"dataset_samples": 1000, "updates": 6, "ragged": "carry"}, 6, 1.536),
    ],
)
def test_updates_and_epochs_are_told_as_far_as_they_are_known(stated, updates, epochs):
    made = plan(**stated)
    assert (made.updates, made.epochs) == (updates, epochs)
    assert (made.updates_per_epoch is None) == ("dataset_samples" not in stated)


@pytest.mark.parametrize(
    ("stated", "first", "peak", "last"),
    [
        ({"decay": "none"}, 0.1, 0.1, 0.1),
        ({"decay": "linear"}, 0.1, 0.1, 0.0),
        ({"warmup_updates": 2}, 0.05, 0.1, 0.1),
        ({"scaling": "linear", "base_batch": 128}, 0.2, 0.2, 0.2),
        ({"own_rate": True}, None, None, None),
        ({"updates": None}, 0.1, 0.1, None),
        ({"updates": None, "decay": "linear"}, 0.1, 0.1, None),
    ],
)
def test_rates_are_told_as_far_as_they_are_known(stated, first, peak, last):
    made = plan(**{"base_lr": 0.1, "updates": 4, "global_batch": 256, **stated})
    rates = (made.learning_rate_first, made.learning_rate_peak, made.learning_rate_last)
    assert rates == (first, peak, last)
    open_end = stated.get("updates", 4) is None and stated.get("decay") == "linear"
    assert (made.schedule is None) == open_end


STATED = Config(
    cluster=ClusterConfig(nodes={"min": 2, "max": 4}, ranks_per_node=2),
    facts=FactsConfig(dataset_samples=999, parameters=300_000),
)


def test_stated_facts_count_until_the_ranks_know_better():
    stated = {"nodes": 4, "dataset_samples": 999, "parameters": 300_000}
    figures = Plan.of(STATED).figures()
    assert {name: figures[name] for name in stated} == stated
    for known in ({"nodes": 2}, {"dataset_samples": 500}, {"parameters": 7}):
        figures = Plan.of(STATED, JobFacts(**known)).figures()
        assert {name: figures[name] for name in stated} == stated | known


def test_what_travels_beside_the_gradient_is_counted_or_left_open():
    plain = Plan.of(STATED).traffic
    one_more = Plan.of(STATED, JobFacts(coupled=True)).traffic
    assert one_more.collectives == plain.collectives + 1
    assert (plain.bytes_on_wire is None, one_more.bytes_on_wire) == (False, None)
    counted = Plan.of(STATED, JobFacts(coupled=True, extra_collectives=5)).traffic
    assert counted.collectives == plain.collectives + 5
    assert Plan.of(STATED, JobFacts(extra_collectives=0)).traffic == plain
    alone = Config(cluster=ClusterConfig(nodes=1, ranks_per_node=1))
    assert Plan.of(alone, JobFacts(coupled=True)) == Plan.of(alone)


@pytest.mark.parametrize(
    ("stated", "names"),
    [
        ({"global_batch": 24, "steps": 4, "micro_batch": 2}, "2 accumulation.global_batch=24"),
        (
            {"steps": 4, "micro_batch": 4},
            "accumulation.steps=4 accumulation.micro_batch=4 32 48 accumulation.global_batch=48",
        ),
        ({"global_batch": 24, "micro_batch": 2}, None),
        ({"steps": 4}, None),
    ],
)
def test_every_number_of_nodes_in_a_range_is_planned(stated, names):
    config = Config(cluster=ClusterConfig(nodes={"min": 2, "max": 3}, ranks_per_node=1))
    for name in ("global_batch", "steps", "micro_batch"):
        setattr(config.accumulation, name, stated.get(name))
    if names is None:
        assert Plan.of(config).nodes == 3
    else:
        with refused(PlanError, f"cluster.nodes={{min: 2, max: 3}} {names}"):
            Plan.of(config)
    assert Plan.of(config, JobFacts(nodes=3)).nodes == 3
