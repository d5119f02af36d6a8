"""Losses that are no sums over samples, and random numbers that depend on the split."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from orchestrator import Job, Loss
from orchestrator.engine.torch import sum_probe
from orchestrator.errors import JobError
from tests.engine.torch.jobs import engine_of
from tests.engine.windows import compute, make_window
from tests.refusals import refused


class Base(Job):
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def dataset(self):
        made = torch.Generator().manual_seed(1)
        x = torch.randn(9, 3, generator=made)
        return [(x[i], x[i].sum(), i % 3 + 1) for i in range(len(x))]

    def error(self, model, batch):
        x, y, _ = batch
        return model(x).squeeze(1) - y

    def loss(self, model, batch):
        return Loss((self.error(model, batch) ** 2).sum(), weight=len(batch[1]))


class Weighted(Base):
    def loss(self, model, batch):
        error = self.error(model, batch)
        return Loss((batch[2] * error**2).sum(), weight=batch[2].sum())


class Noisy(Base):
    def loss(self, model, batch):
        error = self.error(model, batch)
        return Loss(((error + torch.randn_like(error)) ** 2).sum(), weight=len(error))


class Padded(Base):
    def dataset(self):
        return [torch.full((length,), length) for length in (1, 4, 2, 5, 3)]

    def collate(self, samples):
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def model(self):
        return nn.Embedding(9, 1)

    def loss(self, model, batch):
        kept = batch != 0
        return Loss((model(batch).squeeze(2) * kept).sum(), weight=kept.sum())


class Penalty(Base):
    def loss(self, model, batch):
        x = batch[0].requires_grad_()
        [slope] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return Loss((slope**2).sum(), weight=len(x))


class Quadratic(Base):
    def loss(self, model, batch):
        return Loss(self.error(model, batch).sum() ** 2, weight=len(batch[1]))


class MeanOfMeans(Base):
    def loss(self, model, batch):
        error = self.error(model, batch)
        return Loss((error**2).sum() / len(error), weight=1)


class PaddingCounts(Padded):
    def loss(self, model, batch):
        return Loss(model(batch).sum(), weight=batch.numel())


class Accepted(Quadratic):
    batch_dependent = True


@pytest.fixture
def checked(monkeypatch):
    def check(job, samples=6, precision="float32"):
        found = []
        monkeypatch.setattr(sum_probe, "warn", found.append)
        device = torch.device("cpu")
        sum_probe.check_samples(
            job, job.model(), range(samples), device=device, precision=precision, seed=3
        )
        return found

    return check


@pytest.mark.parametrize("job", [Base, Weighted, Padded, Penalty, Accepted])
@pytest.mark.parametrize("samples", [1, 2, 3, 6])
def test_sums_pass_and_so_does_what_is_declared(checked, job, samples):
    assert checked(job(), samples) == []


class Compiled(Quadratic):
    def model(self):
        return torch.compile(super().model(), backend="eager")


class CompiledInPlace(Quadratic):
    def model(self):
        model = super().model()
        model[0].compile(backend="eager")
        return model


class DeclaredNoisy(Noisy):
    batch_dependent = True


class DeclaredCompiled(Compiled):
    batch_dependent = True


@pytest.mark.parametrize("samples", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("job", "declared", "reason"),
    [
        (Noisy, DeclaredNoisy, "loss() draws random numbers, so it was not checked whether"),
        (Compiled, DeclaredCompiled, "the model is compiled, so it was not checked whether"),
    ],
)
def test_loss_that_cannot_be_compared_is_warned_of_unless_declared(
    checked, job, declared, reason, samples
):
    [sentence] = checked(job(), samples)
    assert reason in sentence
    assert checked(declared(), samples) == []


def test_a_compiled_model_is_not_copied_in_vain(checked, monkeypatch):
    copies = []
    monkeypatch.setattr(sum_probe, "doubled", copies.append)
    assert checked(Compiled())
    assert not copies


def test_what_is_compiled_in_place_is_not_computed_but_copied(checked, monkeypatch):
    monkeypatch.setattr(sum_probe, "MOST_PARAMETERS", 0)
    [sentence] = checked(CompiledInPlace())
    assert "the model is compiled, so it was not checked whether" in sentence


@pytest.mark.parametrize("job", [Quadratic, CompiledInPlace, MeanOfMeans, PaddingCounts])
def test_a_loss_that_is_no_sum_is_refused_with_its_numbers(checked, job):
    with refused(JobError, f"{job.__name__}.loss()"):
        checked(job())


def test_a_sum_in_low_precision_passes(checked):
    class Low(Base):
        def loss(self, model, batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().loss(model, batch)

    assert checked(Low(), precision="bfloat16") == []


def test_loss_that_fails_on_few_samples_is_not_checked(checked):
    class Strict(Base):
        def loss(self, model, batch):
            assert len(batch[1]) > 3
            return super().loss(model, batch)

    [warning] = checked(Strict())
    assert "Strict.loss() fails on 2 or 4 samples" in warning
    assert "AssertionError" in warning


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_random_numbers_that_collate_draws_are_warned_of(checked, draw):
    class Collating(Base):
        augments = True

        def collate(self, samples):
            return draw() and None

    [warning] = checked(Collating())
    assert "Collating: collate() draws" in warning


def test_the_check_leaves_buffers_as_they_were(checked):
    class Counting(Base):
        def model(self):
            model = super().model()
            model.register_buffer("seen", torch.zeros(()))
            self.built = model
            return model

        def loss(self, model, batch):
            model.seen += 1
            return super().loss(model, batch)

    job = Counting()
    checked(job)
    assert job.built.seen == 0


def test_an_engine_refuses_it_in_the_first_update():
    with pytest.raises(JobError, match="Quadratic"):
        compute(engine_of(Quadratic()), make_window(0, [(0, 4)], samples_per_rank=(4,)))
