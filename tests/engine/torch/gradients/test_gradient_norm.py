"""The one factor that averages, unscales and clips, and the norm that it takes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.engine.common.boundary.clipping import EPSILON, factor_for
from orchestrator.engine.torch.gradients.gradient_norm import GradientNorm

positive = st.floats(1e-6, 1e6)


@given(norm=positive, divisor=positive, clip=st.none() | positive)
def test_the_factor_averages_and_brings_the_average_under_the_clip(norm, divisor, clip):
    averaged, factor = factor_for(norm, divisor, clip)
    assert averaged == pytest.approx(norm / divisor)
    after = norm * factor  # what the optimizer sees
    if clip is None or averaged + EPSILON <= clip:
        assert after == pytest.approx(averaged)
    else:
        assert after == pytest.approx(clip * averaged / (averaged + EPSILON))
        assert after <= clip * (1 + 1e-12)


def test_it_agrees_with_the_framework_s_own_clipping():
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
    summed = 7 * torch.randn(50, dtype=torch.float64)
    parameter.grad = summed / 3
    theirs = torch.nn.utils.clip_grad_norm_([parameter], 0.5)
    averaged, factor = factor_for(float(summed.norm()), 3.0, 0.5)
    assert averaged == pytest.approx(float(theirs), rel=1e-14)
    assert torch.allclose(summed * factor, parameter.grad, rtol=1e-13, atol=0)


@given(sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=4))
def test_the_norm_is_that_of_all_pieces_together(sizes):
    generator = torch.Generator().manual_seed(sum(sizes))
    pieces = [torch.randn(size, generator=generator) for size in sizes]
    norm = GradientNorm()
    for piece in pieces:
        norm.add(piece)
    expected = math.sqrt(sum(float(p.double().square().sum()) for p in pieces))
    assert norm.value() == pytest.approx(expected, rel=1e-6)


def test_squares_that_overflow_do_not_make_a_finite_gradient_infinite():
    norm = GradientNorm()
    norm.add(torch.full((5000,), 1e30))
    norm.add(torch.tensor([3e38]))
    assert norm.value() == pytest.approx(math.hypot(1e30 * math.sqrt(5000), 3e38), rel=1e-6)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_number_that_is_not_finite_shows(odd):
    norm = GradientNorm()
    norm.add(torch.tensor([1.0, odd]))
    assert not math.isfinite(norm.value())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
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


def test_a_norm_of_nothing_is_zero_and_one_just_at_the_clip_is_left_alone():
    assert GradientNorm().value() == 0.0
    assert factor_for(4.0, 2.0, 2.0 + EPSILON) == (2.0, 0.5)
    assert factor_for(4.0, 2.0, 1.0)[1] < 0.25


def test_norms_of_chunks_are_added_up_in_float64_whatever_they_are_made_of():
    piece = torch.zeros(3 * 4096)
    piece[::4096] = 1.0
    norm = GradientNorm()
    norm.add(piece)
    assert norm.value() == pytest.approx(math.sqrt(3), rel=1e-15)
