"""One loss scale a window, taken out once, agreed on when it overflows."""

import math

import pytest
import torch
from torch import nn

from orchestrator.engine.common.boundary.clipping import factor_for
from orchestrator.engine.common.boundary.loss_scale import FIRST_SCALE, GROW_AFTER
from orchestrator.engine.torch import Accumulator, Loss, TorchGroup, run_in_threads
from orchestrator.engine.torch.gradients.gradient_norm import GradientNorm
from orchestrator.engine.torch.model.precision import Precision
from orchestrator.errors import NonFiniteError


def _train(group, precision, updates=3, boom=None, policy="stop"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = Accumulator(
        model, optimizer, group, precision=precision, clip_norm=1.0, on_non_finite=policy
    )
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True).sin()
    reports = []
    for update in range(updates):
        for step in range(2):
            here = slice(6 * step + 3 * group.rank, 6 * step + 3 * group.rank + 3)
            with ours.precision.forward():
                total = ((model(x[here]) - y[here]).float() ** 2).sum()
            if boom == (update, group.rank):
                total = total * 1e9  # finite, but not its gradient as float16
            ours.backward(Loss(total, 3), last=step == 1)
        reports.append(ours.boundary())
    ours.close()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), reports


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_autocast_trains_nearly_as_float32_does(precision, tolerance):
    wanted, _ = run_in_threads(2, lambda group: _train(group, "float32"))[0]
    results = run_in_threads(2, lambda group: _train(group, precision))
    for found, reports in results:
        assert torch.equal(found, results[0][0])
        assert all(report.applied for report in reports)
        assert {r.loss_scale for r in reports} == {FIRST_SCALE if precision == "float16" else 1.0}
        difference = float((found - wanted).abs().max() / wanted.abs().max())
        assert 0 < difference < tolerance


def test_the_scale_changes_no_bit_of_a_float32_forward():
    """It is a power of two; so only where the forward is float16 can the result differ."""

    def train(scale):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        ours = Accumulator(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            TorchGroup.alone(),
            precision="float16",
        )
        ours.precision.load({"scale": scale, "calm": 0})
        ours.backward(Loss(model(torch.ones(3, 4)).square().sum(), 3), last=True)
        ours.boundary()
        return model.weight.detach()

    assert torch.equal(train(1.0), train(FIRST_SCALE))


def test_an_overflow_on_one_rank_skips_the_window_on_all_and_halves_the_scale():
    results = run_in_threads(2, lambda group: _train(group, "float16", boom=(1, 1)))
    clean = run_in_threads(2, lambda group: _train(group, "float16", updates=1))
    for found, reports in results:
        assert torch.equal(found, results[0][0])
        assert [report.applied for report in reports] == [True, False, True]
        scales = [report.loss_scale for report in reports]
        assert scales == [FIRST_SCALE, FIRST_SCALE, FIRST_SCALE / 2]
        assert math.isfinite(reports[1].loss)
    skipped = run_in_threads(2, lambda group: _train(group, "float16", updates=2, boom=(1, 1)))
    assert torch.equal(skipped[0][0], clean[0][0])


def test_a_gradient_that_stays_infinite_at_scale_1_stops_the_run():
    precision = Precision("float16", torch.device("cpu"))
    for _ in range(40):
        precision.overflowed()
    assert precision.scale == 1.0
    assert not precision.may_overflow

    def train(group):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)  # the same on both ranks
        nn.init.zeros_(model.bias)
        ours = Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.1), group, precision="float16"
        )
        ours.precision.load({"scale": 1.0, "calm": 0})
        ours.backward(Loss((model(torch.zeros(1, 1)) * 0).sqrt().sum(), 1), last=True)
        with pytest.raises(NonFiniteError):
            ours.boundary()
        ours.close()

    run_in_threads(2, train)


def test_the_scale_grows_after_many_calm_windows_and_is_saved():
    precision = Precision("float16", torch.device("cpu"))
    for _ in range(GROW_AFTER):
        precision.succeeded()
    assert precision.scale == 2 * FIRST_SCALE
    precision.succeeded()
    other = Precision("float16", torch.device("cpu"))
    other.load(precision.state())
    assert other.state() == precision.state() == {"scale": 2 * FIRST_SCALE, "calm": 1}


def norm_of(pieces):
    norm = GradientNorm()
    for piece in pieces:
        norm.add(piece)
    return norm.value()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 100_000])
def test_the_norm_is_that_of_float64(dtype, size):
    gradient = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(0))
    wanted = float(torch.linalg.vector_norm(gradient.double()))
    assert norm_of([gradient, gradient[:0]]) == pytest.approx(wanted, rel=2e-7)


def test_the_norm_survives_squares_that_overflow_but_not_infinities():
    assert norm_of([torch.full((4,), 1e30)]) == pytest.approx(2e30)
    assert norm_of([torch.full((4,), 1e200, dtype=torch.float64)]) == pytest.approx(2e200)
    assert norm_of([torch.tensor([1.0, math.inf])]) == math.inf
    assert math.isnan(norm_of([torch.tensor([1.0, math.nan])]))


def test_clipping_is_that_of_torch():
    gradient = torch.tensor([3.0, 4.0])
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    found, factor = factor_for(10 * float(norm), 10.0, 1.0)
    assert found == pytest.approx(float(norm))
    torch.testing.assert_close(gradient * 10 * factor, parameter.grad)
