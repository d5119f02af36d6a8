"""Warnings of a plan are true: each sentence is read, and compared with what will happen."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import PlanError
from orchestrator.plan.plan_warnings import named_ranks
from orchestrator.plan.window import planner_of
from tests.plan.stated import make_plan

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
    first, samples = splits[0], plan.length.dataset_samples
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
        return uneven and len({len(sizes) for sizes in other.split.micro_batches}) == 1
    if "more than the" in sentence and "samples of the data set" in sentence:
        more = plan.batch.global_batch > samples
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


IDLE = "rank 3 of 4 will be idle: there is no work for them in an update of 3 samples"
MORE = "accumulation.global_batch=50 is more than the 49 samples of the data set: an update holds "
UNEVEN = "9 leaves do not divide evenly: 1 of 4 ranks take 3 and the others wait for them"
FILLED = "; accumulation.global_batch=96 would fill all ranks at accumulation.micro_batch=8"
LEAVES = {"global_batch": 65, "micro_batch": 8, "reduction": "reproducible"}
SMALL = {"global_batch": 50, "dataset_samples": 49}
SCALED = {**SMALL, "scaling": "linear", "base_batch": 10}
DROP = {"global_batch": 50, "dataset_samples": 120, "ragged": "drop"}
WARM = {"global_batch": 50, "updates": 4, "warmup_updates": 5}
LEFT_OUT = "accumulation.ragged=drop leaves 20 of 120 samples out of each epoch"


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"global_batch": 3, "steps": 1}, [IDLE]),
        ({"global_batch": 10, "micro_batch": 5, "reduction": "reproducible"},
         [("ranks 2-3 of 4 will be idle: there is no work for them in an update of 10 samples in "
          "leaves of 5"),
          ("2 leaves do not divide evenly: 2 of 4 ranks take 1 and the others wait for them; "
          "accumulation.global_batch=20 would fill all ranks at accumulation.micro_batch=5")]),
        ({"global_batch": 3},
         [IDLE, ("accumulation.steps=4 is more than the samples of a rank, which are 1 at most: it "
          "takes 1 micro-step")]),
        ({"global_batch": 8, "steps": 5},
         [("accumulation.steps=5 is more than the samples of a rank, which are 2 at most: it takes "
          "2 micro-steps")]),
        ({"global_batch": 8, "steps": 2}, []),
        ({"global_batch": 100, "micro_batch": 5, "dataset_samples": 30},
         [("an update holds 30 samples, fewer than accumulation.global_batch=100: it takes 2 "
          "micro-steps of at most 5, not 5"),
          ("accumulation.global_batch=100 is more than the 30 samples of the data set: an update "
          "holds 30")]),
        ({**LEAVES, "global_batch": 64}, []),
        (LEAVES, [UNEVEN + FILLED]),
        ({**LEAVES, "dataset_samples": 96}, [UNEVEN + FILLED]),
        ({**LEAVES, "dataset_samples": 95}, [UNEVEN]),
        ({**LEAVES, "dataset_samples": 95, "ragged": "carry"}, [UNEVEN + FILLED]),
        (SMALL, [MORE + "49"]),
        ({**SMALL, "dataset_samples": 50}, []),
        (SCALED, [MORE + "49, while the learning rate is scaled for 50"]),
        ({**SCALED, "own_rate": True}, [MORE + "49"]),
        ({**SMALL, "ragged": "carry"}, [MORE + "some samples more than once"]),
        ({**SMALL, "ragged": "carry", "dataset_samples": 50}, []),
        ({**DROP, "updates": 1}, []),
        ({**DROP, "updates": 2}, [LEFT_OUT]),
        ({**DROP, "updates": 4}, [LEFT_OUT + " (others each time)"]),
        ({**DROP, "updates": 4, "dataset_samples": 100}, []),
        ({**DROP, "updates": 4, "ragged": "update"}, []),
        (WARM, [("schedule.warmup_updates=5 is more than the 4 updates of the run: the learning "
                "rate never reaches its peak")]),
        ({**WARM, "warmup_updates": 4}, []),
        ({**WARM, "own_rate": True}, []),
        ({**WARM, "updates": None}, []),
    ],
)  # fmt: skip
def test_a_plan_warns_of_this_in_these_words_and_of_no_more(stated, told):
    assert list(make_plan(nodes=2, ranks_per_node=2, **stated).warnings) == told


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([5], "rank 5"),
        ([0, 1, 2], "ranks 0-2"),
        ([1, 3, 4, 5, 9], "ranks 1, 3-5, 9"),
        (range(0, 16, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14"),
        (range(0, 18, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 1 more group"),
        (range(0, 22, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 3 more groups"),
    ],
)
def test_ranks_are_named_in_runs_and_eight_runs_at_most(ranks, words):
    assert named_ranks(list(ranks)) == words
