"""The three batch numbers: any two give the third, all three must agree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import PlanError
from orchestrator.plan.batch import MOST_MICRO_BATCHES, Batch, resolve_batch
from orchestrator.plan.split import split_window
from tests.refusals import refused

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


@pytest.mark.parametrize(
    ("stated", "ranks", "remedies"),
    [
        ((64, 1, 5), 1, "steps=13, micro_batch=64 or global_batch=5"),
        ((100, 3, 2), 4, "steps=13, micro_batch=9 or global_batch=24"),
        ((7, 9, 1), 4, "steps=2 or global_batch=33"),
        ((5, 4, 9), 1, "steps=1 or global_batch=28"),
    ],
)
def test_the_remedies_of_a_disagreement_are_the_nearest(stated, ranks, remedies):
    with pytest.raises(PlanError) as caught:
        resolve(*stated, ranks=ranks)
    said = str(caught.value).replace("accumulation.", "")
    assert said.partition("change one: ")[2] == remedies
    assert ("on 1 rank," in said) == (ranks == 1)
    assert ("take 1 micro-step, not" in said) == ("steps=1 " in remedies)


LESS = "accumulation.steps accumulation.micro_batch"  # or more of the latter


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_has_as_many_micro_batches_as_can_be_planned_and_no_more(ranks):
    most = MOST_MICRO_BATCHES // ranks
    assert resolve(MOST_MICRO_BATCHES, most, ranks=ranks).steps == most
    assert resolve(MOST_MICRO_BATCHES, most + 1, ranks=ranks)  # more than a rank has samples
    with refused(
        PlanError,
        f"accumulation.global_batch {MOST_MICRO_BATCHES + ranks} {MOST_MICRO_BATCHES} {LESS}",
    ):
        resolve(10 * MOST_MICRO_BATCHES, most + 1, ranks=ranks)
    with refused(
        PlanError, f"accumulation.global_batch {MOST_MICRO_BATCHES + 1} {MOST_MICRO_BATCHES} {LESS}"
    ):
        resolve(None, None, 1, ranks=MOST_MICRO_BATCHES + 1)
