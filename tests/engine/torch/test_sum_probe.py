"""Everyday losses: those that are sums are accepted at any size, others refused or warned of."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from orchestrator import Job, Loss
from orchestrator.engine.torch.sum_probe import check_samples
from orchestrator.errors import JobError
from tests.engine.torch.jobs import engine_of
from tests.engine.windows import compute, make_window
from tests.refusals import refused

SAMPLES, FEATURES, CLASSES = 12, 6, 4


class Net(nn.Module):
    """A net that gives scores for classes; `head_zero`: as people begin a head."""

    def __init__(self, norm=None, *, head_zero=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), norm or nn.Identity(), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)
        if head_zero:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(self.body(x))


class HandMadeNorm(nn.Module):
    """Statistics of the batch in training only, by hand."""

    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3) if self.training else x


class RmsNorm(nn.Module):
    """As large models have it: in float32, whatever it is given."""

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Everyday(Job):
    def __init__(self, loss_of, model=Net):
        self.loss_of, self.built = loss_of, model

    def model(self):
        return self.built()

    def dataset(self):
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, FEATURES, generator=draw)
        c = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
        t = torch.randn(SAMPLES, CLASSES, generator=draw)
        w = torch.rand(SAMPLES, generator=draw) + 0.5
        k = torch.rand(SAMPLES, CLASSES, generator=draw) > 0.4
        k[:, 0] = True
        return torch.utils.data.TensorDataset(x, c, t, w, k)

    def loss(self, model, batch):
        x, c, t, w, k = batch
        given = SimpleNamespace(
            x=x, c=c, t=t, w=w, k=k, n=len(x), model=model, s=model(x), p=t.softmax(1)
        )
        total, weight = self.loss_of(given)
        return Loss(total, weight)


class HeldOut(Everyday):
    def validation(self):
        return self.dataset()


def _mean_of_rows(values):
    return sum(values[number].mean() for number in range(len(values)))


def _ce(b, **more):
    return F.cross_entropy(b.s, b.c, **more)


SUMS = {
    "cross_entropy": lambda b: (_ce(b, reduction="sum"), b.n),
    "mean times n": lambda b: (_ce(b) * b.n, b.n),
    "one by one": lambda b: (
        sum(F.cross_entropy(b.s[i : i + 1], b.c[i : i + 1]) for i in range(b.n)),
        b.n,
    ),
    "means of rows": lambda b: (
        sum(F.mse_loss(b.s[i : i + 1], b.t[i : i + 1]) for i in range(b.n)),
        b.n,
    ),
    "row means": lambda b: (_mean_of_rows((b.s - b.t) ** 2), b.n),
    "stacked rows": lambda b: (
        torch.stack([F.mse_loss(b.s[i], b.t[i]) for i in range(b.n)]).sum(),
        b.n,
    ),
    "label smoothing": lambda b: (_ce(b, reduction="sum", label_smoothing=0.1), b.n),
    "class weights": lambda b: (
        _ce(b, reduction="sum", weight=torch.tensor([1.0, 2.0, 0.5, 3.0]).to(b.s)),
        torch.tensor([1.0, 2.0, 0.5, 3.0])[b.c].sum(),
    ),
    "ignored class": lambda b: (_ce(b, reduction="sum", ignore_index=1), (b.c != 1).sum()),
    "soft targets": lambda b: (F.cross_entropy(b.s, b.p, reduction="sum"), b.n),
    "nll": lambda b: (F.nll_loss(b.s.log_softmax(1), b.c, reduction="sum"), b.n),
    "mse": lambda b: (F.mse_loss(b.s, b.t, reduction="sum"), b.n),
    "mse per number": lambda b: (F.mse_loss(b.s, b.t, reduction="sum"), b.s.numel()),
    "mse by hand": lambda b: (((b.s - b.t) ** 2).sum(), b.n),
    "mean over features": lambda b: (((b.s - b.t) ** 2).mean(1).sum(), b.n),
    "l1": lambda b: (F.l1_loss(b.s, b.t, reduction="sum"), b.n),
    "smooth l1": lambda b: (F.smooth_l1_loss(b.s, b.t, reduction="sum"), b.n),
    "huber": lambda b: (F.huber_loss(b.s, b.t, reduction="sum", delta=0.3), b.n),
    "log cosh": lambda b: (torch.log(torch.cosh(b.s - b.t)).sum(), b.n),
    "quantile": lambda b: (torch.maximum(0.9 * (b.t - b.s), 0.1 * (b.s - b.t)).sum(), b.n),
    "poisson": lambda b: (
        F.poisson_nll_loss(b.s, b.t.abs(), reduction="sum", log_input=True),
        b.n,
    ),
    "gaussian": lambda b: (
        F.gaussian_nll_loss(b.s[:, :2], b.t[:, :2], b.s[:, 2:].exp(), reduction="sum"),
        b.n,
    ),
    "kl": lambda b: (F.kl_div(b.s.log_softmax(1), b.p, reduction="sum"), b.n),
    "bce": lambda b: (F.binary_cross_entropy(b.s.sigmoid(), b.p, reduction="sum"), b.n),
    "bce logits": lambda b: (
        F.binary_cross_entropy_with_logits(b.s, b.p, reduction="sum"),
        b.n,
    ),
    "bce pos weight": lambda b: (
        F.binary_cross_entropy_with_logits(
            b.s, b.p, reduction="sum", pos_weight=torch.full((CLASSES,), 2.0).to(b.s)
        ),
        b.n,
    ),
    "focal": lambda b: (
        ((1 - torch.exp(-_ce(b, reduction="none"))) ** 2 * _ce(b, reduction="none")).sum(),
        b.n,
    ),
    "hinge": lambda b: (F.multi_margin_loss(b.s, b.c, reduction="sum"), b.n),
    "soft margin": lambda b: (F.soft_margin_loss(b.s, b.t.sign(), reduction="sum"), b.n),
    "cosine": lambda b: ((1 - F.cosine_similarity(b.s, b.t)).sum(), b.n),
    "cosine embedding": lambda b: (
        F.cosine_embedding_loss(b.s, b.t, torch.ones(b.n), reduction="sum"),
        b.n,
    ),
    "triplet": lambda b: (
        F.triplet_margin_loss(b.s, b.t, -b.t, reduction="sum"),
        b.n,
    ),
    "margin ranking": lambda b: (
        F.margin_ranking_loss(b.s[:, 0], b.s[:, 1], b.t[:, 0].sign(), reduction="sum"),
        b.n,
    ),
    "masked tokens": lambda b: ((((b.s - b.t) ** 2) * b.k).sum(), b.k.sum()),
    "masked select": lambda b: (((b.s - b.t) ** 2)[b.k].sum(), b.k.sum()),
    "masked row means": lambda b: (
        (((b.s - b.t) ** 2 * b.k).sum(1) / b.k.sum(1)).sum(),
        b.n,
    ),
    "sample weights": lambda b: ((_ce(b, reduction="none") * b.w).sum(), b.w.sum()),
    "sample weights over n": lambda b: ((_ce(b, reduction="none") * b.w).sum(), b.n),
    "policy gradient": lambda b: (
        -(b.s.log_softmax(1).gather(1, b.c[:, None]).squeeze(1) * b.t[:, 0]).sum(),
        b.n,
    ),
    "ppo clip": lambda b: (
        -torch.minimum(
            (b.s[:, 0] - b.s[:, 0].detach()).exp() * b.t[:, 0],
            (b.s[:, 0] - b.s[:, 0].detach()).exp().clamp(0.8, 1.2) * b.t[:, 0],
        ).sum(),
        b.n,
    ),
    "entropy bonus": lambda b: (
        _ce(b, reduction="sum") + 0.1 * (b.s.softmax(1) * b.s.log_softmax(1)).sum(),
        b.n,
    ),
    "z loss": lambda b: (
        _ce(b, reduction="sum") + 1e-4 * (b.s.logsumexp(1) ** 2).sum(),
        b.n,
    ),
    "two tasks": lambda b: (
        _ce(b, reduction="sum") + 0.5 * F.mse_loss(b.s, b.t, reduction="sum"),
        b.n,
    ),
    "distillation": lambda b: (
        F.kl_div((b.s / 2).log_softmax(1), (b.t / 2).softmax(1), reduction="sum") * 4,
        b.n,
    ),
    "dpo": lambda b: (-F.logsigmoid(0.1 * (b.s[:, 0] - b.s[:, 1])).sum(), b.n),
    "dice per image": lambda b: (
        (1 - 2 * (b.s.sigmoid() * b.p).sum(1) / (b.s.sigmoid() + b.p).sum(1)).sum(),
        b.n,
    ),
    "iou per image": lambda b: (
        (1 - (b.s.sigmoid() * b.p).sum(1) / (b.s.sigmoid() + b.p).clamp(max=1).sum(1)).sum(),
        b.n,
    ),
    "rmse per sample": lambda b: (((b.s - b.t) ** 2).mean(1).sqrt().sum(), b.n),
    "max per sample": lambda b: ((b.s - b.t).abs().amax(1).sum(), b.n),
    "hardest class": lambda b: ((b.s.topk(2, dim=1).values ** 2).sum(), b.n),
    "gradient penalty": lambda b: (_gradient_penalty(b), b.n),
    "autoencoder": lambda b: (((b.s[:, :2] - b.x[:, :2]) ** 2).sum(), b.n),
    "evidential": lambda b: (
        (F.softplus(b.s).sum(1) - b.s.gather(1, b.c[:, None])[:, 0]).sum(),
        b.n,
    ),
    "mixup fixed": lambda b: (
        0.3 * _ce(b, reduction="sum") + 0.7 * F.cross_entropy(b.s, b.p, reduction="sum"),
        b.n,
    ),
    "ordinal": lambda b: (F.softplus(-b.s * (b.c[:, None] - 1.5)).sum(), b.n),
    "survival": lambda b: ((b.s[:, 0].exp() * b.w - b.s[:, 0]).sum(), b.w.sum()),
    "einsum": lambda b: (torch.einsum("ij,ij->", b.s, b.t), b.n),
    "wide float": lambda b: (_ce(b, reduction="none").float().sum(), b.n),
    "cancelling": lambda b: ((1e3 * (b.s - b.s.detach()) + 1e-3 * b.s).sum(), b.n),
    "divided by a constant": lambda b: (_ce(b, reduction="sum") / 100, b.n / 100),
}


def _gradient_penalty(b):
    x = b.x.detach().requires_grad_()
    [slope] = torch.autograd.grad(b.model(x).sum(), x, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).sum()


def _normalized(values):
    return (values - values.mean(0)) / (values.std(0, unbiased=False) + 1e-5)


def _similarity(b, temperature=0.5):
    z = F.normalize(b.s, dim=1)
    return z @ z.T / temperature


def _off_diagonal(b):
    z = _normalized(b.s)
    c = z.T @ z / b.n
    return ((c - torch.eye(CLASSES).to(c)) ** 2).sum()


NO_SUMS = {
    "mean": lambda b: (_ce(b), 1),
    "mean over n": lambda b: (_ce(b), b.n),
    "mse mean": lambda b: (F.mse_loss(b.s, b.t), 1),
    "mean squared": lambda b: (_ce(b, reduction="sum") / b.n, 1),
    "weight of batches": lambda b: (_ce(b, reduction="sum"), 1),
    "root of the mean": lambda b: (((b.s - b.t) ** 2).mean().sqrt() * b.n, b.n),
    "input over maximum": lambda b: (
        F.cross_entropy(b.model(b.x / b.x.abs().max()), b.c, reduction="sum"),
        b.n,
    ),
    "input standardised": lambda b: (
        F.cross_entropy(b.model(_normalized(b.x)), b.c, reduction="sum"),
        b.n,
    ),
    "scores standardised": lambda b: (
        F.cross_entropy(_normalized(b.s), b.c, reduction="sum"),
        b.n,
    ),
    "targets standardised": lambda b: (F.mse_loss(b.s, _normalized(b.t), reduction="sum"), b.n),
    "barely normalised": lambda b: (
        F.cross_entropy(b.model(b.x * (1 + 1e-4 * b.x.mean())), b.c, reduction="sum"),
        b.n,
    ),
    "centred scores": lambda b: (F.mse_loss(b.s - b.s.mean(0), b.t, reduction="sum"), b.n),
    "softmax over the batch": lambda b: (-(b.s.log_softmax(0) * b.p).sum(), b.n),
    "contrastive": lambda b: (
        F.cross_entropy(_similarity(b), torch.arange(b.n), reduction="sum"),
        b.n,
    ),
    "contrastive of two views": lambda b: (
        F.cross_entropy(b.s @ b.t.T, torch.arange(b.n), reduction="sum"),
        b.n,
    ),
    "supervised contrastive": lambda b: (
        -(_similarity(b).log_softmax(1) * (b.c[:, None] == b.c)).sum(),
        b.n,
    ),
    "hard examples": lambda b: (
        _ce(b, reduction="none").topk(max(1, b.n // 2)).values.sum(),
        max(1, b.n // 2),
    ),
    "worst sample": lambda b: (_ce(b, reduction="none").max() * b.n, b.n),
    "median": lambda b: (_ce(b, reduction="none").median() * b.n, b.n),
    "normalised weights": lambda b: (
        (_ce(b, reduction="none") * b.w / b.w.sum()).sum() * b.n,
        b.n,
    ),
    "weights of softmax": lambda b: (
        (_ce(b, reduction="none") * b.w.softmax(0)).sum() * b.n,
        b.n,
    ),
    "class balance": lambda b: (
        (_ce(b, reduction="none") / torch.bincount(b.c, minlength=CLASSES)[b.c]).sum(),
        b.n,
    ),
    "mean over kept tokens": lambda b: (((b.s - b.t) ** 2)[b.k].mean() * b.n, b.n),
    "dice of the batch": lambda b: (
        (1 - 2 * (b.s.sigmoid() * b.p).sum() / (b.s.sigmoid() + b.p).sum()) * b.n,
        b.n,
    ),
    "correlation": lambda b: (
        -F.cosine_similarity(b.s[:, 0] - b.s[:, 0].mean(), b.t[:, 0] - b.t[:, 0].mean(), dim=0)
        * b.n,
        b.n,
    ),
    "explained variance": lambda b: (
        ((b.s - b.t) ** 2).sum() / (((b.t - b.t.mean()) ** 2).sum() + 0.1) * b.n,
        b.n,
    ),
    "variance penalty": lambda b: (
        _ce(b, reduction="sum") + b.s.var(0, unbiased=False).sum() * b.n,
        b.n,
    ),
    "barlow twins": lambda b: (_off_diagonal(b) * b.n, b.n),
    "decorrelation": lambda b: (_ce(b, reduction="sum") + _off_diagonal(b), b.n),
    "entropy of the mean": lambda b: (
        _ce(b, reduction="sum")
        + (b.s.softmax(1).mean(0) * b.s.softmax(1).mean(0).log()).sum() * b.n,
        b.n,
    ),
    "load balance": lambda b: (
        _ce(b, reduction="sum") + (b.s.softmax(1).mean(0) ** 2).sum() * b.n,
        b.n,
    ),
    "sum squared": lambda b: ((b.s - b.t).sum() ** 2, b.n),
    "magnitude of the sum": lambda b: ((b.s - b.t - 2.25)[:, 2].sum().abs(), b.n),
    "not finite alone": lambda b: (
        ((b.s - b.t) ** 2).sum() / ((b.t - b.t.mean(0)) ** 2).sum() * b.n,
        b.n,
    ),
    "norm of all": lambda b: ((b.s - b.t).norm(), b.n),
    "log of the sum": lambda b: (torch.log1p(_ce(b, reduction="sum")), b.n),
    "weight decay": lambda b: (
        _ce(b, reduction="sum") + 0.1 * sum((p**2).sum() for p in b.model.parameters()),
        b.n,
    ),
    "neighbours": lambda b: (
        _ce(b, reduction="sum") + ((b.s[1:] - b.s[:-1]) ** 2).sum(),
        b.n,
    ),
    "pairs": lambda b: (torch.cdist(b.s, b.s).sum(), b.n),
    "ranking": lambda b: (
        F.softplus(-(b.s[:, :1] - b.s[:, 0]) * (b.w[:, None] - b.w).sign()).sum(),
        b.n,
    ),
    "advantages normalised": lambda b: (
        -(b.s.log_softmax(1)[:, 0] * _normalized(b.t[:, 0])).sum(),
        b.n,
    ),
    "attention over the batch": lambda b: (
        F.mse_loss((b.s @ b.s.T).softmax(1) @ b.s, b.t, reduction="sum"),
        b.n,
    ),
    "mixup in the batch": lambda b: (
        F.cross_entropy(b.model(0.7 * b.x + 0.3 * b.x.roll(1, 0)), b.c, reduction="sum"),
        b.n,
    ),
}

HIDDEN = {
    "zero head": lambda: Net(head_zero=True),
    "norm in training": lambda: Net(HandMadeNorm()),
}


def first_micro_step(job, size, precision="float32"):
    engine = engine_of(job, precision=precision)
    compute(engine, make_window(0, [(0, size)], samples_per_rank=(size,)))
    return engine


@pytest.mark.parametrize("name", SUMS)
def test_an_everyday_sum_is_accepted_at_every_micro_batch_size(name):
    for size in range(1, 10):
        precision = ("float32", "bfloat16", "float64")[size % 3]
        assert first_micro_step(Everyday(SUMS[name]), size, precision)._is_sum


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", NO_SUMS)
def test_an_everyday_loss_that_is_no_sum_is_refused(name, precision):
    for size in (1, 2, 5):
        with pytest.raises(JobError, match=r"is not a sum over samples|is a mean, made by"):
            first_micro_step(Everyday(NO_SUMS[name]), size, precision)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", HIDDEN.values(), ids=HIDDEN)
def test_what_a_fresh_head_or_evaluation_mode_would_hide_is_refused(model, precision):
    loss_of = SUMS["mse"] if model().head.weight.any() else NO_SUMS["input over maximum"]
    with pytest.raises(JobError, match="is not a sum over samples"):
        first_micro_step(Everyday(loss_of, model), 4, precision)


def test_layers_in_float32_within_do_not_pass_for_a_difference(caplog):
    with caplog.at_level("INFO"):
        engine = first_micro_step(Everyday(SUMS["cross_entropy"], lambda: Net(RmsNorm())), 4)
    assert engine._is_sum
    assert "computed in float32, in training mode" in caplog.text


def test_a_job_that_keeps_float32_of_its_own_is_compared_in_float32(caplog):
    scale = nn.Parameter(torch.eye(CLASSES))
    with caplog.at_level("INFO"):
        first_micro_step(Everyday(lambda b: (((b.s @ scale) ** 2).sum(), b.n)), 4)
    assert "computed in float32, in evaluation mode" in caplog.text
    with pytest.raises(JobError, match="computed in float32"):
        first_micro_step(Everyday(lambda b: ((b.s @ scale).amax(0).sum(), b.n)), 4)


IN_EVALUATION = {
    "a mean": (lambda b: (_ce(b, reduction="mean"), b.n), Net),
    "seen in the gradient alone": (NO_SUMS["input over maximum"], HIDDEN["zero head"]),
}


@pytest.mark.parametrize(("loss_of", "model"), IN_EVALUATION.values(), ids=IN_EVALUATION)
def test_loss_that_is_no_sum_in_evaluation_mode_is_warned_of(loss_of, model):
    job = HeldOut(lambda b: (SUMS["cross_entropy"] if b.model.training else loss_of)(b), model)
    with pytest.warns(match="in training mode, but not in evaluation mode"):
        assert first_micro_step(job, 4)._is_sum


def test_a_loss_that_is_the_same_in_evaluation_mode_is_not_compared_at_length(recwarn):
    sizes = []

    def loss_of(b):
        sizes.append(b.n)
        return SUMS["cross_entropy"](b)

    assert first_micro_step(HeldOut(loss_of), 4)._is_sum
    compared = sizes[1:]  # after the micro-step's own
    assert compared == [4, 4, 4, 2, 2, 1, 1, 1, 1, 4, 4, 2, 2]
    assert not recwarn.list


class Measured(Everyday):
    """Args: metrics: of the loss, by name, from what it is given."""

    def __init__(self, **metrics):
        super().__init__(SUMS["cross_entropy"])
        self.metrics = metrics
        self.metric_names = tuple(metrics)

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        right = model(batch[0]).softmax(1)[range(len(batch[1])), batch[1]].detach()
        return Loss(loss.total, loss.weight, {n: of(right) for n, of in self.metrics.items()})


def test_a_metric_that_is_no_sum_is_warned_of(recwarn):
    sums = {"right": torch.Tensor.sum, "size": len, "drawn": lambda _: float(torch.rand(()))}
    assert first_micro_step(Measured(**sums), 4)._is_sum
    assert not recwarn.list
    assert first_micro_step(Measured(accuracy=torch.Tensor.mean, largest=torch.max), 4)._is_sum
    assert [str(warning.message).split("'")[1] for warning in recwarn.list] == [
        "accuracy",
        "largest",
    ]


class Padded(Everyday):
    """Batch norm over channels of samples that the batch pads to its longest."""

    def model(self):
        return nn.Sequential(nn.Conv1d(1, 4, 1), nn.BatchNorm1d(4), nn.AdaptiveAvgPool1d(1))

    def collate(self, samples):
        lengths = [2 + int(sample[1]) for sample in samples]
        rows = torch.zeros(len(samples), 1, max(lengths))
        for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
            rows[row, 0, :length] = sample[0][:length]
        return rows

    def loss(self, model, batch):
        return Loss((model(batch) ** 3).sum(), len(batch))


def test_where_norms_were_replaced_they_may_be_what_is_no_sum():
    job = Padded(SUMS["cross_entropy"])
    with refused(JobError, "engine.norm=layer"):
        compute(engine_of(job, norm="layer"), make_window(0, [(0, 4)]))


def test_a_random_loss_that_repeats_once_by_chance_is_not_refused():
    calls = []

    def loss_of(b):
        calls.append(len(calls))
        factor = 1.0 + 1e-3 * max(0, len(calls) - 3)  # at first it is the same
        return _ce(b, reduction="sum") * factor, b.n

    with pytest.warns(match=r"^Everyday\.loss\(\) draws random numbers"):
        assert not first_micro_step(Everyday(loss_of), 4)._is_sum


def test_the_probe_compares_different_samples():
    seen = []

    class Noted(Everyday):
        def loss(self, model, batch):
            seen.append(batch[0])
            return super().loss(model, batch)

    engine = engine_of(Noted(SUMS["mse"]))
    check_samples(
        engine._job, engine.model, [5, 3], device=torch.device("cpu"), precision="float32", seed=0
    )
    assert len(seen[0]) == len(seen[0].unique(dim=0)) == 4


def test_the_probe_changes_neither_the_job_nor_the_model():
    class Counting(Everyday):
        calls = 0

        def loss(self, model, batch):
            self.calls += 1
            return super().loss(model, batch)

    engine = first_micro_step(Counting(SUMS["mse"], lambda: Net(nn.BatchNorm1d(8))), 4)
    assert engine._job.calls == 1
    assert int(engine.model.body[1].num_batches_tracked) == 1
    assert all(layer.training for layer in engine.model.modules())


def test_sizes_of_the_tables():
    assert len(SUMS) >= 60
    assert len(NO_SUMS) >= 40
