"""More rows of the table of usage-errors.md: habits from other loops, and arguments mixed up."""

import contextlib
import gc
import io
import warnings

import torch
import torch.distributed as dist
from torch import nn

from orchestrator import Accumulator, Loss, TorchGroup
from orchestrator.errors import ConfigError
from tests.docs.misuses import (
    accumulated,
    loss_of,
    misuse,
    net,
    on_two_ranks,
    one_process_group,
)


def updates(ours, model, number):
    """So many of them, of samples that differ from one to the next."""
    for update in range(number):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(update))
        ours.backward(Loss(model(x).square().sum(), weight=2))
        ours.boundary()


def with_dropout(group=None):
    torch.manual_seed(0)
    return accumulated(group, nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)))


# ------------------------------------------------------------------ habits


@misuse("a scheduler's `step()` in mid-window, or whatever else sets rates there")
def _():
    ours, model = accumulated()
    ours.optimizer._opt_called = True  # torch has a warning of its own, which counts its own steps
    scheduler = torch.optim.lr_scheduler.StepLR(ours.optimizer, 1)
    ours.backward(loss_of(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step()
    ours.boundary()


@misuse("`model.eval()` left on by one rank")
@on_two_ranks
def _(group):
    ours, model = with_dropout(group)
    model.train(mode=group.rank > 0)
    updates(ours, model, 1)


@misuse("micro-steps at the end that no `boundary()` followed (a warning, on stderr)")
def _():
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        ours, model = accumulated()
        updates(ours, model, 1)
        ours.backward(loss_of(model))
        del ours
        gc.collect()
    warnings.warn(told.getvalue(), stacklevel=1)


@misuse("`optimizer.state_dict()`, or loading one, with `shard_optimizer=True`")
@on_two_ranks
def _(group):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    ours = Accumulator(model, optimizer, group, shard_optimizer=True)
    updates(ours, model, 1)
    whole = optimizer.state_dict()
    ours.load_optimizer_state(whole)


@misuse("DistributedDataParallel around the model afterwards")
def _():
    with one_process_group():
        ours, model = accumulated()
        wrapped = nn.parallel.DistributedDataParallel(model)
        ours.backward(loss_of(wrapped))
        ours.boundary()


# ------------------------------------------------------------------ arguments


@misuse("torch's own group, without `TorchGroup.wrap()`")
def _():
    with one_process_group():
        accumulated(group=dist.group.WORLD)


@misuse("`TorchGroup.wrap(dist.group.WORLD)` before `init_process_group()`")
def _():
    TorchGroup.wrap(dist.group.WORLD)


@misuse("an optimizer, a class, a list of layers or a state dict in the model's place")
def _():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in (optimizer, nn.Linear, model.state_dict(), None):
        with contextlib.suppress(ConfigError):
            Accumulator(wrong, optimizer, TorchGroup.alone())
            raise AssertionError(f"accepted: {wrong}")
    Accumulator(list(model), optimizer, TorchGroup.alone())


@misuse('`metric_names="accuracy"`')
def _():
    accumulated(metric_names="accuracy")


@misuse("a learning rate below 0, or a text")
def _():
    ours, _ = accumulated()
    ours.begin_window(learning_rate=-0.1)
