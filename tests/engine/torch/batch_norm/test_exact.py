"""`engine.norm=exact`: batch norm over the whole update, for any split, its gradient included."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss
from orchestrator.engine.settings import EngineSettings
from orchestrator.engine.torch import TorchGroup, build_engine
from orchestrator.engine.torch.batch_norm.exact import ExactBatchNorm, Statistics
from orchestrator.errors import ConfigError, JobError
from tests.jobs.training import difference, train

SAMPLES, RATE = 30, 0.05


class Nested(Job):
    """Norms one behind the other, two of them side by side, and one without weights."""

    def __init__(self, dropout=0.0):
        self.dropout = dropout

    def model(self):
        class Net(nn.Module):
            def __init__(self, dropout):
                super().__init__()
                self.last = nn.BatchNorm1d(5, affine=False, momentum=None)  # not in calling order
                self.conv = nn.Conv2d(1, 4, 3)
                self.norm = nn.BatchNorm2d(4, momentum=0.3)
                self.left, self.right = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
                self.flat = nn.Linear(4 * 9, 5)
                self.out = nn.Linear(5, 1)
                self.dropout = nn.Dropout(dropout)
                for norm in (self.norm, self.left, self.right):
                    nn.init.normal_(norm.weight)
                    nn.init.normal_(norm.bias)

            def forward(self, x):
                x = torch.tanh(self.norm(self.conv(x)))
                x = self.right(x**2) + self.left(x)
                x = self.dropout(torch.tanh(x.flatten(1)))
                return self.out(torch.tanh(self.last(self.flat(x))))

        return Net(self.dropout)

    def dataset(self):
        made = torch.Generator().manual_seed(3)
        pictures = 2 + torch.randn(SAMPLES, 1, 5, 5, generator=made)
        return TensorDataset(pictures, pictures.flatten(1).sum(1, keepdim=True).sin())

    def loss(self, model, batch):
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), weight=len(x))


def big_batch(job, *, samples, updates, momentum=0.0):
    """Plain training with torch's own norms, all samples at once: state and losses."""
    from orchestrator.engine.torch.seeds import derived_seed, seed_everything

    seed_everything(derived_seed("model", 0))
    model = job.model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    x, y = (part.double() for part in job.dataset().tensors)
    losses = []
    for update in range(updates):
        here = slice(update * samples, (update + 1) * samples)
        found = job.loss(model, (x[here], y[here]))
        optimizer.zero_grad()
        (found.total / samples).backward()
        optimizer.step()
        losses.append(found.total.item() / samples)
    return model.state_dict(), losses


@pytest.mark.parametrize(
    ("ranks", "samples", "cap"), [(1, 15, 4), (2, 15, 15), (3, 10, 2), (4, 3, 1), (7, 15, 1)]
)
def test_uneven_ranks_and_micro_steps_equal_torchs_own_norm_on_the_big_batch(ranks, samples, cap):
    wanted, losses = big_batch(Nested(), samples=samples, updates=2)
    for found, reports, _ in train(
        Nested(), ranks, samples=samples, cap=cap, updates=2, norm="exact"
    ):
        assert found.keys() == wanted.keys()
        assert difference(found, wanted) <= 1e-12, "weights and running statistics"
        assert [r.loss for r in reports] == pytest.approx(losses, rel=1e-12)


@given(ranks=st.integers(1, 5), samples=st.integers(2, 15), cap=st.integers(1, 6))
@settings(max_examples=12, deadline=None)
def test_any_split_is_the_big_batch(ranks, samples, cap):
    wanted, _ = big_batch(Nested(), samples=samples, updates=2)
    for found, *_ in train(Nested(), ranks, samples=samples, cap=cap, updates=2, norm="exact"):
        # Two samples leave a norm next to no variance to divide by, which magnifies last bits.
        assert difference(found, wanted) <= (1e-12 if samples > 4 else 1e-9)


def test_the_gathers_are_counted_and_do_not_grow_with_the_micro_steps():
    for cap in (1, 5):
        for _, reports, engine in train(Nested(), 2, samples=10, cap=cap, updates=2, norm="exact"):
            assert engine.collectives_beside() == 2 * 4
            assert [r.collectives for r in reports] == [1 + 2 * 4] * 2
    [(_, reports, engine)] = train(Nested(), 1, samples=10, cap=5, updates=1, norm="exact")
    assert engine.collectives_beside() == reports[0].collectives == 0


def test_reproducible_updates_have_one_digest_on_any_ranks_with_dropout_on():
    given = {"samples": 14, "cap": 2, "updates": 2, "norm": "exact", "leaves": True}
    found = {
        engine.weights_sha256()
        for ranks in (1, 2, 3, 5, 7)
        for *_, engine in train(Nested(0.3), ranks, reduction="reproducible", **given)
    }
    torch.use_deterministic_algorithms(mode=False)
    assert len(found) == 1


def test_evaluation_uses_the_running_statistics():
    [(_, _, engine)] = train(Nested(), 1, samples=15, cap=4, updates=2, norm="exact")
    reference = Nested().model().double()
    reference.load_state_dict(engine.model.state_dict())
    x = Nested().dataset().tensors[0].double()
    with torch.no_grad():
        assert torch.equal(engine.model.eval()(x), reference.eval()(x))


def test_an_update_that_is_skipped_leaves_the_running_statistics_alone():
    class Broken(Nested):
        def loss(self, model, batch):
            found = super().loss(model, batch)
            return Loss(found.total * float("nan"), found.weight)

    given = {"samples": 10, "cap": 5, "updates": 1, "norm": "exact"}
    [(found, [report], _)] = train(Broken(), 1, on_non_finite="skip", **given)
    assert not report.applied
    assert found["norm.num_batches_tracked"] == 0
    assert torch.equal(found["norm.running_mean"], torch.zeros(4, dtype=torch.float64))


def test_a_norm_in_evaluation_mode_keeps_what_it_has():
    class Frozen(Nested):
        def model(self):
            model = super().model()
            model.norm.eval()
            return model

    for found, _, engine in train(Frozen(), 2, samples=10, cap=2, updates=1, norm="exact"):
        assert engine.collectives_beside() == 2 * 3
        assert found["norm.num_batches_tracked"] == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_statistics_of_parts_are_those_of_the_whole(sizes, seed):
    x = 1e3 + torch.randn(sum(sizes), 3, 2, generator=torch.Generator().manual_seed(seed)).double()
    parts = [Statistics.row(part) for part in x.split(sizes)]
    found = Statistics.of([torch.zeros_like(parts[0]), *parts])
    assert found.places == 2 * sum(sizes)
    torch.testing.assert_close(found.mean, x.mean((0, 2)), rtol=1e-14, atol=0)
    wanted = x.var((0, 2), correction=0)
    torch.testing.assert_close(found.variance, wanted, rtol=1e-11, atol=0)


# ------------------------------------------------------------------ what it is not for


class Twice(Nested):
    def model(self):
        norm = nn.BatchNorm1d(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(25, 3), norm, nn.Linear(3, 3), norm)


class Deep(Nested):
    def model(self):
        return nn.Sequential(nn.Flatten(), *(nn.BatchNorm1d(25) for _ in range(17)))


class Counting(Nested):
    def model(self):
        class Counts(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("seen", torch.zeros(()))

            def forward(self, x):
                self.seen += len(x)
                return x

        return nn.Sequential(Counts(), nn.Flatten(), nn.Linear(25, 1), nn.BatchNorm1d(1))


class Talking(Nested):
    talks_in_window = True


class Embedding(Nested):
    def embed(self, model, batch):
        return model(batch[0])

    def loss_of_embeddings(self, model, embeddings):
        return Loss(embeddings.square().sum(), len(embeddings))


class Sometimes(Nested):
    """Calls its norm for some samples only."""

    def loss(self, model, batch):
        if len(batch[0]) > 1:
            model = nn.Sequential(*(part for name, part in model.named_children() if name != "1"))
        return super().loss(model, batch)

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(25), nn.Linear(25, 1))


@pytest.mark.parametrize(
    ("job", "more", "kind", "words"),
    [
        (Twice(), {}, JobError, r"2 is called more than once in a forward"),
        (Deep(), {}, ConfigError, r"this model has 17, and 16 are the most"),
        (Counting(), {}, JobError, r"the model's forward changes 0\.seen"),
        (Talking(), {}, ConfigError, r"one with talks_in_window would talk each time"),
        (Embedding(), {}, ConfigError, r"not available for a job with embed\(\)"),
        (Nested(), {"precision": "float16"}, ConfigError, r"with train\.precision=float16"),
    ],
)
def test_what_it_cannot_be_had_with_is_refused_with_what_can(job, more, kind, words):
    with pytest.raises(kind, match=words) as caught:
        build_engine(job, EngineSettings(norm="exact", **more), TorchGroup.alone())
    assert "group or frozen" in str(caught.value)


def test_a_forward_that_leaves_a_norm_out_is_told():
    with pytest.raises(JobError, match=r"1 was called when it was tried, but not for the samples"):
        train(Sometimes(), 1, samples=10, cap=5, updates=1, norm="exact")


def test_a_forward_outside_of_a_window_is_told():
    layer = ExactBatchNorm("here", nn.BatchNorm1d(3))
    with pytest.raises(JobError, match="here was called where its statistics are not known"):
        layer(torch.ones(2, 3))
    copy.deepcopy(layer).eval()(torch.ones(2, 3))
