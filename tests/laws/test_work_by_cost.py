"""Samples of different lengths: any forming of micro-steps, on any ranks, is the same update."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from orchestrator import Job, Loss
from orchestrator.client.balance import MeasuredSpeeds
from orchestrator.client.loop import RankWindows
from orchestrator.local_ranks.threads import run_in_threads
from tests.engine.torch.jobs import engine_of
from tests.engine.windows import run
from tests.plan.stated import make_plan

SAMPLES, UPDATES = 23, 4


class Sequences:
    """Rows of 1 to 9 numbers; with noise they draw some of them at random."""

    def __init__(self, *, noise):
        draw = torch.Generator().manual_seed(2)
        self.noise = noise
        self.lengths = [1 + (7 * index) % 9 for index in range(SAMPLES)]
        self.rows = [torch.randn(length, 3, generator=draw) for length in self.lengths]

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        row = self.rows[index]
        return row + 0.1 * torch.randn(row.shape) if self.noise else row


class PerToken(Job):
    """A loss per token, of padded batches; with dropout if it is to be random."""

    metric_names = ("tokens",)
    augments = True

    def __init__(self, *, random=False):
        self.random = random

    def model(self):
        dropout = nn.Dropout(0.3 if self.random else 0.0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), dropout, nn.Linear(8, 1))

    def dataset(self):
        return Sequences(noise=self.random)

    def collate(self, samples):
        sizes = torch.tensor([len(sample) for sample in samples])
        padded = pad_sequence(samples, batch_first=True)
        return padded, torch.arange(padded.shape[1]) < sizes[:, None]

    def loss(self, model, batch):
        rows, real = batch
        errors = (model(rows).squeeze(2) - rows.sum(2).sin()) ** 2
        tokens = int(real.sum())
        return Loss((errors * real).sum(), float(tokens), {"tokens": float(tokens)})


class Stated(MeasuredSpeeds):
    """Speeds that were stated, other ones for each update."""

    def __init__(self, ranks):
        super().__init__(0, 0, UPDATES, lambda _: [])
        self.ranks = ranks

    def at(self, update):
        return tuple(1.0 + (3 * rank + update) % 5 for rank in range(self.ranks))


def train(job, ranks, *, precision="float64", own_speeds=False, **batch):
    """Return each rank's (weights, losses) after some updates."""
    lengths = np.array(job.dataset().lengths)
    values = {
        "nodes": 1,
        "ranks_per_node": ranks,
        "dataset_samples": SAMPLES,
        "updates": UPDATES,
        "lengths": lengths,
        "global_batch": 9,
        "base_lr": 0.05,
        **batch,
    }
    plan = make_plan(**values)

    def be(group):
        reduction = batch.get("reduction", "fast")
        engine = engine_of(copy.copy(job), group, precision=precision, reduction=reduction)
        windows = RankWindows(plan, group.rank, speeds=Stated(ranks) if own_speeds else None)
        reports = run(engine, map(windows.window, range(UPDATES)))
        weights = torch.cat([p.detach().reshape(-1) for p in engine.model.parameters()])
        return weights, [(report.loss, report.metrics) for report in reports]

    return run_in_threads(ranks, be)


@pytest.mark.parametrize("micro_tokens", [1, 12, 40, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_budget_on_any_ranks_gives_the_update_of_one_big_batch(ranks, micro_tokens):
    (weights, losses), *_ = train(PerToken(), 1, steps=1)
    for precision, tolerance in (("float64", 1e-12), ("float32", 1e-6)):
        found = train(PerToken(), ranks, precision=precision, micro_tokens=micro_tokens)
        for own, own_losses in found:
            torch.testing.assert_close(own.double(), weights, rtol=tolerance, atol=tolerance)
            for (loss, _), (expected, _) in zip(own_losses, losses, strict=True):
                assert loss == pytest.approx(expected, rel=tolerance)


def test_reproducible_bits_do_not_depend_on_the_ranks_with_dropout_and_augmentation():
    batch = {"reduction": "reproducible", "micro_tokens": 20, "pad_to": 2}
    job = PerToken(random=True)
    (weights, losses), *_ = train(job, 1, precision="float32", **batch)
    for ranks in (2, 3, 5):
        for own, own_losses in train(job, ranks, precision="float32", **batch):
            assert torch.equal(own, weights)
            assert own_losses == losses


CUTS = [{"steps": 2}, {"micro_batch": 2}, {"micro_tokens": 12}]


@pytest.mark.parametrize("batch", CUTS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_speeds_give_the_update_of_one_big_batch(ranks, batch):
    (weights, losses), *_ = train(PerToken(), 1, steps=1)
    for own, own_losses in train(PerToken(), ranks, own_speeds=True, **batch):
        torch.testing.assert_close(own, weights, rtol=1e-12, atol=1e-12)
        assert [loss for loss, _ in own_losses] == pytest.approx([loss for loss, _ in losses])


@pytest.mark.parametrize("batch", CUTS[1:])
def test_reproducible_bits_do_not_depend_on_speeds(batch):
    job, batch = PerToken(random=True), {"reduction": "reproducible", **batch}
    (weights, losses), *_ = train(job, 1, **batch)
    for ranks in (2, 3, 5):
        for own, own_losses in train(job, ranks, own_speeds=True, **batch):
            assert torch.equal(own, weights)
            assert own_losses == losses


class Contrast(PerToken):
    """A loss of all embeddings of the update, which knows samples by their place in it."""

    def embed(self, model, batch):
        rows, real = batch
        return (model(rows) * real[:, :, None]).sum(1)

    def loss_of_embeddings(self, model, embeddings):
        places = torch.arange(len(embeddings), dtype=embeddings.dtype)[:, None]
        total = (embeddings.flip(0) * embeddings * (1 + places)).sum()
        return Loss(total, float(len(embeddings)), {"tokens": 0.0})


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_coupled_loss_sees_samples_in_the_order_of_the_update(ranks):
    (weights, losses), *_ = train(Contrast(), 1, steps=1)
    for own, own_losses in train(Contrast(), ranks, micro_tokens=20):
        torch.testing.assert_close(own, weights, rtol=1e-10, atol=1e-10)
        assert [loss for loss, _ in own_losses] == pytest.approx([loss for loss, _ in losses])
