"""One function for each row of the table of usage-errors.md: what was done, as a user would do it.

A case is named by the row's first column, and gives what it raised or warned of as a text.
"""

import contextlib
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from orchestrator import Accumulator, Loss, TorchGroup, run_in_threads
from orchestrator.errors import OrchestratorError

CASES = {}
GROUPS = []


def misuse(row):
    """Register the case for the row that begins with these words."""

    def register(case):
        assert row not in CASES, f"two cases for the row {row}"
        CASES[row] = case
        return case

    return register


def said(case):
    """The first line of what a case raises or warns of; "" when it is silent."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            case()
        except (OrchestratorError, ValueError, RuntimeError) as error:
            return str(error)
    return "\n".join(str(warning.message) for warning in caught)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def accumulated(group=None, model=None, **more):
    model = model or net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Accumulator(model, optimizer, group or TorchGroup.alone(), **more), model


def loss_of(model, samples=2):
    return Loss(model(torch.ones(samples, 4)).square().sum(), weight=samples)


@contextlib.contextmanager
def one_process_group():
    """Form torch's default group, which its own wrappers need, of this process alone.

    The group lives on: torch's destructor waits for the group's thread while it holds Python's
    lock, for which that thread may wait to release the last collective. That is a deadlock.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    GROUPS.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_two_ranks(function):
    """`function(group)` on two ranks, closing nothing: the first error is the one that counts."""
    return lambda: run_in_threads(2, function)


# ------------------------------------------------------------------ the order of calls


@misuse("`backward()` after the micro-step with `last=True`")
@on_two_ranks
def _(group):
    ours, model = accumulated(group)
    for _ in range(2 if group.rank == 0 else 1):
        ours.backward(loss_of(model), last=True)
    ours.boundary()


@misuse("`loss.backward()` by habit, then `boundary()`")
@on_two_ranks
def _(group):
    ours, model = accumulated(group)
    loss_of(model).total.backward()
    ours.boundary()


@misuse("`loss.backward()` by habit in mid-window")
def _():
    ours, model = accumulated()
    ours.backward(loss_of(model))
    loss_of(model).total.backward()
    ours.boundary()


@misuse("`loss.backward()` after the micro-step with `last=True`")
@on_two_ranks
def _(group):
    ours, model = accumulated(group)
    ours.backward(loss_of(model), last=True)
    loss_of(model).total.backward()


@misuse("`record()` of a backward that ran before `begin_window()`")
def _():
    ours, model = accumulated()
    loss = loss_of(model)
    loss.total.backward()
    ours.record(loss)


@misuse('`record()` with `reduction="reproducible"`')
def _():
    ours, model = accumulated(reduction="reproducible")
    ours.begin_window(leaves=1)
    loss = loss_of(model)
    loss.total.backward()
    ours.record(loss)


@misuse("`begin_window()` in mid-window")
def _():
    ours, model = accumulated()
    ours.backward(loss_of(model))
    ours.begin_window(expected_weight=4)


@misuse("`boundary()` without a micro-step on any rank")
@on_two_ranks
def _(group):
    ours, _ = accumulated(group)
    ours.boundary()


@misuse("going on after an error within a backward")
def _():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise MemoryError("no room")

    ours, model = accumulated()
    hidden = Fails.apply(model[0](torch.ones(2, 4)))
    with contextlib.suppress(MemoryError):  # and skip the batch
        ours.backward(Loss(model[2](hidden).sum(), 2))
    ours.backward(loss_of(model))


@misuse("going on after an error at one rank's boundary")
@on_two_ranks
def _(group):
    ours, model = accumulated(group)
    ours.backward(loss_of(model))
    if group.rank == 0:
        model[0].weight.detach().mul_(0.5)
        try:
            ours.boundary()
        except OrchestratorError:
            ours.begin_window()
    ours.boundary()


@misuse("more windows on one rank than on another")
@on_two_ranks
def _(group):
    ours, model = accumulated(group)
    for _ in range(2 + group.rank):
        ours.backward(loss_of(model), last=True)
        ours.boundary()


@misuse("a call from another thread, or a hook, while one runs")
def _():
    ours, model = accumulated()
    model[0].weight.register_hook(lambda _: ours.backward(loss_of(model)))
    ours.backward(loss_of(model))


@misuse("`optimizer.step()` by habit")
def _():
    ours, model = accumulated()
    ours.backward(loss_of(model))
    ours.optimizer.step()


@misuse("a call after `close()`")
def _():
    ours, model = accumulated()
    ours.close()
    ours.backward(loss_of(model))


# ------------------------------------------------------------------ what a loss is


@misuse("a plain tensor instead of `Loss`")
def _():
    ours, model = accumulated()
    ours.backward(cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1])))


@misuse("a mean, and the number of samples as its weight")
def _():
    ours, model = accumulated()
    scores = model(torch.ones(2, 4))
    ours.backward(Loss(cross_entropy(scores, torch.tensor([0, 1])), weight=2))


@misuse("a mean, divided by the number of micro-steps")
def _():
    ours, model = accumulated()
    ours.backward(Loss(model(torch.ones(2, 4)).mean() / 8, weight=2))


@misuse("a loss for each sample")
def _():
    ours, model = accumulated()
    ours.backward(Loss(model(torch.ones(2, 4)).sum(1), weight=2))


@misuse("a loss that was detached, or made under `torch.no_grad()`")
def _():
    ours, model = accumulated()
    with torch.no_grad():
        loss = loss_of(model)
    ours.backward(loss)


@misuse("a loss that is NaN")
@on_two_ranks
def _(group):
    ours, model = accumulated(group)
    loss = loss_of(model)
    ours.backward(Loss(loss.total * (float("nan") if group.rank else 1.0), 2))
    ours.boundary()


@misuse("a weight for each sample")
def _():
    ours, model = accumulated()
    ours.backward(Loss(loss_of(model).total, weight=torch.ones(2)))


@misuse("a loss that comes from another model")
@on_two_ranks
def _(group):
    ours, _ = accumulated(group)
    ours.backward(loss_of(net()), last=True)
    ours.boundary()


# ------------------------------------------------------------------ gradients


@misuse("`p.grad = p.grad + 0`, or another tensor in its place")
def _():
    ours, model = accumulated()
    ours.backward(loss_of(model))
    model[2].bias.grad = model[2].bias.grad + 0
    ours.boundary()


@misuse("`clip_grad_norm_()`, or whatever else writes gradients in mid-window")
def _():
    ours, model = accumulated()
    ours.backward(loss_of(model))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ours.backward(loss_of(model))


@misuse("`p.grad.data = ...`")
def _():
    ours, model = accumulated()
    ours.backward(loss_of(model))
    model[0].weight.grad.data = torch.zeros(5, 4)
    ours.boundary()


@misuse("gradients from `torch.func`, and `record()`")
def _():
    ours, model = accumulated()
    ours.begin_window()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.grad(
        lambda w: torch.func.functional_call(model, w, (torch.ones(2, 4),)).sum()
    )(weights)
    for name, parameter in model.named_parameters():
        parameter.grad = found[name]
    ours.record(loss_of(model))
    ours.boundary()


@misuse("`zero_grad(set_to_none=False)` in mid-window")
def _():
    ours, model = accumulated()
    ours.backward(loss_of(model))
    model.zero_grad(set_to_none=False)
    ours.boundary()


@misuse("`loss.backward(create_graph=True)`")
def _():
    ours, model = accumulated()
    ours.begin_window()
    loss = loss_of(model)
    torch.set_warn_always(True)  # a warning that torch gives once stays for whoever tests for it
    loss.total.backward(create_graph=True)
    torch.set_warn_always(False)
    ours.record(loss)
    ours.boundary()


# ------------------------------------------------------------------ models and optimizers


@misuse("two accumulators on one model")
def _():
    ours, model = accumulated()
    theirs, _ = accumulated(model=model)
    assert ours is not theirs


@misuse("weights changed in mid-window")
def _():
    ours, model = accumulated()
    ours.backward(loss_of(model))
    with torch.no_grad():
        model[0].weight.mul_(0.9)
    ours.boundary()


@misuse("ranks that start from other weights")
@on_two_ranks
def _(group):
    torch.manual_seed(group.rank)
    model = nn.Linear(4, 3)
    accumulated(group, model)


@misuse("ranks with another setting, optimizer or model")
@on_two_ranks
def _(group):
    accumulated(group, clip_norm=1.0 + group.rank)


@misuse("an optimizer of another model")
def _():
    Accumulator(net(), torch.optim.SGD(net().parameters(), lr=0.1), TorchGroup.alone())


@misuse("an optimizer that lacks some parameters")
def _():
    model = net()
    Accumulator(model, torch.optim.SGD(model[2].parameters(), lr=0.1), TorchGroup.alone())


@misuse("several optimizers")
def _():
    model = net()
    both = {part: torch.optim.SGD(model[int(part)].parameters(), lr=0.1) for part in "02"}
    Accumulator(model, both, TorchGroup.alone())


@misuse("a model in DistributedDataParallel")
def _():
    with one_process_group():
        accumulated(model=nn.parallel.DistributedDataParallel(net()))


@misuse("DTensors that no `fully_shard` made")
def _():
    from torch.distributed.tensor import distribute_module

    with one_process_group():
        accumulated(model=distribute_module(net(), init_device_mesh("cpu", (1,))))


@misuse('`reduction="reproducible"` for a model in FSDP2')
def _():
    from torch.distributed.fsdp import fully_shard

    with one_process_group():
        model = fully_shard(net(), mesh=init_device_mesh("cpu", (1,)))
        accumulated(model=model, reduction="reproducible")


@misuse("a lazy layer that was not called yet")
def _():
    accumulated(model=nn.Sequential(nn.LazyLinear(3)))


@misuse("a model on the meta device")
def _():
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    accumulated(model=model)


@misuse("batch norm in training mode (a warning)")
def _():
    accumulated(model=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))


@misuse("batch norm set to training mode later (a warning)")
def _():
    ours, model = accumulated(model=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval())
    model.train()
    ours.begin_window()


@misuse("a parameter that was unfrozen later")
def _():
    model = net()
    model[0].requires_grad_(requires_grad=False)
    ours, _ = accumulated(model=model)
    model[0].requires_grad_()
    ours.begin_window()


@misuse("ranks with another `expected_weight`, learning rate or number of the update")
@on_two_ranks
def _(group):
    ours, model = accumulated(group)
    ours.begin_window(expected_weight=2 + group.rank)
    ours.backward(loss_of(model))
    ours.boundary()


@misuse("parameters frozen later on one rank only")
@on_two_ranks
def _(group):
    ours, model = accumulated(group)
    model[0].requires_grad_(requires_grad=group.rank == 0)
    ours.backward(loss_of(model))
    ours.boundary()


@misuse("weights changed between windows on one rank only")
@on_two_ranks
def _(group):
    ours, model = accumulated(group)
    ours.backward(loss_of(model), last=True)
    ours.boundary()
    model[0].weight.data.mul_(1.0 + group.rank)
    ours.backward(loss_of(model), last=True)
    ours.boundary()


@misuse('leaves told on one rank only (`reduction="reproducible"`)')
@on_two_ranks
def _(group):
    ours, model = accumulated(group, reduction="reproducible")
    ours.begin_window(leaves=2 if group.rank == 0 else None)
    ours.backward(loss_of(model), leaf=0 if group.rank == 0 else None)
    ours.boundary()


@misuse("a leaf that two ranks computed")
@on_two_ranks
def _(group):
    ours, model = accumulated(group, reduction="reproducible")
    ours.begin_window(leaves=2)
    ours.backward(loss_of(model), leaf=0)
    ours.boundary()


@misuse("`leaf=` without `leaves=`")
def _():
    ours, model = accumulated(reduction="reproducible")
    ours.backward(loss_of(model), leaf=0)
