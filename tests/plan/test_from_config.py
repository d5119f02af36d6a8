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
from orchestrator.plan.from_config import plan_of
from orchestrator.plan.plan import make_plan

STATED = Config(
    cluster=ClusterConfig(nodes=3, ranks_per_node=2),
    accumulation=AccumulationConfig(global_batch=64, steps=4, ragged="drop", sync="every_step"),
    schedule=ScheduleConfig(
        base_lr=0.3, base_batch=16, scaling="sqrt", warmup_updates=7, decay="cosine"
    ),
    train=TrainConfig(updates=40, seed=11, precision="bfloat16"),
    engine=EngineConfig(bucket_mib=0.25, wire="bfloat16"),
    facts=FactsConfig(dataset_samples=999, parameters=300_000),
)
SAME = {
    "nodes": 3, "ranks_per_node": 2, "global_batch": 64, "steps": 4,
    "ragged": "drop", "sync": "every_step", "updates": 40, "seed": 11, "base_lr": 0.3,
    "base_batch": 16, "scaling": "sqrt", "warmup_updates": 7, "decay": "cosine",
    "dataset_samples": 999, "parameters": 300_000, "itemsize": 4, "bucket_bytes": 1 << 18,
    "wire_itemsize": 2,
}  # fmt: skip


def changed(**sections):
    """The configuration above with some values set, by section."""
    config = copy.deepcopy(STATED)
    for section, values in sections.items():
        for name, value in values.items():
            setattr(getattr(config, section), name, value)
    return config


def test_every_value_of_a_configuration_reaches_the_plan():
    assert plan_of(STATED) == make_plan(**SAME)


@pytest.mark.parametrize(
    ("sections", "same"),
    [
        ({"train": {"updates": None, "epochs": 2.5}}, {"updates": None, "epochs": 2.5}),
        ({"train": {"precision": "float64"}, "engine": {"wire": "own"}},
         {"itemsize": 8, "wire_itemsize": None}),
        ({"accumulation": {"sync": "boundary"}, "engine": {"shard_optimizer": True}},
         {"sync": "boundary", "shard_optimizer": True}),
        ({"accumulation": {"sync": "boundary", "reduction": "reproducible", "steps": None,
                           "micro_batch": 5},
          "engine": {"wire": "own"}},
         {"sync": "boundary", "reduction": "reproducible", "steps": None, "micro_batch": 5,
          "wire_itemsize": None}),
        ({"cluster": {"nodes": {"min": 2, "max": 4}}}, {"nodes": 4}),
    ],
)  # fmt: skip
def test_other_values_reach_it_too(sections, same):
    assert plan_of(changed(**sections)) == make_plan(**{**SAME, **same})


@pytest.mark.parametrize(
    "known",
    [{"nodes": 2}, {"dataset_samples": 500}, {"parameters": 7}, {"metric_count": 40},
     {"own_rate": True}],
)  # fmt: skip
def test_what_the_ranks_know_comes_before_what_was_stated(known):
    assert plan_of(STATED, **known) == make_plan(**{**SAME, **known}) != make_plan(**SAME)


def test_only_mindspore_sends_after_the_backward():
    large = {"parameters": 9_000_000}
    config = changed(engine={"bucket_mib": None, "wire": "own"}, facts=large)
    same = {**SAME, "bucket_bytes": None, "wire_itemsize": None, **large}
    after, early = plan_of(config, framework="mindspore"), plan_of(config, framework="torch")
    assert after == make_plan(**same, early=False) != early == make_plan(**same)


def test_what_travels_beside_the_gradient_is_counted_or_left_open():
    plain = plan_of(STATED)
    one_more = plan_of(STATED, coupled=True)
    assert one_more.collectives_per_update == plain.collectives_per_update + 1
    assert (plain.bytes_on_wire_per_update is None, one_more.bytes_on_wire_per_update) == (
        False,
        None,
    )
    counted = plan_of(STATED, coupled=True, collectives_beside=5)
    assert counted.collectives_per_update == plain.collectives_per_update + 5
    assert plan_of(STATED, collectives_beside=0) == plain


def test_alone_nothing_travels_beside():
    alone = {"nodes": 1, "ranks_per_node": 1}
    config = changed(cluster=alone)
    assert plan_of(config, coupled=True) == plan_of(config) == make_plan(**{**SAME, **alone})


def test_exact_batch_norms_are_not_counted_before_the_model_is_there():
    config = changed(engine={"norm": "exact"})
    unknown, known = plan_of(config), plan_of(config, collectives_beside=4)
    plain = plan_of(STATED).collectives_per_update
    assert (unknown.collectives_per_update, known.collectives_per_update) == (None, plain + 4)
    assert unknown.bytes_on_wire_per_update is known.bytes_on_wire_per_update is None
