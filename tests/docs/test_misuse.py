"""Mistakes with an accumulator or `run.windows`, as users make them, and the message about each.

A case is named by the first column of its row in usage-errors.md.
"""

import contextlib
import gc
import inspect
import io
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from orchestrator import Accumulator, Loss, TorchGroup, run_in_threads
from orchestrator.client.run import Run
from orchestrator.errors import ConfigError, OrchestratorError
from tests.docs.scripts import table

ROWS = dict(table(Path(__file__).with_name("usage-errors.md").read_text(), "what was done"))
CASES = {}
BATCH = {"global_batch": 8, "micro_batch": 2, "updates": 3}
GROUPS = []


def misuse(row, ranks=1):
    """Register the case for the row that begins with these words.

    A case on two ranks closes nothing: the first error is the one that counts. It may take the
    rank's `group`, an accumulator `ours` of a `model`, and the `windows` of a loop without a run.
    """

    def register(case):
        assert row not in CASES, f"two cases for the row {row}"
        wanted = inspect.signature(case).parameters

        def on_rank(group):
            given = {"group": group}
            if not wanted.keys() <= given.keys():
                given["ours"], given["model"] = accumulated(group)
            if "windows" in wanted:
                given["windows"] = Run({}).windows(24, given["ours"], **BATCH)
            case(**{name: given[name] for name in wanted})

        alone = ranks == 1
        CASES[row] = lambda: on_rank(TorchGroup.alone()) if alone else run_in_threads(2, on_rank)
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


# ------------------------------------------------------------------ the order of calls


@misuse("`backward()` after the micro-step with `last=True`", ranks=2)
def _(ours, model, group):
    for _ in range(2 if group.rank == 0 else 1):
        ours.backward(loss_of(model), last=True)
    ours.boundary()


@misuse("`loss.backward()` by habit, then `boundary()`", ranks=2)
def _(ours, model):
    loss_of(model).total.backward()
    ours.boundary()


@misuse("`loss.backward()` by habit in mid-window")
def _(ours, model):
    ours.backward(loss_of(model))
    loss_of(model).total.backward()
    ours.boundary()


@misuse("`record()` of a backward that ran before `begin_window()`")
def _(ours, model):
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
def _(ours, model):
    ours.backward(loss_of(model))
    ours.begin_window(expected_weight=4)


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


@misuse("going on after an error at one rank's boundary", ranks=2)
def _(ours, model, group):
    ours.backward(loss_of(model))
    if group.rank == 0:
        model[0].weight.detach().mul_(0.5)
        try:
            ours.boundary()
        except OrchestratorError:
            ours.begin_window()
    ours.boundary()


@misuse("going on after an error of one rank's optimizer", ranks=2)
def _(ours, model, group):
    def fail(*_):
        raise MemoryError("no room")

    ours.backward(loss_of(model))
    if group.rank == 0:
        hook = ours.optimizer.register_step_pre_hook(fail)
        with contextlib.suppress(MemoryError):
            ours.boundary()
        hook.remove()
        ours.backward(loss_of(model))
    ours.boundary()


@misuse("more windows on one rank than on another", ranks=2)
def _(ours, model, group):
    for _ in range(2 + group.rank):
        ours.backward(loss_of(model), last=True)
        ours.boundary()


@misuse("a call from another thread, or a hook, while one runs")
def _(ours, model):
    model[0].weight.register_hook(lambda _: ours.backward(loss_of(model)))
    ours.backward(loss_of(model))


@misuse("`optimizer.step()` by habit")
def _(ours, model):
    ours.backward(loss_of(model))
    ours.optimizer.step()


@misuse("a call after `close()`")
def _(ours, model):
    ours.close()
    ours.backward(loss_of(model))


# ------------------------------------------------------------------ what a loss is


@misuse("a mean, and the number of samples as its weight")
def _(ours, model):
    scores = model(torch.ones(2, 4))
    ours.backward(Loss(cross_entropy(scores, torch.tensor([0, 1])), weight=2))


@misuse("a mean, divided by the number of micro-steps")
def _(ours, model):
    ours.backward(Loss(model(torch.ones(2, 4)).mean() / 8, weight=2))


@misuse("a loss that was detached, or made under `torch.no_grad()`")
def _(ours, model):
    with torch.no_grad():
        loss = loss_of(model)
    ours.backward(loss)


@misuse("a loss that is NaN", ranks=2)
def _(ours, model, group):
    loss = loss_of(model)
    ours.backward(Loss(loss.total * (float("nan") if group.rank else 1.0), 2))
    ours.boundary()


@misuse("a loss that comes from another model", ranks=2)
def _(ours):
    ours.backward(loss_of(net()), last=True)
    ours.boundary()


# ------------------------------------------------------------------ gradients


@misuse("`clip_grad_norm_()`, or whatever else writes gradients in mid-window")
def _(ours, model):
    ours.backward(loss_of(model))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ours.backward(loss_of(model))


@misuse("gradients from `torch.func`, and `record()`")
def _(ours, model):
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
def _(ours, model):
    ours.backward(loss_of(model))
    model.zero_grad(set_to_none=False)
    ours.boundary()


@misuse("`loss.backward(create_graph=True)`")
def _(ours, model):
    ours.begin_window()
    loss = loss_of(model)
    torch.set_warn_always(True)  # a warning that torch gives once stays for tests of it
    loss.total.backward(create_graph=True)
    torch.set_warn_always(False)
    ours.record(loss)
    ours.boundary()


# ------------------------------------------------------------------ models and optimizers


@misuse("weights changed in mid-window")
def _(ours, model):
    ours.backward(loss_of(model))
    with torch.no_grad():
        model[0].weight.mul_(0.9)
    ours.boundary()


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


@misuse("`add_param_group()` between windows")
def _():
    ours, _ = accumulated()
    ours.optimizer.add_param_group({"params": net().parameters()})
    ours.begin_window(learning_rate=0.1)


@misuse("`add_param_group()` in mid-window")
def _():
    ours, model = accumulated()
    ours.backward(loss_of(model))
    ours.optimizer.add_param_group({"params": net().parameters()})
    ours.boundary()


@misuse("ranks with another `expected_weight`, learning rate or number of the update", ranks=2)
def _(ours, model, group):
    ours.begin_window(expected_weight=2 + group.rank)
    ours.backward(loss_of(model))
    ours.boundary()


@misuse("`leaf=` without `leaves=`")
def _():
    ours, model = accumulated(reduction="reproducible")
    ours.backward(loss_of(model), leaf=0)


def updates(ours, model, number):
    """So many of them, of samples that differ from one to the next."""
    for update in range(number):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(update))
        ours.backward(Loss(model(x).square().sum(), weight=2))
        ours.boundary()


# ------------------------------------------------------------------ habits


@misuse("`model.eval()` left on by one rank", ranks=2)
def _(group):
    torch.manual_seed(0)
    layers = nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)
    ours, model = accumulated(group, nn.Sequential(*layers))
    model.train(mode=group.rank > 0)
    updates(ours, model, 1)


@misuse("micro-steps at the end that no `boundary()` followed (a warning, on stderr)")
def _():
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        ours, model = accumulated()
        updates(ours, model, 1)
        ours.backward(loss_of(model))
        del ours
        gc.collect()
    warnings.warn(stderr.getvalue(), stacklevel=1)


@misuse("`optimizer.state_dict()`, or loading one, with `shard_optimizer=True`", ranks=2)
def _(group):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    ours = Accumulator(model, optimizer, group, shard_optimizer=True)
    updates(ours, model, 1)
    whole = optimizer.state_dict()
    ours.load_optimizer_state(whole)


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
def _(ours):
    ours.begin_window(learning_rate=-0.1)


# ------------------------------------------------------------------ run.windows


def begun(group=None, samples=24, **options):
    """(the windows, the accumulator, its model) of a loop without a run."""
    ours, model = accumulated(group)
    return Run({}).windows(samples, ours, **{**BATCH, **options}), ours, model


def whole(window, ours, model, without=None):
    """A window as it should be, but for the micro-batch of this number."""
    for number, piece in enumerate(window):
        if number != without:
            ours.backward(loss_of(model, len(piece)))
    ours.boundary()


@misuse("`continue` before `backward()`: a micro-batch that is skipped")
def _(windows, ours, model):
    for window in windows:
        whole(window, ours, model, without=1)


@misuse("`break` within a window, then `boundary()`")
def _(windows, ours, model):
    for window in windows:
        for piece in window:
            ours.backward(loss_of(model, len(piece)))
            break
        ours.boundary()


@misuse("no `boundary()` at a window's end")
def _(windows, ours, model):
    for window in windows:
        for piece in window:
            ours.backward(loss_of(model, len(piece)))


@misuse("`backward()` twice for a micro-batch")
def _(windows, ours, model):
    for window in windows:
        for piece in window:
            ours.backward(loss_of(model, len(piece)))
            ours.backward(loss_of(model, len(piece)))


@misuse("`backward()` or `boundary()` before, between or after the windows")
def _(windows, ours, model):
    for window in windows:
        whole(window, ours, model)
        ours.backward(loss_of(model))


@misuse("`begin_window()` within `run.windows()`")
def _(windows, ours):
    for _window in windows:
        ours.begin_window()


@misuse("another `last=` or `leaf=` than the plan's")
def _(windows, ours, model):
    for window in windows:
        for piece in window:
            ours.backward(loss_of(model, len(piece)), last=True)


@misuse("the loop left in mid-window, or before its end (a warning)")
def _(windows, ours, model):
    for window in windows:
        for piece in window:
            ours.backward(loss_of(model, len(piece)))
        break


@misuse("an epoch loop around `run.windows()`")
def _(ours, model):
    run = Run({})
    for _epoch in range(2):
        for window in run.windows(24, ours, **BATCH):
            whole(window, ours, model)


@misuse("going through the same windows twice")
def _(windows, ours, model):
    for _epoch in range(2):
        for window in windows:
            whole(window, ours, model)


@misuse("`run.report()`, `should_stop()` or `save_done()` within the loop")
def _():
    run = Run({})
    ours, model = accumulated()
    for window in run.windows(24, ours, **BATCH):
        whole(window, ours, model)
        run.should_stop(window.update)


@misuse("ranks with another length, batch, number of updates or seed", ranks=2)
def _(group):
    begun(group, global_batch=8 + group.rank)


@misuse("numbers of the batch that do not agree")
def _():
    begun(steps=3)


@misuse("a data set in the place of its length, a text, 0")
def _():
    begun(samples=torch.utils.data.TensorDataset(torch.ones(3)))


@misuse("an option misspelt")
def _():
    try:
        begun(globl_batch=8)
    except TypeError as error:
        raise ValueError(error) from error


@misuse("no accumulator yet, or several and none named")
def _():
    kept = [accumulated(), accumulated()]
    assert len(kept) == 2
    Run({}).windows(24, **BATCH)


@misuse("`init_process_group()` forgotten under a launcher")
def _():
    os.environ["WORLD_SIZE"] = "3"
    try:
        model = nn.Linear(4, 3)
        Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        del os.environ["WORLD_SIZE"]


@misuse("`TorchGroup.alone()` on each of several ranks of a run")
def _():
    ours, _ = accumulated(TorchGroup.alone())
    variables = {"ORCHESTRATOR_RUN": "/nowhere", "ORCHESTRATOR_WORLD_SIZE": "4"}
    Run(variables).windows(24, ours, **BATCH)


@misuse("`state=` without `state_dict()`")
def _():
    begun(state={"epoch": 3})


@misuse("a window kept from before")
def _(windows, ours, model):
    kept = []
    for window in windows:
        kept.append(window)
        for _piece in kept[0]:
            ours.backward(Loss(loss_of(model).total, weight=2))
        ours.boundary()


def test_every_misuse_has_its_row_and_every_row_its_misuse():
    assert ROWS.keys() == CASES.keys()


@pytest.mark.parametrize("row", ROWS)
def test_what_the_table_says_is_said(row):
    words = [part.strip() for part in ROWS[row].strip("`").split("…")]
    found = said(CASES[row])
    assert re.search(".*".join(map(re.escape, words)), found, re.DOTALL), found
