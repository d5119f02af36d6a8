"""A configuration's plan: everything that bears on it gets there, from where it is stated."""

import copy

import pytest

from orchestrator.config.schema import (
    AccumulationConfig,
    ClusterConfig,
    Config,
    EngineConfig,
    FactsConfig,
    ScheduleConfig,
    TrainConfig,
)
from orchestrator.plan.parts import Known
from orchestrator.plan.plan import Plan
from orchestrator.plan.wire import Wire

STATED = Config(
    cluster=ClusterConfig(nodes=3, ranks_per_node=2),
    accumulation=AccumulationConfig(global_batch=64, steps=4, ragged="drop"),
    schedule=ScheduleConfig(
        base_lr=0.3, base_batch=16, scaling="sqrt", warmup_updates=7, decay="cosine"
    ),
    train=TrainConfig(updates=40, seed=11, precision="bfloat16"),
    engine=EngineConfig(bucket_mib=0.25),
    facts=FactsConfig(dataset_samples=999, parameters=300_000),
)
SAME = {
    "ranks": 6, "nodes": 3, "ranks_per_node": 2, "global_batch": 64, "steps": 4,
    "ragged": "drop", "reduction": "fast", "updates": 40, "seed": 11,
    "dataset_samples": 999, "parameters": 300_000,
}  # fmt: skip
SCHEDULE = {
    "base_lr": 0.3, "base_batch": 16, "scaling": "sqrt", "warmup_updates": 7, "decay": "cosine",
    "global_batch": 64, "total_updates": 40,
}  # fmt: skip


def changed(**sections):
    """The configuration above with some values set, by section."""
    config = copy.deepcopy(STATED)
    for section, values in sections.items():
        for name, value in values.items():
            setattr(getattr(config, section), name, value)
    return config


def told(config, **known):
    return Plan.of(config, Known(**known)).figures()


def test_every_value_of_a_configuration_reaches_the_plan():
    figures = told(STATED)
    assert {name: figures[name] for name in SAME} == SAME
    assert figures["schedule"] == SCHEDULE
    wire = Wire(ranks=6, itemsize=4, metric_count=0, bucket_bytes=1 << 18)
    assert figures["collectives_per_update"] == wire.collectives(300_000)
    assert figures["bytes_on_wire_per_update"] == wire.bytes_sent(300_000)


@pytest.mark.parametrize(
    ("sections", "same"),
    [
        ({"train": {"updates": None, "epochs": 2.5}}, {"updates": 38, "epochs": 2.5}),
        ({"train": {"updates": None, "epochs": 2.5}, "facts": {"dataset_samples": None}},
         {"updates": None, "epochs": 2.5}),
        ({"accumulation": {"reduction": "reproducible", "steps": None, "micro_batch": 5}},
         {"reduction": "reproducible", "micro_batch": 5, "steps": 3}),
        ({"cluster": {"nodes": {"min": 2, "max": 4}}}, {"nodes": 4, "ranks": 8}),
    ],
)  # fmt: skip
def test_other_values_reach_it_too(sections, same):
    figures = told(changed(**sections))
    assert {name: figures[name] for name in same} == same


@pytest.mark.parametrize(
    "known", [{"nodes": 2}, {"dataset_samples": 500}, {"parameters": 7}], ids=str
)
def test_what_the_ranks_know_comes_before_what_was_stated(known):
    [(name, value)] = known.items()
    assert told(STATED, **known)[name] == value != SAME[name]


def test_what_travels_beside_the_gradient_is_counted_or_left_open():
    plain = Plan.of(STATED).traffic
    one_more = Plan.of(STATED, Known(coupled=True)).traffic
    assert one_more.collectives == plain.collectives + 1
    assert (plain.bytes_on_wire is None, one_more.bytes_on_wire) == (False, None)
    counted = Plan.of(STATED, Known(coupled=True, extra_collectives=5)).traffic
    assert counted.collectives == plain.collectives + 5
    assert Plan.of(STATED, Known(extra_collectives=0)).traffic == plain


def test_alone_nothing_travels_beside():
    config = changed(cluster={"nodes": 1, "ranks_per_node": 1})
    assert Plan.of(config, Known(coupled=True)) == Plan.of(config)
    assert Plan.of(config).traffic.collectives == 0
