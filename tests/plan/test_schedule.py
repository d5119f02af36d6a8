"""Learning rates against their closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.schema import BOUNDS
from orchestrator.errors import PlanError
from orchestrator.plan.schedule import Schedule
from tests.refusals import refused

DECAYS = BOUNDS["schedule.decay"].choice
counts = st.integers(1, 2_000)


def schedule(**values) -> Schedule:
    return Schedule(**{"base_lr": 0.1, "global_batch": 256} | values)


@pytest.mark.parametrize(
    ("scaling", "peak"), [("linear", 1.2), ("sqrt", 0.1 * math.sqrt(12)), ("none", 0.1)]
)
def test_the_peak_follows_the_global_batch(scaling, peak):
    grown = schedule(scaling=scaling, base_batch=256, global_batch=3072)
    assert grown.peak == pytest.approx(peak, rel=1e-15)
    assert grown.learning_rate(0) == grown.peak


@given(st.integers(1, 500))
def test_warm_up_rises_by_equal_parts_to_the_peak(warmup):
    rates = [schedule(warmup_updates=warmup).learning_rate(u) for u in range(warmup + 2)]
    for update in range(warmup):
        assert rates[update] == pytest.approx(0.1 * (update + 1) / warmup, rel=1e-14)
    assert rates[warmup - 1] == rates[warmup] == rates[warmup + 1] == 0.1


@given(counts, st.integers(0, 100), st.sampled_from(["cosine", "linear"]))
def test_decay_ends_at_nothing_on_the_last_update(total, warmup, decay):
    total += warmup + 1
    decayed = schedule(warmup_updates=warmup, decay=decay, total_updates=total)
    peak_update = max(warmup - 1, 0)
    assert decayed.learning_rate(peak_update) == 0.1
    assert decayed.learning_rate(total - 1) == pytest.approx(0, abs=1e-16)
    assert decayed.learning_rate(total + 5) == decayed.learning_rate(total - 1)
    rates = [decayed.learning_rate(u) for u in range(peak_update, total)]
    assert rates == sorted(rates, reverse=True)


@given(st.integers(2, 2_000), st.data())
def test_decay_follows_its_closed_form(total, data):
    update = data.draw(st.integers(0, total - 1))
    p = update / (total - 1)
    cosine = schedule(decay="cosine", total_updates=total).learning_rate(update)
    assert cosine == pytest.approx(0.1 * math.cos(math.pi * p / 2) ** 2, abs=2e-15)
    linear = schedule(decay="linear", total_updates=total).learning_rate(update)
    assert linear == pytest.approx(0.1 * (1 - p), abs=1e-16)


@pytest.mark.parametrize("decay", DECAYS)
def test_a_warm_up_longer_than_the_run_stays_a_warm_up(decay):
    short = schedule(warmup_updates=10, decay=decay, total_updates=5)
    assert short.learning_rate(4) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"base_lr": -1.0}, "schedule.base_lr=-1.0"),
        ({"base_lr": math.nan}, "schedule.base_lr=nan"),
        (
            {"decay": "cosine"},
            "schedule.decay=cosine train.updates train.epochs schedule.decay=none",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(values, names):
    with refused(PlanError, names):
        schedule(**values)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_run_of_one_update_that_goes_on_after_its_end_has_decayed(decay, warmup):
    one = schedule(decay=decay, warmup_updates=warmup, total_updates=1)
    assert [one.learning_rate(update) for update in (0, 1, 7)] == [0.1, 0.0, 0.0]


def test_a_cosine_is_cut_to_14_digits_since_libraries_differ_in_its_last():
    rate = schedule(base_lr=1.0, decay="cosine", total_updates=6).learning_rate(1)
    assert rate == 0.5 * (1.0 + 0.80901699437495)  # cos 36° = 0.809016994374947…
