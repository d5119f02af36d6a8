"""Whatever writes a gradient in mid-window, but a backward, is found: no step is taken on it."""

import pytest
import torch
from torch import nn

from orchestrator.engine.torch import Accumulator, Loss, TorchGroup
from orchestrator.errors import JobError


def _rebind(parameter):
    parameter.grad = parameter.grad + 0


def _other_memory(parameter):
    parameter.grad.data = parameter.grad * 0.5


def _copied(parameter):
    parameter.grad.copy_(torch.ones_like(parameter))


def _all_at_once(parameter):
    torch._foreach_mul_([parameter.grad], 0.5)


WRITES = {
    "another tensor": _rebind,
    "another memory": _other_memory,
    "in place": lambda parameter: parameter.grad.mul_(1.0),
    "copied": _copied,
    "zeros": lambda parameter: parameter.grad.zero_(),
    "foreach": _all_at_once,
}
REDUCTIONS = {
    "fast": ({}, {}),
    "reproducible": ({"reduction": "reproducible"}, {"leaves": 3}),
}


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def _update(reduction, after=None, write=None, number=0):
    """One window of three micro-steps; `write` is called after one of them."""
    more, window = REDUCTIONS[reduction]
    model = _model()
    ours = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), TorchGroup.alone(), **more
    )
    ours.begin_window(**window)
    for step in range(3):
        total = model(torch.full((2, 3), step + 1.0)).square().sum()
        ours.backward(Loss(total, 2), last=step == 2, leaf=step)
        if step == after:
            write(list(model.parameters())[number])
    ours.boundary()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_found_wherever_it_comes(reduction, after, write):
    for number in (0, 3):
        with pytest.raises(JobError, match="was written by something else than a backward"):
            _update(reduction, after, WRITES[write], number)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_to_forget_gradients_forgets_nothing(reduction, after):
    def forget(parameter):
        parameter.grad = None

    for ours, theirs in zip(_update(reduction, after, forget), _update(reduction), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_between_two_windows_are_anybodys():
    def train(write):
        model = _model()
        ours = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), TorchGroup.alone())
        for _ in range(2):
            ours.backward(Loss(model(torch.ones(2, 3)).sum(), 2), last=True)
            ours.boundary()
            for parameter in model.parameters() if write else ():
                WRITES[write](parameter)
        return [p.detach().clone() for p in model.parameters()]

    wanted = train(None)
    for write in WRITES:
        if write != "another memory":
            for ours, theirs in zip(train(write), wanted, strict=True):
                assert torch.equal(ours, theirs)
