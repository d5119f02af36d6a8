"""Warnings of a plan are true: each sentence is read, and compared with what will happen."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import PlanError
from orchestrator.plan.plan import make_plan
from orchestrator.plan.window import planner_of

NUMBERS = re.compile(r"\d+")


@st.composite
def plans(draw):
    reproducible = draw(st.booleans())
    small = st.integers(1, 40)
    cap = draw(small) if reproducible else draw(st.none() | small)
    stated = {
        "nodes": draw(st.integers(1, 3)),
        "ranks_per_node": draw(st.integers(1, 4)),
        "global_batch": draw(small),
        "steps": None if cap else draw(st.none() | st.integers(1, 9)),
        "micro_batch": cap,
        "ragged": draw(st.sampled_from(["update", "drop", "carry"])),
        "reduction": "reproducible" if reproducible else "fast",
        "dataset_samples": draw(st.integers(1, 60)),
        "updates": draw(st.none() | st.integers(1, 12)),
        "epochs": draw(st.sampled_from([1.0, 2.0, 3.5])),
        "scaling": draw(st.sampled_from(["none", "linear", "sqrt"])),
        "base_batch": draw(st.integers(1, 30)),
        "warmup_updates": draw(st.integers(0, 15)),
        "own_rate": draw(st.booleans()),
    }
    try:
        return stated, make_plan(**stated)
    except PlanError:
        return stated, None


def _holds(sentence, stated, plan):
    """Whether what a warning says is so, by the windows themselves."""
    planner = planner_of(plan)
    splits = [planner.assignment(update) for update in range(plan.updates)]
    first, samples = splits[0], plan.dataset_samples
    if "will be idle" in sentence:
        idle = [rank for rank, sizes in enumerate(first.micro_batches) if not sizes]
        return idle and all(not one.micro_batches[rank] for one in splits for rank in idle)
    if "more than the samples of a rank" in sentence:
        steps, most, taken = map(int, NUMBERS.findall(sentence))
        return max(first.samples_per_rank) == most == taken == first.micro_steps < steps
    if "an update holds" in sentence and "fewer than" in sentence:
        held, asked, taken, cap, steps = map(int, NUMBERS.findall(sentence))
        return first.samples == held < asked and first.micro_steps == taken < steps and cap
    if "leaves do not divide evenly" in sentence:
        counts = [len(sizes) for sizes in first.micro_batches]
        uneven = min(counts) < max(counts)
        if "would fill" not in sentence:
            return uneven
        other = make_plan(**{**stated, "global_batch": int(NUMBERS.findall(sentence)[4])})
        return uneven and len({len(sizes) for sizes in other.micro_batches}) == 1
    if "more than the" in sentence and "samples of the data set" in sentence:
        more = plan.global_batch > samples
        if "is scaled for" in sentence:
            more &= stated["scaling"] != "none" and not stated["own_rate"]
        if "holds some samples more than once" in sentence:
            indices = planner.order.indices(0).tolist()
            return more and len(set(indices)) < len(indices)
        return more and first.samples == samples
    if "out of each epoch" in sentence:
        left, of = map(int, NUMBERS.findall(sentence))
        used = sum(s.samples for u, s in enumerate(splits) if planner.order.epoch_of(u) == 0)
        return of == samples and used == samples - left
    if "never reaches its peak" in sentence:
        rates = [planner.schedule.learning_rate(update) for update in range(plan.updates)]
        return max(rates) < planner.schedule.peak and not stated["own_rate"]
    raise AssertionError(f"a sentence that this law does not know: {sentence}")


@settings(max_examples=300, deadline=None)
@given(plans())
def test_every_warning_of_a_plan_is_so(made):
    stated, plan = made
    for sentence in plan.warnings if plan else ():
        assert _holds(sentence, stated, plan), (sentence, stated)


@pytest.mark.parametrize("scaling", ["none", "linear"])
def test_only_a_scaled_rate_is_called_scaled(scaling):
    plan = make_plan(
        nodes=1, ranks_per_node=1, global_batch=50, dataset_samples=20, scaling=scaling,
        base_batch=10,
    )  # fmt: skip
    [told] = [sentence for sentence in plan.warnings if "data set" in sentence]
    assert ("is scaled" in told) == (scaling == "linear")
