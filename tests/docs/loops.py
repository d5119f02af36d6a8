"""Rows of the table of usage-errors.md about `run.windows`: what a loop can do wrong."""

import os
import tempfile

import torch
from torch import nn

from orchestrator import Accumulator, Loss, TorchGroup
from orchestrator.client.run import Run
from tests.docs.misuses import accumulated, loss_of, misuse, on_two_ranks

BATCH = {"global_batch": 8, "micro_batch": 2, "updates": 3}


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
def _():
    windows, ours, model = begun()
    for window in windows:
        whole(window, ours, model, without=1)


@misuse("the last micro-batch skipped")
def _():
    windows, ours, model = begun()
    for window in windows:
        whole(window, ours, model, without=len(window) - 1)


@misuse("`break` within a window, then `boundary()`")
def _():
    windows, ours, model = begun()
    for window in windows:
        for piece in window:
            ours.backward(loss_of(model, len(piece)))
            break
        ours.boundary()


@misuse("no `boundary()` at a window's end")
def _():
    windows, ours, model = begun()
    for window in windows:
        for piece in window:
            ours.backward(loss_of(model, len(piece)))


@misuse("`backward()` twice for a micro-batch")
def _():
    windows, ours, model = begun()
    for window in windows:
        for piece in window:
            ours.backward(loss_of(model, len(piece)))
            ours.backward(loss_of(model, len(piece)))


@misuse("`backward()` without taking a micro-batch")
def _():
    windows, ours, model = begun()
    for _window in windows:
        ours.backward(loss_of(model))


@misuse("`backward()` or `boundary()` before, between or after the windows")
def _():
    windows, ours, model = begun()
    for window in windows:
        whole(window, ours, model)
        ours.backward(loss_of(model))


@misuse("`boundary()` twice")
def _():
    windows, ours, model = begun()
    for window in windows:
        whole(window, ours, model)
        ours.boundary()


@misuse("`begin_window()` within `run.windows()`")
def _():
    windows, ours, _ = begun()
    for _window in windows:
        ours.begin_window()


@misuse("another `last=` or `leaf=` than the plan's")
def _():
    windows, ours, model = begun()
    for window in windows:
        for piece in window:
            ours.backward(loss_of(model, len(piece)), last=True)


@misuse("the loop left in mid-window, or before its end (a warning)")
def _():
    windows, ours, model = begun()
    for window in windows:
        for piece in window:
            ours.backward(loss_of(model, len(piece)))
        break


@misuse("an epoch loop around `run.windows()`")
def _():
    ours, model = accumulated()
    run = Run({})
    for _epoch in range(2):
        for window in run.windows(24, ours, **BATCH):
            whole(window, ours, model)


@misuse("`run.windows()` within the loop over the first")
def _():
    run = Run({})
    ours, _ = accumulated()
    theirs, _ = accumulated()
    for _window in run.windows(24, ours, **BATCH):
        run.windows(24, theirs, **BATCH)


@misuse("going through the same windows twice")
def _():
    windows, ours, model = begun()
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


@misuse("ranks with another length, batch, number of updates or seed")
@on_two_ranks
def _(group):
    begun(group, global_batch=8 + group.rank)


@misuse("ranks that keep windows of other updates (`first=`)")
@on_two_ranks
def _(group):
    begun(group, first=group.rank)


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


@misuse("going on with another global batch, length, order or seed")
def _():
    with tempfile.TemporaryDirectory() as folder:
        windows, ours, model = begun(checkpoints=folder)
        for window in windows:
            whole(window, ours, model)
        begun(checkpoints=folder, global_batch=6)


@misuse("fewer updates than are done")
def _():
    begun(first=4)


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
    told = {"ORCHESTRATOR_RUN": "/nowhere", "ORCHESTRATOR_WORLD_SIZE": "4"}
    Run(told).windows(24, ours, **BATCH)


@misuse("`state=` without `state_dict()`")
def _():
    begun(state={"epoch": 3})


@misuse("a window kept from before")
def _():
    windows, ours, model = begun()
    kept = []
    for window in windows:
        kept.append(window)
        for _piece in kept[0]:
            ours.backward(Loss(loss_of(model).total, weight=2))
        ours.boundary()
