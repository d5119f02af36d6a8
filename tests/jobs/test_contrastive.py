"""A loss of all embeddings: the update of one big batch, in two collectives."""

import pytest
import torch

from jobs.contrastive import Contrastive
from orchestrator import Loss
from orchestrator.engine.common.seeds import derived_seed
from orchestrator.engine.torch.grad_cache import Layout
from orchestrator.engine.torch.model import seed_everything
from orchestrator.errors import JobError
from tests.jobs.training import train
from tests.laws.problem import difference

SMALL = {"hidden": 16, "width": 6}


def big_batch(job, *, samples, cap, updates):
    """Plain training in one process on all samples at once, with each micro-batch's dropout."""
    seed_everything(derived_seed("model", 0))
    model = job.model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pixels = job.dataset().tensors[0].double()
    losses = []
    for update in range(updates):
        parts = []
        for start in range(0, samples, cap):
            seed_everything(derived_seed("step", 0, update, start))
            first = update * samples + start
            last = min(first + cap, (update + 1) * samples)
            parts.append(job.embed(model, [pixels[first:last]]))
        left, right = (torch.cat(part) for part in zip(*parts, strict=True))
        found = job.loss_of_embeddings(model, (left, right))
        optimizer.zero_grad()
        (found.total / found.weight).backward()
        optimizer.step()
        losses.append(found.total.item() / found.weight)
    return {name: p.detach() for name, p in model.named_parameters()}, losses


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_any_ranks_one_of_them_idle_equal_the_big_batch_with_dropout_on(ranks, dropout):
    job = Contrastive(**SMALL, dropout=dropout)
    wanted, losses = big_batch(job, samples=22, cap=4, updates=3)
    given = {"samples": 22, "cap": 4, "updates": 3}
    for found, reports, _ in train(job, ranks, **given, leaves=True):
        assert difference(found, wanted) <= 1e-12
        assert [r.loss for r in reports] == pytest.approx(losses, rel=1e-12)
        assert all(r.weight == 22 for r in reports)


@pytest.mark.parametrize("cap", [1, 2, 3, 12])
def test_an_update_has_two_collectives_whatever_the_micro_steps(cap):
    for _, reports, _ in train(Contrastive(**SMALL), 2, samples=24, cap=cap, updates=2):
        assert [r.collectives for r in reports] == [2, 2]
        assert reports[0].micro_steps == 12 // cap


def test_whole_leaves_give_one_digest_on_any_ranks_with_dropout_on():
    given = {"samples": 22, "cap": 4, "updates": 2, "leaves": True, "precision": "float32"}
    digests = {
        engine.weights_sha256()
        for ranks in (1, 2, 3, 5)
        for *_, engine in train(
            Contrastive(**SMALL, dropout=0.3), ranks, reduction="reproducible", **given
        )
    }
    assert len(digests) == 1


class Normed(Contrastive):
    def model(self):
        model = super().model()
        model.add_module("norm", torch.nn.BatchNorm1d(SMALL["width"]))
        return model

    def embed(self, model, batch):
        left, right = super().embed(model, batch)
        return model.norm(left), right


def test_running_statistics_move_once_for_each_micro_batch_and_not_on_idle_ranks():
    given = {"samples": 6, "cap": 2, "updates": 2, "leaves": True}
    counts = [
        (int(engine.model.norm.num_batches_tracked), sum(r.micro_steps for r in reports))
        for _, reports, engine in train(Normed(**SMALL), 4, **given)
    ]
    assert all(moved == micro_steps for moved, micro_steps in counts), counts
    assert (0, 0) in counts


class Forgetful(Contrastive):
    calls = 0

    def embed(self, model, batch):
        self.calls += 1
        left, right = super().embed(model, batch)
        return left * self.calls, right


class Short(Contrastive):
    def embed(self, model, batch):
        return super().embed(model, batch)[0][:-1]


class Blind(Contrastive):
    def loss_of_embeddings(self, model, embeddings):
        return Loss(model.log_temperature * 1.0, 1.0, {"matched": 0})


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Forgetful, "gave other embeddings when"),
        (Short, "one row for each of the micro-batch's 4 samples"),
        (Blind, "does not depend on the embeddings"),
    ],
)
def test_embeddings_and_losses_that_cannot_be_used_are_refused(job, message):
    with pytest.raises(JobError, match=message):
        train(job(**SMALL), 1, samples=4, cap=4, updates=1)


def test_embeddings_of_any_shape_travel_as_rows():
    given = (torch.randn(3, 2, 4), torch.randn(3).double(), torch.randn(3, 5).bfloat16())
    layout = Layout.of(given, 3)
    rows = layout.pack(given)
    assert rows.shape == (3, 14)
    assert rows.dtype == torch.float64
    for found, wanted in zip(layout.unpack(rows), given, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
