"""All ranks evaluate held-out data together: exact sums, and no trace of it in the training."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from orchestrator import Job, Loss
from orchestrator.data import HeldOutData
from orchestrator.engine.torch import TorchGroup
from orchestrator.errors import JobError, SilenceError
from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.plan.held_out import cut_held_out, share_of
from orchestrator.plan.split import split_leaves
from tests.engine.held_out import evaluate_held_out
from tests.engine.torch.jobs import Curve, engine_of
from tests.engine.windows import run, window_of
from tests.refusals import refused

TOKENS, SIZE = 11, 3


class Sentences(Job):
    """Next-token scores of sentences of 2 to 9 tokens, with dropout."""

    metric_names = ("right",)

    def model(self):
        return nn.Sequential(nn.Embedding(TOKENS, 8), nn.Dropout(0.5), nn.Linear(8, TOKENS))

    def dataset(self, samples=24):
        made = torch.Generator().manual_seed(samples)
        lengths = torch.randint(2, 10, (samples,), generator=made).tolist()
        return [torch.randint(TOKENS, (length,), generator=made) for length in lengths]

    def collate(self, samples):
        return pad_sequence(samples, batch_first=True, padding_value=-1)

    def loss(self, model, batch):
        tokens, following = batch[:, :-1].clamp(min=0), batch[:, 1:]
        scores, counts = model(tokens).transpose(1, 2), following >= 0
        total = nn.functional.cross_entropy(scores, following, ignore_index=-1, reduction="sum")
        right = ((scores.argmax(1) == following) & counts).sum()
        return Loss(total, weight=int(counts.sum()), metrics={"right": right})


def on(ranks, job, data, then=evaluate_held_out, settings=None, **more):
    """Return what `then(engine, group, data, ...)` gives on each of some ranks after an update."""

    def rank(group):
        engine = engine_of(job(), group, precision="float64", **(settings or {}))
        split = split_leaves(24, group.size, 2)
        run(engine, [window_of(split, group.rank, 0)])
        return then(engine, group, data, **more)

    return run_in_threads(ranks, rank)


def test_any_number_of_ranks_gives_the_bits_that_a_loop_over_a_thousand_ragged_batches_gives():
    samples = Sentences().dataset(2998)
    data = HeldOutData({"": samples})

    def loop(engine, group, data):
        job, model, sums = Sentences(), engine.model.eval(), [0.0, 0.0, 0.0]
        with torch.no_grad():
            for start in range(0, len(data), SIZE):
                loss = job.loss(model, job.collate(samples[start : start + SIZE]))
                for n, number in enumerate((loss.weight, loss.total, loss.metrics["right"])):
                    sums[n] = sums[n] + float(number)
        return {"loss": sums[1] / sums[0], "right": sums[2] / sums[0]}

    [expected] = on(1, Sentences, data, loop)
    [alone] = on(1, Sentences, data, size=SIZE)
    assert alone.figures == pytest.approx(expected, rel=1e-12)
    assert alone.collectives == 0
    for ranks in (2, 3, 4):
        for report in on(ranks, Sentences, data, size=SIZE):
            assert report.figures == alone.figures
            assert report.collectives == 1
            assert report.bytes_on_wire == math.ceil(2 * (ranks - 1) / ranks * 8 * 66)


def test_several_data_sets_have_figures_of_their_own_and_ranks_may_be_idle():
    job = Sentences()
    parts = {"short": job.dataset(5), "long": job.dataset(9)}
    [whole] = on(1, Sentences, HeldOutData(parts), size=SIZE)
    assert list(whole.figures) == ["short.loss", "short.right", "long.loss", "long.right"]
    for name, part in parts.items():
        [own] = on(1, Sentences, HeldOutData({"": part}), size=SIZE)
        assert own.figures == {n: whole.figures[f"{name}.{n}"] for n in ("loss", "right")}
    for report in on(7, Sentences, HeldOutData(parts), size=SIZE):  # of five pieces
        assert report.figures == whole.figures


def test_ranks_with_a_part_of_the_optimizer_evaluate_as_others():
    data = HeldOutData({"": Sentences().dataset(9)})
    [alone] = on(1, Sentences, data)
    for report in on(3, Sentences, data, settings={"shard_optimizer": True}):
        assert report.figures == pytest.approx(alone.figures, rel=1e-12)


def test_pieces_that_only_keep_ranks_in_step_count_nothing():
    data = HeldOutData({"": Sentences().dataset(5)})
    [alone] = on(1, Sentences, data, size=2)
    for report in on(2, Sentences, data, size=2, shard_ranks=(0, 1)):
        assert report.figures == alone.figures


class Normed(Curve):
    """A batch norm, a buffer that a forward replaces, and state of the job's own."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def model(self):
        class Counting(nn.Linear):
            def __init__(self):
                super().__init__(8, 1)
                self.register_buffer("calls", torch.zeros(2), persistent=False)
                self.register_buffer("mask", torch.ones(3, 3).tril() > 0)

            def forward(self, x):
                self.calls = torch.cat([self.calls, torch.ones(1)])
                if len(self.calls) == 5:  # on some ranks alone
                    self.register_buffer("cache", torch.zeros(1), persistent=False)
                return super().forward(x)

        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Counting())

    def loss(self, model, batch):
        self.calls += 1
        return super().loss(model, batch)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def trace(engine):
    """Return all that an evaluation must leave as it is."""
    buffers = {name: b.clone() for name, b in engine.model.named_buffers()}
    parameters = [p.detach().clone() for p in engine.model.parameters()]
    return {
        "buffers": buffers,
        "parameters": parameters,
        "training": [layer.training for layer in engine.model.modules()],
        "job": engine._job.calls,
    }


def test_an_evaluation_leaves_no_trace_and_uses_the_buffers_of_rank_0():
    job = Normed()
    data = HeldOutData({"": job.dataset()})

    def rank(engine, group, data):
        engine.model[2].eval()
        before = trace(engine)
        first, again = (evaluate_held_out(engine, group, data) for _ in range(2))
        torch.testing.assert_close(trace(engine), before, rtol=0, atol=0)
        assert first == again
        # Rank 0's buffers, as its checkpoint holds them, with the same weights on all ranks.
        state = engine.model.state_dict()
        alone = engine_of(Normed(), precision="float64")
        alone.model.load_state_dict(state)
        return first, evaluate_held_out(alone, TorchGroup.alone(), data), state["1.running_mean"]

    # Some ranks have another micro-step than others, and thus a buffer of another shape.
    (first, expected, mean), *others = on(5, Normed, data, rank)
    assert first.figures == expected.figures
    for report, alone, other_mean in others:
        assert report == first
        assert alone.figures != first.figures
        assert not torch.equal(mean, other_mean)
    # Digests of all buffers, then of each; two collectives say what comes; then the four that
    # differ, and the sums.
    assert first.collectives == 2 + 2 + 4 + 1


def test_random_numbers_go_on_as_without_an_evaluation():
    def numbers():
        return random.random(), np.random.random(), torch.rand(1).item()

    engine, group = engine_of(Normed()), TorchGroup.alone()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = numbers()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    evaluate_held_out(engine, group, HeldOutData({"": Normed().dataset()}))
    assert numbers() == expected


def test_evaluation_mode_and_no_gradients_but_the_precision_of_the_training():
    seen = []

    class Watching(Curve):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            seen.append((model.training, torch.is_grad_enabled(), loss.total.dtype))
            return loss

    data = HeldOutData({"": Curve().dataset()})
    engine = engine_of(Watching(), precision="bfloat16")
    evaluate_held_out(engine, TorchGroup.alone(), data, size=29)
    assert seen == [(False, False, torch.float32)]
    halves = []
    engine.model[0].register_forward_hook(lambda *call: halves.append(call[2].dtype))
    evaluate_held_out(engine, TorchGroup.alone(), data, size=29)
    assert halves == [torch.bfloat16]


class Failing(Curve):
    """Does something in the evaluation of the second held-out sample."""

    def __init__(self, act):
        super().__init__(0.0)
        self.act = act

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss if model.training else self.act(model, loss)


def failing(act, ranks=1, size=1, **parts):
    data = Curve().dataset()
    data = HeldOutData(parts or {"": [data[0], data[1]]})
    return on(ranks, lambda: Failing(act), data, size=size)


def raise_error(model, loss):
    raise ValueError("bad sample")


def change_weights(model, loss):
    model[0].weight.add_(1)
    return loss


def test_an_error_of_the_job_names_the_samples_that_it_evaluated():
    with pytest.raises(ValueError, match="bad sample") as caught:
        failing(raise_error)
    assert caught.value.__notes__ == ["in the evaluation of samples 0 to 0 of validation()"]


def test_a_loss_that_changes_a_weight_in_an_evaluation_is_refused():
    with refused(JobError, "Failing.loss() 0.weight"):
        failing(change_weights)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_unusable_weights_of_held_out_samples_are_refused(weight):
    parts = {"a": [Curve().dataset()[0]], "b": [Curve().dataset()[1]] * 4}
    with refused(JobError, "samples 0 1 validation()['b']"):
        failing(
            lambda model, loss: Loss(loss.total, weight if loss.weight == 2 else 1, loss.metrics),
            ranks=2,
            size=2,
            **parts,
        )


def test_a_loss_that_is_not_finite_or_has_no_weight_gives_nan_with_a_warning():
    def masked(model, loss):
        return Loss(loss.total * 0, 0, dict.fromkeys(loss.metrics, 0.0))

    def diverged(model, loss):
        return Loss(loss.total * math.nan, 1, dict.fromkeys(loss.metrics, 1.0))

    with pytest.warns(UserWarning, match=r"weights of validation\(\) add up to 0 over all its sam"):
        [report] = failing(masked)
    assert all(map(math.isnan, report.figures.values()))
    with pytest.warns(UserWarning, match=r"validation\(\)'s 'loss' is nan"):
        [report] = failing(diverged)
    assert math.isnan(report.figures["loss"])
    assert report.figures["error"] == 1.0


def test_a_collective_within_an_evaluation_is_refused():
    class Talking(Curve):
        group = None

        def loss(self, model, batch):
            if not model.training:
                self.group.barrier()
            return super().loss(model, batch)

    def rank(engine, group, data):
        engine._job.group = group
        with pytest.raises(SilenceError, match="'barrier' was called in an evaluation"):
            evaluate_held_out(engine, group, data)
        assert group.silence is None

    on(2, Talking, HeldOutData({"": Curve().dataset()}), rank)


@pytest.mark.filterwarnings(r"ignore:Drawing.loss\(\) draws random numbers:UserWarning")
def test_random_numbers_of_samples_and_losses_follow_from_their_place():
    class Drawing(Curve):
        augments = True

        def loss(self, model, batch):
            x, y = batch
            return super().loss(model, (x + torch.randn(x.shape[1:]), y + random.random()))

    class Noisy:
        def __len__(self):
            return 13

        def __getitem__(self, index):
            return torch.randn(4), torch.tensor([np.random.random()])

    data = HeldOutData({"": Noisy()})
    [alone] = on(1, Drawing, data, size=2)
    for ranks in (2, 3):
        [first, *_] = on(ranks, Drawing, data, size=2)
        assert first.figures == pytest.approx(alone.figures, rel=1e-12)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_can_be_read_on_for_the_next_evaluation_by_the_same_workers(workers):
    data = HeldOutData({"a": Curve().dataset(), "b": Curve().dataset()})
    share = share_of(cut_held_out(data.lengths, 10), 0, 1)

    def repeated():
        while True:
            yield from share.micro_batches()

    engine = engine_of(Curve(), loader_workers=workers)
    batches = engine.held_out_batches(data, repeated())
    first, again = (
        engine.evaluate_held_out(data, share, batches, lambda _: None) for _ in range(2)
    )
    batches.close()
    assert first.figures == again.figures
    assert first.figures["a.loss"] == first.figures["b.loss"]
