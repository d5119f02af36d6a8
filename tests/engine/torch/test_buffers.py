"""Foreign writes to gradients, the gradient's norm, and exact sums."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from orchestrator import Loss
from orchestrator.engine.common.trailer import (
    LOSS,
    MOST_RANKS,
    NARROW,
    NON_FINITE,
    STOP,
    UNIT_BITS,
    WEIGHT,
    WIDE,
    Trailer,
    from_limbs,
    to_float,
    to_limbs,
    to_units,
)
from orchestrator.engine.torch.reducer import GradientNorm
from orchestrator.errors import JobError
from orchestrator.plan.wire import LIMBS, SUMS, trailer_numbers
from tests.engine.torch.jobs import numbers_of, sgd_accumulator

WRITES = {
    "another tensor": lambda parameter: setattr(parameter, "grad", parameter.grad + 0),
    "another memory": lambda parameter: setattr(parameter.grad, "data", parameter.grad * 0.5),
    "in place": lambda parameter: parameter.grad.mul_(1.0),
    "copied": lambda parameter: parameter.grad.copy_(torch.ones_like(parameter)),
    "zeros": lambda parameter: parameter.grad.zero_(),
    "foreach": lambda parameter: torch._foreach_mul_([parameter.grad], 0.5),
}
REDUCTIONS = {"fast": ({}, {}), "reproducible": ({"reduction": "reproducible"}, {"leaves": 3})}


@pytest.fixture(params=[0, 8192], ids=["copied", "added"])
def first_gradients(request, monkeypatch):
    """Have first gradients copied into the buffers, as those of large parameters are, or added."""
    monkeypatch.setattr("orchestrator.engine.torch.buffers._WORTH_COPYING", request.param)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def _update(reduction, after=None, write=None, number=0):
    """One window of three micro-steps; `write` is called after one of them."""
    more, window = REDUCTIONS[reduction]
    model = _model()
    ours = sgd_accumulator(model, **more)
    ours.begin_window(**window)
    for step in range(3):
        total = model(torch.full((2, 3), step + 1.0)).square().sum()
        ours.backward(Loss(total, 2), last=step == 2, leaf=step)
        if step == after:
            write(list(model.parameters())[number])
    ours.boundary()
    return numbers_of(model)


@pytest.mark.usefixtures("first_gradients")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_found_wherever_it_comes(reduction, after, write):
    for number in (0, 3):
        with pytest.raises(JobError, match="was written by something else than a backward"):
            _update(reduction, after, WRITES[write], number)


@pytest.mark.usefixtures("first_gradients")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_to_forget_gradients_forgets_nothing(reduction, after):
    found = _update(reduction, after, lambda parameter: setattr(parameter, "grad", None))
    assert torch.equal(found, _update(reduction))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_parameters_may_be_sparse_shared_halves_or_used_in_some_micro_steps(reduction, monkeypatch):
    def train(worth_copying):
        monkeypatch.setattr("orchestrator.engine.torch.buffers._WORTH_COPYING", worth_copying)
        torch.manual_seed(0)
        sparse, shared = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4)
        half, late = nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4)
        model = nn.ModuleList([sparse, shared, half, late, nn.Linear(4, 4)])
        more, window = REDUCTIONS[reduction]
        ours = sgd_accumulator(model, **more)
        for _ in range(2):
            ours.begin_window(**window)
            for step in range(3):
                hidden = shared(shared(sparse(torch.tensor([step, 1]))))
                hidden = half(hidden.bfloat16()).float() if step != 1 else late(hidden)
                ours.backward(Loss(hidden.square().sum(), 2), last=step == 2, leaf=step)
            ours.boundary()
        return numbers_of(model)

    assert torch.equal(train(0), train(8192))


@pytest.mark.usefixtures("first_gradients")
def test_gradients_may_be_written_between_two_windows():
    def train(write):
        model = _model()
        ours = sgd_accumulator(model)
        for _ in range(2):
            ours.backward(Loss(model(torch.ones(2, 3)).sum(), 2), last=True)
            ours.boundary()
            for parameter in model.parameters() if write else ():
                WRITES[write](parameter)
        return numbers_of(model)

    wanted = train(None)
    for write in WRITES:
        if write != "another memory":
            assert torch.equal(train(write), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 4096, 9000])
def test_the_norm_is_as_good_in_every_dtype_as_in_a_wide_one(dtype, size):
    piece = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype) * 0.01
    norm = GradientNorm()
    norm.add(piece)
    expected = float(torch.linalg.vector_norm(piece, dtype=torch.float64))
    assert norm.value() == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 1e-6)


def test_pieces_without_numbers_do_not_hinder_where_squares_overflow():
    norm = GradientNorm()
    for piece in (torch.zeros(0), torch.tensor([-3.0, 1.0]), torch.zeros(0)):
        norm.add(piece.double() * 1e200)
    assert norm.value() == pytest.approx(math.hypot(3e200, 1e200), rel=1e-12)


# ------------------------------------------------------------------ Exact sums


reals = st.floats(-1e15, 1e15, allow_nan=False)


def _sum_of(values):
    return sum(map(to_units, values))


@given(st.lists(reals, max_size=30))
def test_a_sum_is_that_of_the_parts_each_rounded_once(values):
    exact = sum((Fraction(round(Fraction(v) * 2**UNIT_BITS)) for v in values), Fraction(0))
    found = _sum_of(values)
    assert found == exact
    assert to_float(found) == float(exact / 2**UNIT_BITS)


@given(st.lists(reals, min_size=1, max_size=9))
def test_narrow_limbs_round_each_rank_to_two_to_the_minus_40(values):
    added = sum(torch.tensor(to_limbs(_sum_of([v]), NARROW), dtype=torch.float32) for v in values)
    exact = sum(Fraction(v) for v in values)
    error = Fraction(from_limbs(added.tolist(), NARROW), 2**UNIT_BITS) - exact
    assert abs(error) <= len(values) * Fraction(1, 2**41)


@pytest.mark.parametrize(
    ("bits", "ranks", "dtype"),
    [
        (NARROW, MOST_RANKS, torch.float32),
        (WIDE, 256, torch.float32),
        (WIDE, MOST_RANKS, torch.float64),
    ],
)
def test_as_many_ranks_as_allowed_fill_the_limbs_and_stay_exact(bits, ranks, dtype):
    row = torch.full((LIMBS,), 2.0**bits - 1, dtype=dtype)
    largest = from_limbs(row.tolist(), bits)
    added = row * ranks  # partial sums are whole numbers: exact as long as the largest of them is
    assert added.tolist() == [(2**bits - 1) * ranks] * LIMBS
    assert added[0] - row[0] == (2**bits - 1) * (ranks - 1)
    assert from_limbs(added.tolist(), bits) == largest * ranks


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e30, -1e30, 1e300])
def test_what_is_not_finite_or_too_large_arrives_as_that(odd):
    added = sum(torch.tensor(to_limbs(_sum_of([v]), WIDE)) for v in (1.0, odd, 2.0))
    found = to_float(from_limbs(added.tolist(), WIDE))
    assert math.isnan(found) if math.isnan(odd) else found == math.copysign(math.inf, odd)


def test_infinities_of_both_signs_give_nan():
    assert math.isnan(_sum_of([math.inf, -math.inf]))
    limbs = [to_limbs(_sum_of([v]), WIDE) for v in (math.inf, -math.inf)]
    assert math.isnan(from_limbs([a + b for a, b in zip(*limbs, strict=True)], WIDE))


@given(
    st.lists(st.tuples(reals, reals, reals, st.booleans(), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_trailers_of_ranks_add_up(ranks, dtype):
    travelled = torch.zeros(trailer_numbers(1), dtype=dtype)
    for weight, loss, metric, stop, bad in ranks:
        mine = Trailer(1)
        for place, value in ((WEIGHT, weight), (LOSS, loss), (SUMS, metric)):
            mine.sums[place] += to_units(value)
        mine.flags[STOP], mine.flags[NON_FINITE] = int(stop), int(bad)
        travelled += torch.tensor(mine.numbers(WIDE), dtype=dtype)
    arrived = Trailer.from_numbers(travelled.tolist(), WIDE)
    weights, losses, metrics, stops, bads = zip(*ranks, strict=True)
    wanted = [_sum_of(weights), _sum_of(losses), 0, 0, _sum_of(metrics)]
    assert arrived.sums == wanted
    assert (arrived.flags[STOP], arrived.flags[NON_FINITE]) == (sum(stops), sum(bads))


@pytest.mark.parametrize(("bits", "reach"), [(WIDE, 96), (NARROW, 56)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_sum_reaches_up_to_its_bound_and_says_when_it_is_beyond(bits, reach, sign):
    below = sign * 2.0**reach * (1 - 2.0**-40)
    limbs = to_limbs(_sum_of([below]), bits)
    assert to_float(from_limbs(limbs, bits)) == below
    assert all(abs(limb) < 2**bits for limb in limbs)
    assert to_limbs(_sum_of([sign * 2.0**reach]), bits)[0] == sign * math.inf
