"""The three batch numbers: any two give the third, all three must agree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import PlanError
from orchestrator.plan.batch import MOST_MICRO_BATCHES, Batch, resolve_batch
from orchestrator.plan.split import split_window

positive = st.integers(1, 5_000)
few = st.integers(1, 300)


def resolve(global_batch=None, steps=None, micro_batch=None, ranks=4) -> Batch:
    return resolve_batch(
        global_batch=global_batch, steps=steps, micro_batch=micro_batch, ranks=ranks
    )


def numbers(batch: Batch) -> tuple[int, int, int | None]:
    return batch.global_batch, batch.steps, batch.micro_batch_cap


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, (256, 4, None)),
        ({"global_batch": 100}, (100, 4, None)),
        ({"steps": 7}, (256, 7, None)),
        ({"micro_batch": 16}, (256, 4, 16)),
        ({"micro_batch": 10}, (256, 7, 10)),
        ({"global_batch": 100, "steps": 3}, (100, 3, None)),
        ({"global_batch": 100, "micro_batch": 10}, (100, 3, 10)),
        ({"steps": 3, "micro_batch": 10}, (120, 3, 10)),
        ({"global_batch": 100, "steps": 3, "micro_batch": 10}, (100, 3, 10)),
    ],
)
def test_defaults_fill_in_only_what_the_stated_numbers_leave_open(stated, expected):
    assert numbers(resolve(**stated)) == expected


@pytest.mark.parametrize(
    ("ranks", "stated", "expected"),
    [
        (1, {"global_batch": 64, "micro_batch": 16}, (64, 4, 16)),  # 64 = 4 x 16 on one device
        (240, {"global_batch": 3072, "micro_batch": 10}, (3072, 2, 10)),
        (240, {"steps": 1, "micro_batch": 10}, (2400, 1, 10)),
    ],
)
def test_the_numbers_of_the_source_documents(ranks, stated, expected):
    assert numbers(resolve(ranks=ranks, **stated)) == expected


@given(positive, few, few)
def test_the_third_number_agrees_with_the_two_it_came_from(global_batch, micro_batch, ranks):
    batch = resolve(global_batch=global_batch, micro_batch=micro_batch, ranks=ranks)
    again = resolve(global_batch, batch.steps, micro_batch, ranks)
    assert again == batch


@given(few, few, few)
def test_steps_and_micro_batch_give_a_global_batch_that_agrees(steps, micro_batch, ranks):
    batch = resolve(steps=steps, micro_batch=micro_batch, ranks=ranks)
    assert batch.global_batch == ranks * steps * micro_batch
    assert resolve(batch.global_batch, steps, micro_batch, ranks) == batch
    assert resolve(batch.global_batch, None, micro_batch, ranks) == batch


@given(positive, few, few)
def test_the_cap_holds_and_no_fewer_steps_would_do(global_batch, micro_batch, ranks):
    batch = resolve(global_batch=global_batch, micro_batch=micro_batch, ranks=ranks)
    split = split_window(global_batch, ranks, cap=micro_batch)
    assert split.micro_steps == batch.steps
    assert max(map(max, filter(None, split.micro_batches))) <= micro_batch
    assert (batch.steps - 1) * micro_batch < max(split.samples_per_rank)


@given(positive, few, few)
def test_steps_and_the_micro_batch_they_lead_to_agree(global_batch, steps, ranks):
    split = split_window(global_batch, ranks, steps=steps)
    largest = max(map(max, filter(None, split.micro_batches)))
    taken = resolve(global_batch=global_batch, micro_batch=largest, ranks=ranks)
    assert taken.steps <= split.micro_steps <= steps


@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 30), st.integers(1, 4))
def test_each_remedy_of_a_disagreement_works(global_batch, steps, micro_batch, ranks):
    stated = {"global_batch": global_batch, "steps": steps, "micro_batch": micro_batch}
    try:
        resolve(**stated, ranks=ranks)
    except PlanError as error:
        remedies = str(error).partition("change one: ")[2].replace(" or ", ", ").split(", ")
        assert len(remedies) >= 2
        for remedy in remedies:
            key, value = remedy.removeprefix("accumulation.").split("=")
            changed = stated | {key: int(value)}
            assert numbers(resolve(**changed, ranks=ranks)) == tuple(changed.values())


def test_three_numbers_that_disagree_are_named_with_what_would_work():
    with pytest.raises(PlanError) as caught:
        resolve(256, 3, 10)
    assert str(caught.value) == (
        "accumulation.global_batch=256, accumulation.steps=3 and accumulation.micro_batch=10 "
        "disagree: on 4 ranks, 256 samples in micro-batches of at most 10 take 7 micro-steps, not "
        "3. State two of the three, or change one: accumulation.steps=7, "
        "accumulation.micro_batch=22 or accumulation.global_batch=120"
    )


@pytest.mark.parametrize("key", ["global_batch", "steps", "micro_batch"])
@pytest.mark.parametrize("value", [0, -3])
def test_numbers_below_one_are_refused_with_the_nearest_that_works(key, value):
    with pytest.raises(PlanError) as caught:
        resolve(**{key: value})
    assert str(caught.value) == (
        f"accumulation.{key}={value}: it must be 1 or more; the nearest that works is "
        f"accumulation.{key}=1"
    )


def test_no_ranks_are_refused():
    with pytest.raises(PlanError, match="it must be 1 or more"):
        resolve(ranks=0)


@pytest.mark.parametrize(
    ("stated", "ranks", "remedies"),
    [
        ((64, 1, 5), 1, "steps=13, micro_batch=64 or global_batch=5"),
        ((100, 3, 2), 4, "steps=13, micro_batch=9 or global_batch=24"),
        ((7, 9, 1), 4, "steps=2 or global_batch=33"),
        ((5, 4, 9), 1, "steps=1 or global_batch=28"),
        ((12, 1, 20), 1, None),
    ],
)
def test_the_remedies_of_a_disagreement_are_the_nearest(stated, ranks, remedies):
    if remedies is None:
        assert resolve(*stated, ranks=ranks)
        return
    with pytest.raises(PlanError) as caught:
        resolve(*stated, ranks=ranks)
    said = str(caught.value).replace("accumulation.", "")
    assert said.partition("change one: ")[2] == remedies
    assert ("on 1 rank," in said) == (ranks == 1)
    assert ("take 1 micro-step, not" in said) == ("steps=1 " in remedies)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_has_as_many_micro_batches_as_can_be_planned_and_no_more(ranks):
    most = MOST_MICRO_BATCHES // ranks
    assert resolve(MOST_MICRO_BATCHES, most, ranks=ranks).steps == most
    assert resolve(MOST_MICRO_BATCHES, most + 1, ranks=ranks)  # more than a rank has samples
    with pytest.raises(PlanError, match=f"a window of {MOST_MICRO_BATCHES + ranks} micro-batches"):
        resolve(10 * MOST_MICRO_BATCHES, most + 1, ranks=ranks)
    with pytest.raises(PlanError, match="a window of 4194305 micro-batches"):
        resolve(None, None, 1, ranks=MOST_MICRO_BATCHES + 1)
