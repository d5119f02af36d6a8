"""Work around a micro-step, counted: calls of functions, operations of torch, versions of tensors.

`benchmarks overhead` measures the time of these counts, which hangs on the machine.
"""

import sys
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss, current_run
from orchestrator.engine.torch import buffers, model_watch
from tests.engine.torch.jobs import engine_of, sgd_accumulator
from tests.engine.windows import make_window

ROWS = torch.ones(2, 4)
WINDOWS = 3
"""Only the last one is counted: in the first ones jobs are looked at more closely."""


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def loss_of(module, rows):
    return Loss(module(rows).square().sum(), len(rows))


class Squares(Job):
    def model(self):
        return model()

    def dataset(self):
        return TensorDataset(torch.ones(64, 4))

    def loss(self, model, batch):
        return loss_of(model, batch[0])


# ------------------------------------------------------------------ Loops, counted within `counted`


def by_hand(steps, counted):
    module = model()
    module(ROWS).sum().backward()  # creates the gradients
    with counted:
        for _ in range(steps):
            loss_of(module, ROWS).total.backward()


def with_accumulator(steps, counted):
    module = model()
    accumulator = sgd_accumulator(module)
    accumulator.begin_window()
    with counted:
        for step in range(steps):
            accumulator.backward(loss_of(module, ROWS), last=step == steps - 1)
    accumulator.boundary()


def in_windows(steps, counted):
    module = model()
    accumulator = sgd_accumulator(module)
    batch = {"global_batch": 2 * steps, "micro_batch": 2, "updates": 1}
    for window in current_run.windows(64, accumulator, **batch):
        with counted:
            for _ in window:
                accumulator.backward(loss_of(module, ROWS))
        accumulator.boundary()


def of_a_job(steps, counted):
    engine = engine_of(Squares())
    windows = [
        make_window(update, [(2 * step, 2) for step in range(steps)]) for update in range(WINDOWS)
    ]
    batches = engine.batches(step for window in windows for step in window.micro_batches)
    for window in windows:
        engine.begin_window(window)
        with counted if window is windows[-1] else nullcontext():
            for micro_batch in window.micro_batches:
                engine.micro_step(next(batches), micro_batch)
        engine.boundary()


LOOPS = {
    "accumulator": with_accumulator,
    "run.windows": in_windows,
    "job class": of_a_job,
}


# ------------------------------------------------------------------ Counts of a micro-step


class Calls(Counter):
    """Calls of Python's and of built-in functions in this thread, within it."""

    def __enter__(self):
        sys.setprofile(lambda _, event, __: self.update([event]))
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


class Operations(TorchDispatchMode):
    """Operations of torch by name, those of backwards too, within it."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function.name().removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


def of_a_micro_step(count):
    """Return what each micro-step adds to the counts of a window; `count` takes its steps."""
    few, many = count(4), count(16)
    return {name: (many[name] - few[name]) / 12 for name in many if many[name] != few[name]}


def operations(loop):
    def count(steps):
        counted = Operations()
        loop(steps, counted)
        return counted.names

    return Counter(of_a_micro_step(count))


def test_a_micro_step_has_the_operations_of_one_by_hand_and_a_copy_of_its_loss():
    plain, copied = operations(by_hand), {"detach": 1, "clone": 1}
    assert plain["add_.Tensor"] == 6, "gradients of six parameters"
    assert operations(with_accumulator) - plain == copied
    assert plain - operations(with_accumulator) == {}
    # Its factor takes the place of the 1 that a backward begins with.
    assert operations(in_windows) - plain == {**copied, "full_like": 1}
    assert plain - operations(in_windows) == {"ones_like": 1}
    rows_of_samples = {"lift_fresh": 1, "index.Tensor": 1}
    assert operations(of_a_job) - plain == {**copied, "full_like": 1, **rows_of_samples}


@pytest.mark.parametrize(
    ("loop", "python", "built_in"),
    [("accumulator", 28, 25), ("run.windows", 52, 48), ("job class", 64, 56)],
)
def test_a_micro_step_calls_few_functions(loop, python, built_in):
    def count(steps):
        counted = Calls()
        LOOPS[loop](steps, counted)
        return counted

    def count_by_hand(steps):
        counted = Calls()
        by_hand(steps, counted)
        return counted

    added = Counter(of_a_micro_step(count))
    added.subtract(of_a_micro_step(count_by_hand))
    assert 6 <= added["call"] <= python, added
    assert 6 <= added["c_call"] <= built_in, added


def test_updates_after_the_first_ones_run_no_watch():
    engine, files, watched = engine_of(Squares()), Counter(), []
    windows = [make_window(update, [(0, 2)]) for update in range(WINDOWS + 2)]
    batches = engine.batches(window.micro_batches[0] for window in windows)
    for window in windows:
        files.clear()
        sys.setprofile(lambda frame, *_: files.update([frame.f_code.co_filename]))
        try:
            engine.begin_window(window)
            engine.micro_step(next(batches), window.micro_batches[0])
            engine.boundary()
        finally:
            sys.setprofile(None)
        watched.append(model_watch.__file__ in files)
    assert watched == [True] * WINDOWS + [False] * 2


@pytest.mark.parametrize("loop", LOOPS)
def test_versions_of_gradients_are_read_once_a_micro_step(loop, monkeypatch):
    read = Counter()

    def counting(tensor):
        read["tensors"] += 1
        return tensor._version

    monkeypatch.setattr(buffers, "version_of", counting)

    def count(steps):
        read.clear()
        LOOPS[loop](steps, nullcontext())
        return Counter(read)

    windows = WINDOWS if loop == "job class" else 1
    assert of_a_micro_step(count) == {"tensors": 6 * windows}
