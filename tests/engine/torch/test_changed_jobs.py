"""What a job changes while it trains: which parameters train, modes of modules, its own state."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from orchestrator.errors import JobError, RunFolderError
from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.plan.split import assign
from tests.engine.torch.jobs import SAMPLES, Curve, engine_of
from tests.engine.torch.test_survival import SETTINGS, begun, go_on, train
from tests.engine.windows import run, window_of
from tests.refusals import refused

UPDATES = 6


class Changing(Curve):
    """Freezes, thaws, switches to evaluation mode and back, and saves what it counts."""

    def __init__(self):
        super().__init__()
        self.scale, self.center = 1.0, torch.zeros(3)

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return type(loss)(loss.total * self.scale, loss.weight, loss.metrics)

    def after_update(self, model, update):
        model[0].requires_grad_(update not in (1, 2))
        model[1].train(update not in (2, 3))
        model[3].bias.requires_grad_(update < 3)
        self.scale *= 0.9
        self.center += 1

    def state_dict(self):
        return {"scale": self.scale, "center": self.center}

    def load_state_dict(self, state):
        self.scale, self.center = state["scale"], state["center"].clone()


class LateFrozen(Curve):
    """Puts a batch norm, whose statistics are each rank's own, into evaluation mode, and back."""

    scale, center = 1.0, torch.zeros(0)

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def after_update(self, model, update):
        model[1].train(update not in (1, 2, 4))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("job", [Changing, LateFrozen])
def test_a_changing_job_stopped_at_any_update_ends_with_undisturbed_bits(job, ranks, tmp_path):
    split = assign([SAMPLES] if ranks == 1 else [14, 15, 0][:ranks], cap=6)

    def trained(group, stop):
        folder = tmp_path / str(stop)
        windows = [window_of(split, group.rank, update) for update in range(UPDATES)]
        engine = engine_of(job(), group)
        run(engine, windows[:stop])
        if stop < UPDATES:
            engine.check_replicas()
            if group.rank == 0:
                folder.mkdir()
                (folder / "extra.json").write_text(json.dumps(engine.save_state(folder)))
            engine.accumulator.close()
            group.barrier()
            engine = engine_of(job(), group)
            engine.load_state(folder, json.loads((folder / "extra.json").read_text()))
            run(engine, windows[stop:])
        engine.accumulator.close()
        return engine.weights_sha256(), engine._job.scale, engine._job.center.tolist()

    def all_stops(group):
        return [trained(group, stop) for stop in range(1, UPDATES + 1)]

    for results in run_in_threads(ranks, all_stops):
        assert len(set(map(str, results))) == 1


def test_survivors_and_newcomers_have_what_the_job_changed():
    engines = begun(4, lambda engine, rank: train(engine, range(2)), Changing)
    expected = begun(4, lambda engine, rank: train(engine, range(5)), Changing)[0]

    def then(group):
        # The last rank is new: it has applied nothing, and its model is as it was built.
        new = group.rank == 2
        engine = newcomer if new else engines[group.rank]
        return go_on(engine, group, 0 if new else 2)[1]

    newcomer = engine_of(Changing(), None, **SETTINGS)
    assert set(run_in_threads(3, then)) == {expected.weights_sha256()}
    assert newcomer._job.scale == expected._job.scale


def test_a_window_that_breaks_off_takes_its_changes_back(tmp_path):
    class Impatient(Changing):
        def loss(self, model, batch):
            model[1].eval()
            model[3].weight.requires_grad_(False)
            self.scale = 7.0
            return super().loss(model, batch)

    engine = engine_of(Impatient())
    [window] = [window_of(assign([SAMPLES], steps=2), 0, 0)]
    engine.begin_window(window)
    batches = engine.batches(window.micro_batches)
    engine.micro_step(next(batches), window.micro_batches[0])
    extra = engine.save_state(tmp_path)
    assert extra["modes"] == {}
    assert engine._job.scale == 1.0
    assert engine.model[1].training


def test_a_checkpoint_of_another_models_parts_is_refused(tmp_path):
    engine = engine_of(Changing())
    extra = engine.save_state(tmp_path)
    extra["modes"] = {"training": {"dropout": False}}
    with pytest.raises(RunFolderError, match="training=False of 'dropout'"):
        engine.load_state(tmp_path, extra)


class Numbered(torch.optim.SGD):
    """Keeps plain numbers in its state: for itself, and for each parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


def test_an_optimizer_with_plain_numbers_in_its_state_is_saved_and_survives(tmp_path):
    class Job(Curve):
        def optimizer(self, model):
            return Numbered(model.parameters(), 0.1)

    settings = {**SETTINGS, "optimizer": {}}
    engines = begun(4, lambda engine, rank: train(engine, range(2)), Job, settings)
    expected = begun(4, lambda engine, rank: train(engine, range(5)), Job, settings)[0]
    assert engines[0].memory_bytes()["optimizer"] == 0

    def then(group):
        engine = engine_of(Job(), None, **settings) if group.rank == 2 else engines[group.rank]
        digest = go_on(engine, group, 0 if group.rank == 2 else 2)[1]
        assert engine.accumulator.optimizer.state["steps"] == 5
        return digest

    assert set(run_in_threads(3, then)) == {expected.weights_sha256()}
    extra = json.loads(json.dumps(engines[0].save_state(tmp_path)))
    resumed = engine_of(Job(), None, **settings)
    resumed.load_state(tmp_path, extra)
    assert resumed.accumulator.optimizer.state["steps"] == 5


# ------------------------------------------------------------------ state of the job


class Counting(Curve):
    """Keeps state of many kinds on itself."""

    made = 0

    def __init__(self, kind):
        super().__init__(dropout=0.0)
        self.kind, self.calls, self.seen = kind, 0, [0.0]
        self.draws, self.center, self.lazy = random.Random(0), torch.zeros(2), None
        self.teacher = nn.Linear(2, 2)
        self.schedule = Schedule()
        self.count, self.numpy_draws = itertools.count(), np.random.RandomState(0)
        self.nested = {"weights": {"first": {"least": [0.0]}}}  # unchanged

    def model(self):
        self.net = super().model()  # the model itself is in the checkpoint
        return self.net

    def optimizer(self, model):
        self.own = torch.optim.SGD(model.parameters(), 0.1)
        return self.own

    def loss(self, model, batch):
        if self.lazy is None:
            self.lazy = torch.ones(3)
        if self.kind == "calls":
            self.calls += 1
        if self.kind == "draws":
            self.draws.random()
        if self.kind == "numpy_draws":
            self.numpy_draws.rand()
        if self.kind == "count":
            next(self.count)
        if self.kind == "made":
            Counting.made += 1
        return super().loss(model, batch)

    def after_update(self, model, update):
        if self.kind == "seen":
            self.seen.append(update)
        if self.kind == "center":
            self.center = self.center * 0.9 + 1
        if self.kind == "teacher":
            self.teacher.weight.lerp_(torch.ones(2, 2), 0.1)
        if self.kind == "schedule.beta":
            self.schedule.beta = update
        if self.kind == "dropout":
            next(layer for layer in model.modules() if isinstance(layer, nn.Dropout)).p = 0.5


class Schedule:
    def __init__(self):
        self.beta = 0.0


def _train(job):
    engine = engine_of(job, optimizer={})
    run(engine, [window_of(assign([SAMPLES], steps=2), 0, update) for update in range(4)])


@pytest.mark.parametrize(
    "kind",
    [
        "calls",
        "draws",
        "seen",
        "center",
        "teacher",
        "schedule.beta",
        "numpy_draws",
        "count",
        "made",
    ],
)
def test_state_on_the_job_that_changes_is_warned_of_by_name(kind):
    with pytest.warns(
        UserWarning, match=rf"^Counting\.{kind} changed during training.*current_run"
    ):
        _train(Counting(kind))


def test_numbers_changed_in_the_model_are_warned_of():
    with pytest.warns(UserWarning, match=r"after_update\(\) changed .*p of the model.*begin anew"):
        _train(Counting("dropout"))


class Warming(nn.Linear):
    """Counts its forwards in training, as people anneal a layer; `limit`: up to that number."""

    def __init__(self, limit, name):
        super().__init__(4, 1)
        setattr(self, name, 0)
        self.limit, self.name = limit, name

    def forward(self, x):
        setattr(self, self.name, min(getattr(self, self.name) + 1, self.limit))
        return super().forward(x)


@pytest.mark.parametrize("name", ["calls", "_calls"])
@pytest.mark.parametrize("limit", [1, 100])
def test_numbers_that_the_forward_counts_are_warned_of(limit, name, recwarn):
    class Job(Counting):
        def model(self):
            self.net = Warming(limit, name)
            return self.net

    _train(Job(""))
    texts = [str(warning.message) for warning in recwarn]
    assert any(f"the forward changes {name} of the model" in text for text in texts) == (limit > 1)


calls = 0


def test_counted_global_number_is_warned_of():
    class Job(Counting):
        def loss(self, model, batch):
            globals()["calls"] += 1
            return super().loss(model, batch)

    with pytest.warns(UserWarning, match=r"^tests\.\S+\.calls changed during training"):
        _train(Job(""))


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def zero(model):
    model.zero_grad(set_to_none=False)


@pytest.mark.parametrize(("act", "warns"), [(clip, True), (zero, False)])
def test_a_gradient_that_is_changed_after_the_step_is_warned_of(act, warns, recwarn):
    class Job(Counting):
        def after_update(self, model, update):
            act(model)

    _train(Job(""))
    texts = [str(warning.message) for warning in recwarn]
    assert sum("after_update() changed the gradient of" in text for text in texts) == warns


@pytest.mark.parametrize("frozen_on", [(0,), (1,), (0, 1)])
def test_a_layer_that_a_job_freezes_on_some_ranks_alone_is_refused_on_all(frozen_on):
    split = assign([14, 15], cap=6)

    def trained(group):
        job = LateFrozen()
        job.after_update = lambda model, update: model[1].train(
            not (update == 1 and group.rank in frozen_on)
        )
        engine = engine_of(job, group)
        run(engine, [window_of(split, group.rank, update) for update in range(3)])

    if len(frozen_on) == 2:
        run_in_threads(2, trained)
        return
    message = (
        rf"after_update\(\) differs between ranks.* 1 in evaluation mode on rank {frozen_on[0]}"
    )
    with pytest.raises(JobError, match=message):
        run_in_threads(2, trained)


def test_a_job_that_only_trains_is_not_warned_of():
    _train(Counting(""))


def test_half_of_a_jobs_methods_for_its_state_is_refused():
    class Half(Curve):
        def state_dict(self):
            return {}

    with refused(JobError, "Half state_dict() load_state_dict()"):
        engine_of(Half())


def test_state_of_the_job_that_differs_between_ranks_is_not_saved():
    def be(group):
        job = Changing()
        engine = engine_of(job, group)
        job.scale = 1.0 + (group.rank == 2)
        engine.check_replicas()

    with refused(JobError, "Changing.state_dict() rank 2"):
        run_in_threads(3, be)
