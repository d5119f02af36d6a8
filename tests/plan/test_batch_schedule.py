"""A global batch that changes: the place of each update in closed form, and its plan."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.config.schema import batch_stages
from orchestrator.errors import ConfigError, PlanError
from orchestrator.plan.batch import batch_at
from orchestrator.plan.order import Branch, DataOrder, Shards
from orchestrator.plan.window import planner_of
from tests.plan.stated import make_plan
from tests.refusals import refused

RAGGED = ("update", "drop", "carry")
MANY = 10**6

schedules = st.dictionaries(st.integers(1, 60), st.integers(1, 90), max_size=5).map(
    lambda stages: tuple(sorted(stages.items()))
)


def branch_at(order: DataOrder, updates: int) -> Branch:
    epoch, position = order.place(updates)
    return Branch(
        run="runs/a",
        updates=updates,
        epoch=epoch,
        position=position,
        seed=order.seed,
        global_batch=order.batch_of(order.updates_before_epoch(epoch)),
        dataset_samples=order.dataset_samples,
    )


fields = {
    "dataset_samples": st.integers(1, 90),
    "global_batch": st.integers(1, 90),
    "ragged": st.sampled_from(RAGGED),
    "batch_schedule": schedules,
}


def order_of(**values) -> DataOrder:
    if values["ragged"] == "drop":  # else an epoch has no update
        largest = values["dataset_samples"]
        values["global_batch"] = min(values["global_batch"], largest)
        stages = values["batch_schedule"]
        values["batch_schedule"] = tuple((update, min(size, largest)) for update, size in stages)
    return DataOrder(**values)


def walk(order: DataOrder, updates: int):
    """Yield (epoch, position, samples) of one update after the other, by the definition."""
    branch = order.branch
    epoch, position = (branch.epoch, branch.position) if branch else (0, 0)
    for update in range(updates):
        batch = batch_at(update, order.global_batch, order.batch_schedule)
        remaining = order.dataset_samples - position
        if order.ragged == "drop" and remaining < batch:
            epoch, position, remaining = epoch + 1, 0, order.dataset_samples
        samples = batch if order.ragged == "carry" else min(batch, remaining)
        yield epoch, position, samples
        position += samples
        full = batch if order.ragged == "drop" else 1
        if order.ragged == "carry" or order.dataset_samples - position < full:
            further = position // order.dataset_samples if order.ragged == "carry" else 1
            epoch += further
            position = position - further * order.dataset_samples if order.ragged == "carry" else 0


@given(st.builds(order_of, **fields))
def test_the_closed_form_is_the_walk(order):
    samples = 0
    for update, (epoch, position, size) in enumerate(walk(order, 150)):
        assert order.place(update) == (epoch, position)
        assert order.samples_of(update) == size
        assert order.samples_before(update) == samples
        assert order.batch_of(update) == batch_at(update, order.global_batch, order.batch_schedule)
        samples += size
        assert order.updates_for_samples(samples) == update + 1
        assert order.updates_for_samples(samples - size + 1) == update + 1
    epochs = [epoch for epoch, _, _ in walk(order, 150)]
    for epoch in range(epochs[-1]):
        assert order.updates_before_epoch(epoch) == np.searchsorted(epochs, epoch)


@given(st.builds(order_of, **fields))
def test_every_epoch_uses_each_sample_once(order):
    """Under `drop` each at most once, and none is computed twice."""
    if order.ragged == "carry":
        updates = order.updates_for(3)
        stream = np.concatenate([order.indices(update) for update in range(updates)]).tolist()
        size = order.dataset_samples
        epochs = [stream[epoch * size : (epoch + 1) * size] for epoch in range(3)]
    else:
        ends = [order.updates_before_epoch(epoch) for epoch in range(4)]
        epochs = [
            np.concatenate([order.indices(u) for u in range(*pair)]).tolist()
            for pair in pairwise(ends)
        ]
    for drawn in epochs:
        assert max(Counter(drawn).values()) == 1
        assert order.ragged == "drop" or len(drawn) == order.dataset_samples


@given(st.builds(order_of, **fields), st.data())
def test_whole_epochs_end_where_the_next_begins(order, data):
    epochs = data.draw(st.integers(1, 4))
    updates = order.updates_for(epochs)
    assert order.epoch_of(updates) >= epochs
    assert order.epoch_of(updates - 1) < epochs
    if order.ragged != "carry":
        assert order.epochs_of(updates) == epochs
        assert epochs - 1 <= order.epochs_of(updates - 1) < epochs


@given(
    st.builds(order_of, **fields),
    st.lists(st.integers(0, MANY), min_size=1, max_size=5),
)
def test_a_schedule_that_changes_nothing_leaves_the_order(order, updates):
    plain = DataOrder(
        dataset_samples=order.dataset_samples, global_batch=order.global_batch, ragged=order.ragged
    )
    same = DataOrder(
        dataset_samples=order.dataset_samples,
        global_batch=order.global_batch,
        ragged=order.ragged,
        batch_schedule=tuple((update, order.global_batch) for update, _ in order.batch_schedule),
    )
    for update in updates:
        assert same.place(update) == plain.place(update)
        assert same.samples_before(update) == plain.samples_before(update)


def test_a_million_updates_are_placed_without_a_walk():
    order = DataOrder(
        dataset_samples=10**9, global_batch=256, batch_schedule=((MANY, 512), (10 * MANY, 3072))
    )
    epoch, position = order.place(10**12)
    assert epoch * 10**9 + position > (10**12 - 10 * MANY) * 3072
    assert order.updates_for_samples(order.samples_before(10**12)) == 10**12
    assert order.place(MANY) == (0, 256 * MANY)


@given(
    order=st.builds(order_of, **fields),
    ranks=st.integers(1, 9),
    cut=st.sampled_from(
        [{"steps": 3}, {"micro_batch": 4}, {"micro_batch": 4, "reduction": "reproducible"}, {}]
    ),
    update=st.integers(0, 80),
)
def test_ranks_together_compute_any_update_in_micro_batches_of_the_first_stage(
    order, ranks, cut, update
):
    plan = make_plan(
        nodes=1,
        ranks_per_node=ranks,
        dataset_samples=order.dataset_samples,
        global_batch=order.global_batch,
        ragged=order.ragged,
        batch_schedule=[list(stage) for stage in order.batch_schedule],
        **cut,
    )
    largest = -(-order.global_batch // (ranks * plan.batch.steps))
    planner = planner_of(plan)
    windows = [planner.window(update, rank) for rank in range(ranks)]
    pieces = [piece for window in windows for piece in window.micro_batches]
    assert [i for piece in pieces for i in piece.indices] == order.indices(update).tolist()
    assert all(len(piece.indices) <= (plan.batch.micro_batch_cap or largest) for piece in pieces)


def test_stages_are_in_the_plan_with_their_rates():
    plan = make_plan(
        nodes=1,
        ranks_per_node=2,
        dataset_samples=10**6,
        global_batch=256,
        updates=9_000,
        batch_schedule=[[1000, 512], [5000, 3072]],
        scaling="linear",
        base_lr=0.1,
    )
    assert plan.to_json()["batch_schedule"] == [
        {"update": 1000, "global_batch": 512, "micro_steps": 8, "learning_rate_peak": 0.2},
        {
            "update": 5000,
            "global_batch": 3072,
            "micro_steps": 48,
            "learning_rate_peak": pytest.approx(1.2),
        },
    ]
    schedule = plan.rates.schedule
    assert [schedule.learning_rate(u) for u in (0, 999, 1000, 4999)] == [0.1, 0.1, 0.2, 0.2]
    assert plan.rates.peak == pytest.approx(1.2)
    assert plan.warnings == ()


@given(
    st.integers(1, 80),
    st.integers(0, 100),
    st.sampled_from(["cosine", "linear", "none"]),
    st.sampled_from(["linear", "sqrt", "none"]),
    schedules,
)
def test_the_peak_of_the_plan_is_the_highest_rate(updates, warmup, decay, scaling, stages):
    assume(warmup <= updates)
    schedule = make_plan(
        dataset_samples=10**6,
        global_batch=64,
        updates=updates,
        warmup_updates=warmup,
        decay=decay,
        scaling=scaling,
        batch_schedule=[list(stage) for stage in stages],
    ).rates.schedule
    rates = [schedule.learning_rate(update) for update in range(updates)]
    if updates > 1:  # an only update trains at its peak
        assert schedule.peak == pytest.approx(max(rates))


def test_a_run_without_a_schedule_has_the_plan_it_had():
    figures = make_plan(dataset_samples=100, updates=5, base_lr=0.1).to_json()
    assert not {"batch_schedule", "samples"} & {*figures, *figures["schedule"]}


@pytest.mark.parametrize(
    ("ragged", "samples", "updates"), [("update", 105, 11), ("drop", 105, 11), ("carry", 101, 11)]
)
def test_a_length_in_samples_is_the_least_number_of_updates(ragged, samples, updates):
    plan = make_plan(global_batch=10, samples=samples, dataset_samples=1000, ragged=ragged)
    assert plan.updates == updates
    assert make_plan(global_batch=10, samples=samples).updates is None


@given(st.builds(order_of, **fields), st.integers(0, 40), st.builds(order_of, **fields))
def test_a_branch_is_the_walk_from_its_place(trunk, updates, own):
    """With another batch, schedule and treatment of an epoch's end, all in closed form."""
    own = replace(
        own,
        dataset_samples=(size := trunk.dataset_samples),
        ragged="carry",
        batch_schedule=(),
        global_batch=min(own.global_batch, size),
    )
    for ragged in RAGGED:
        order = replace(own, ragged=ragged, branch=branch_at(trunk, updates))
        order = replace(order, batch_schedule=((3, min(5, size)), (9, size)))
        samples = 0
        for update, (epoch, position, count) in enumerate(walk(order, 60)):
            assert (order.place(update), order.samples_of(update)) == ((epoch, position), count)
            assert order.samples_before(update) == samples
            samples += count
            assert order.updates_for_samples(samples) == update + 1


@given(st.builds(order_of, **fields), st.integers(0, 40), st.integers(1, 60))
def test_a_branch_with_the_same_batch_is_the_run_that_it_is_from(trunk, updates, global_batch):
    """With another batch it takes the same samples in the same order, each once."""
    after = trunk.batch_of(updates)
    stages = tuple((n - updates, size) for n, size in trunk.batch_schedule if n > updates)
    branch = branch_at(trunk, updates)
    same = replace(trunk, global_batch=after, batch_schedule=stages, branch=branch)
    for update in range(12):
        assert same.indices(update).tolist() == trunk.indices(updates + update).tolist()
        assert same.epoch_of(update) == trunk.epoch_of(updates + update)
    if trunk.ragged == "drop":
        return
    other = replace(same, global_batch=global_batch, batch_schedule=())
    whole = [index for n in range(updates) for index in trunk.indices(n).tolist()]
    whole += [i for n in range(other.updates_for(2)) for i in other.indices(n).tolist()]
    size = trunk.dataset_samples
    for epoch in range(branch.epoch + 2):  # the rest of its epoch is the branch's first
        assert sorted(whole[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_the_epochs_of_a_branch_are_counted_from_its_place():
    trunk = DataOrder(dataset_samples=100, global_batch=10)
    values = {"dataset_samples": 100, "global_batch": 20, "branch": branch_at(trunk, 13)}
    order = DataOrder(**values)
    assert [order.updates_for(epochs) for epochs in (0.5, 1, 2, 2.2)] == [2, 4, 9, 10]
    assert [order.epochs_of(updates) for updates in (2, 4, 9, 10)] == [0.5, 1, 2, 2.2]
    assert [order.samples_of(update) for update in range(5)] == [20, 20, 20, 10, 20]
    assert order.updates_per_epoch == 4
    carried = DataOrder(**values, ragged="carry")
    assert [carried.updates_for(epochs) for epochs in (0.5, 1, 2)] == [2, 4, 9]
    assert carried.epochs_of(2) == 40 / 70


def test_a_branch_that_has_no_place_is_refused():
    trunk = DataOrder(dataset_samples=100, global_batch=10)
    with refused(PlanError, "train.initial_state 100 90"):
        DataOrder(dataset_samples=90, global_batch=10, branch=branch_at(trunk, 3))
    sharded = {"dataset_samples": 100, "shards": Shards((30, 70), 4)}
    with refused(PlanError, "train.initial_state accumulation.global_batch=10"):
        DataOrder(**sharded, global_batch=20, branch=branch_at(trunk, 3))
    whole = DataOrder(**sharded, global_batch=10)
    grown = DataOrder(
        **sharded, global_batch=10, branch=branch_at(whole, 3), batch_schedule=((7, 25),)
    )
    assert grown.indices(6).tolist() == whole.indices(9).tolist()
    assert grown.samples_of(7) == 25
    DataOrder(**sharded, global_batch=20, branch=branch_at(whole, 10))


SHARDS = Shards((30, 25, 45), lanes=4)  # 100 samples: with G = 8, epochs of 13 or 12 updates


@pytest.mark.parametrize("ragged", RAGGED)
def test_shards_are_read_in_full_where_the_batch_changes_at_an_epoch_s_end(ragged):
    alone = DataOrder(dataset_samples=100, global_batch=8, ragged=ragged, shards=SHARDS)
    change = alone.updates_before_epoch(2)
    values = {"dataset_samples": 100, "global_batch": 8, "ragged": ragged, "shards": SHARDS}
    order = DataOrder(**values, batch_schedule=((change, 20),))
    for update in range(change):
        assert order.indices(update)[:4].tolist() == alone.indices(update)[:4].tolist()
    drawn = np.concatenate([order.indices(u) for u in range(order.updates_for(4))])[:400]
    counts = Counter(drawn.tolist())
    assert max(counts.values()) <= 4
    assert ragged == "drop" or set(counts.values()) == {4}
    for wrong in (change - 1, change + 1):
        with refused(PlanError, f"accumulation.batch_schedule {wrong} {change}"):
            DataOrder(**values, batch_schedule=((wrong, 20),))


@pytest.mark.parametrize(
    ("schedule", "names"),
    [
        (512, "[[1000,512],[5000,3072]] 512"),
        ([[1000, 512, 3]], "[1000, 512, 3]"),
        ([[1000, 51.5]], "[1000, 51.5]"),
        ([[1000, True]], "[1000, True]"),
        ([1000, 512], "1000"),
        ([[0, 512]], "0 accumulation.global_batch"),
        ([[9, 0]], "9 1 0"),
        ([[9, 20], [9, 30]], "9"),
        ([[9, 20], [7, 30]], "accumulation.batch_schedule=[[7, 30], [9, 20]]"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(schedule, names):
    with refused(ConfigError, f"accumulation.batch_schedule {names}"):
        batch_stages(schedule)


def test_a_stage_that_cannot_be_planned_is_refused():
    with refused(PlanError, "accumulation.ragged=drop 5 60 50"):
        make_plan(global_batch=10, batch_schedule=[[5, 60]], dataset_samples=50, ragged="drop")
    with refused(PlanError, "accumulation.global_batch 4194304"):
        make_plan(global_batch=8, micro_batch=1, batch_schedule=[[5, 10**7]])


TRUNK = branch_at(DataOrder(dataset_samples=100, global_batch=15), 10)  # after 45 of epoch 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"batch_schedule": [[6, 20]]}, []),
        (
            {"batch_schedule": [[7, 20], [9, 30]]},
            [
                (
                    "accumulation.batch_schedule: the run has 7 updates, so it ends before the "
                    "batch of 20 from update 7 on"
                )
            ],
        ),
        (
            {"batch_schedule": [[6, 101]]},
            [
                (
                    "accumulation.batch_schedule from update 6 on: G=101 is more than the 100 "
                    "samples of the data set: an update holds 100"
                )
            ],
        ),
        (
            {"batch_schedule": [[2, 30]], "ragged": "drop"},
            ["accumulation.ragged=drop leaves 30 samples out of the ends of 2 epochs of 100"],
        ),
        (
            {"branch": TRUNK, "ragged": "drop"},
            ["accumulation.ragged=drop leaves 5 samples out of the ends of 1 epoch of 100"],
        ),
        (
            {"branch": TRUNK, "seed": 1},
            [
                (
                    "train.seed=1 is not that of runs/a (0): the rest of epoch 1 comes in another "
                    "order, with samples that were used already"
                )
            ],
        ),
    ],
)
def test_warnings_of_a_batch_schedule(values, expected):
    plan = make_plan(global_batch=10, updates=7, steps=1, dataset_samples=100, **values)
    assert list(plan.warnings) == expected


@pytest.mark.parametrize(
    ("shards", "updates", "names"),
    [
        (Shards((70, 30), 4), 5, "lengths"),
        (Shards((70, 30), 4), 0, "lengths"),
        (Shards((30, 70), 2), 5, "4 lanes 2"),
        (Shards((30, 70), 2), 0, None),
        (Shards((30, 70), 4), 5, None),
    ],
)
def test_a_branch_goes_on_in_the_shards_of_the_run_that_it_is_from(shards, updates, names):
    before = Shards((30, 70), 4)
    values = {"dataset_samples": 100, "global_batch": 10}
    place = branch_at(DataOrder(**values, shards=before), updates)
    branch = replace(place, shards_digest=before.digest, lanes=before.lanes)
    with refused(PlanError, f"train.initial_state {names}") if names else nullcontext():
        DataOrder(**values, shards=shards, branch=branch)
