"""Small MindSpore jobs for tests, and the same mathematics in NumPy."""

import os
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

from jobs.line import Line
from orchestrator import Job, Loss, current_run
from tests.callback_job import Journaled
from tests.hold import Hold

SAMPLES = 61


def points(samples=SAMPLES):
    draw = np.random.default_rng(1)
    x = draw.standard_normal((samples, 5))
    y = draw.standard_normal((samples, 2))
    w = draw.uniform(0.5, 2.0, samples)
    return x, y, w


class Weighted(Job):
    """Weighted least squares of a two-layer net, its weights far from equal."""

    framework = "mindspore"
    metric_names = ("error",)

    def __init__(self, poison=None):
        self.poison = poison

    def model(self):
        return nn.SequentialCell([nn.Dense(5, 7), nn.Tanh(), nn.Dense(7, 2)])

    def dataset(self):
        x, y, w = (part.copy() for part in points())
        if self.poison is not None:
            y[self.poison] = np.nan
        return [(x[i], y[i], w[i]) for i in range(SAMPLES)]

    def loss(self, model, batch):
        x, y, w = batch
        errors = ops.square(model(x) - y).sum(axis=1)
        return Loss((errors * w).sum(), weight=w.sum(), metrics={"error": errors.sum()})

    def after_update(self, model, update):
        self.followed = [*getattr(self, "followed", []), update]

    def state_dict(self):
        return {"followed": getattr(self, "followed", []), "latest": Tensor([1.5, 2.5])}

    def load_state_dict(self, state):
        assert state["latest"].asnumpy().tolist() == [1.5, 2.5]
        self.followed = state["followed"]

    def evaluate(self, model):
        return {"weight": float(model[0].weight.asnumpy().sum())}


class JournaledWeighted(Journaled, Weighted):
    """The same with callbacks that are written down."""


class Normed(Weighted):
    def model(self):
        class Head(nn.Cell):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm1d(7)
                self.dense = nn.Dense(7, 2)

            def construct(self, x):
                return self.dense(self.norm(x))

        return nn.SequentialCell([nn.Dense(5, 7), nn.BatchNorm1d(7), nn.Tanh(), Head()])


class HeldOut(Normed):
    """All ranks evaluate with a net whose moving statistics are each rank's own."""

    def validation(self):
        return self.dataset()[:37]

    def evaluate(self, model):
        return {}


class Light(Weighted):
    """Its weights add up to less than a billionth, and count relative to each other alone."""

    def dataset(self):
        return [(x, y, w * 1e-11) for x, y, w in super().dataset()]


class Steepest(Weighted):
    """The squares of its gradient are beyond float32; the gradient is not."""

    metric_names = ()

    def loss(self, model, batch):
        x, _, _ = batch
        return Loss((model(x) * 1e20).sum(), weight=len(x))


class Decaying(Weighted):
    """Its optimizer has weights and biases in groups, as for a weight decay of the former alone.

    Args:
        builder: of the optimizer.
        left_out: parameters at the end that it does not get.
    """

    def __init__(self, builder=optim.SGD, left_out=0):
        super().__init__()
        self.builder, self.left_out = builder, left_out

    def optimizer(self, model):
        given = model.trainable_params()[: 4 - self.left_out]
        self.built = self.builder([{"params": given[::2]}, {"params": given[1::2]}], 0.1)
        return self.built


class Named(Weighted):
    metric_names = ()

    def dataset(self):
        return [{"x": x, "y": y} for x, y, _ in super().dataset()]

    def loss(self, model, batch):
        return Loss(ops.square(model(batch["x"]) - batch["y"]).sum(), weight=len(batch["x"]))


class Single(Named):
    def dataset(self):
        return [np.concatenate([one["x"], one["y"]]) for one in super().dataset()]

    def loss(self, model, batch):
        return Loss(ops.square(model(batch[:, :5]) - batch[:, 5:]).sum(), weight=len(batch))


class OwnOptimizer(Weighted):
    def optimizer(self, model):
        return nn.SGD(model.trainable_params(), 0.01)


class Steep(Weighted):
    """Its first sample's gradient overflows float16 at the first loss scales."""

    def dataset(self):
        samples = super().dataset()
        x, y, w = samples[0]
        return [(x, y + 100.0, w), *samples[1:]]


class SlowLine(Line):
    """`job=line` with a pause before each micro-step until its hold is released."""

    def __init__(self, pause_s=0.0, hold=None, **more):
        super().__init__(**more)
        self.pause_s, self.hold = pause_s, Hold(hold) if hold else None
        self.next_update = None  # unknown until this process's first boundary

    def after_update(self, model, update):
        self.next_update = update + 1

    def collate(self, samples):
        if self.hold:
            self.hold.wait_at(self.next_update)
        if not (self.hold and self.hold.released):
            time.sleep(self.pause_s)
        return super().collate(samples)


class Hidden(Weighted):
    """Has a framework that a static check cannot read."""

    framework = "MINDSPORE".lower()


class Detached(Weighted):
    """Its loss leaves the graph: compiled, MindSpore would cut the gradient without a word."""

    def loss(self, model, batch):
        return helper(model, batch)


def helper(model, batch):
    x, y, w = batch
    errors = ops.square(model(x) - y).sum(axis=1)
    return Loss((errors * w).sum(), weight=w.sum(), metrics={"error": errors.sum()})


class Unparsable(Weighted):
    def loss(self, model, batch):
        x, y, w = batch
        errors = ops.square(model(x) - y).sum(axis=1)
        with open("/dev/null") as nothing:  # noqa: PTH123  # what a user would write
            nothing.read()
        return Loss((errors * w).sum(), weight=w.sum(), metrics={"error": errors.sum()})


class Unknown(Weighted):
    def loss(self, model, batch):
        x, _, w = batch
        return Loss(model(x).no_such_method(), weight=w.sum())


class Counted(Weighted):
    """Weights that count samples, which the framework's own style needs."""

    metric_names = ()

    def loss(self, model, batch):
        x, y, _ = batch
        return Loss(ops.square(model(x) - y).sum(), weight=len(y))


def numpy_update(weights, rate):
    """One SGD update with the gradient of all samples at once, by hand, in float64."""
    w1, b1, w2, b2 = (np.asarray(w, np.float64) for w in weights)
    x, y, w = points()
    hidden = np.tanh(x @ w1.T + b1)
    out = hidden @ w2.T + b2
    g_out = 2 * (out - y) * w[:, None] / w.sum()
    g_hidden = (g_out @ w2) * (1 - hidden**2)
    return (
        w1 - rate * g_hidden.T @ x,
        b1 - rate * g_hidden.sum(0),
        w2 - rate * g_out.T @ hidden,
        b2 - rate * g_out.sum(0),
    )


class Drifting(Weighted):
    """One weight changes on rank 1 alone, after its second update."""

    def after_update(self, model, update):
        if os.environ["TEST_RANK"] == "1" and update == 1:
            ops.assign_add(model[0].bias, ms.Tensor(np.full(7, 1e-6), ms.float32))


class Reschedules(Weighted):
    """Changes its optimizer's rate by itself: at once, or after an update."""

    def __init__(self, scheduler=False):
        super().__init__()
        self.scheduler = scheduler

    def optimizer(self, model):
        self.built = optim.SGD(model.trainable_params(), lr=0.1)
        if self.scheduler:
            self.steps = optim.lr_scheduler.StepLR(self.built, 1)
        return self.built

    def after_update(self, model, update):
        rate = self.built.param_groups[0]["lr"]
        ops.assign(rate, rate * 0.5)


class ListState(nn.Cell):
    """SGD with momentum, its velocities in a plain list."""

    def __init__(self, params):
        super().__init__()
        self.parameters = ms.ParameterTuple(params)
        self.learning_rate = ms.Parameter(ms.Tensor(0.1, ms.float32), name="learning_rate")
        self.held = [ms.Parameter(ops.zeros_like(one)) for one in params]

    def construct(self, gradients):
        for weight, held, gradient in zip(self.parameters, self.held, gradients):  # noqa: B905
            ops.assign(held, held * 0.9 + gradient)
            ops.assign_sub(weight, self.learning_rate * held)
        return True


class OwnListState(Weighted):
    def optimizer(self, model):
        return ListState(model.trainable_params())


class Thawing(Weighted):
    """Changes what is trained after its first update."""

    def __init__(self, frozen):
        super().__init__()
        self.frozen = frozen

    def model(self):
        model = super().model()
        model[0].bias.requires_grad = not self.frozen
        return model

    def after_update(self, model, update):
        model[0].bias.requires_grad = self.frozen


class Integers(Counted):
    """Has a parameter of integers, which is an index."""

    def model(self):
        class Embedded(nn.Cell):
            def __init__(self):
                super().__init__()
                where = ms.Tensor(np.arange(2), ms.int32)
                self.where = ms.Parameter(where, name="where", requires_grad=False)
                self.embedding, self.dense = nn.Embedding(4, 2), nn.Dense(5, 2)

            def construct(self, x):
                return self.dense(x) + self.embedding(self.where).sum(0)

        return Embedded()


class Attentive(Counted):
    """Attention, where the gradient of k.bias is 0 but for rounding."""

    def model(self):
        class Attention(nn.Cell):
            def __init__(self):
                super().__init__()
                self.embed = nn.Dense(1, 8)
                self.q, self.k, self.v = nn.Dense(8, 8), nn.Dense(8, 8), nn.Dense(8, 8)
                self.out = nn.Dense(8, 2)

            def construct(self, x):
                x = self.embed(x.expand_dims(-1))
                scores = ops.matmul(self.q(x), self.k(x).swapaxes(1, 2)) / 2.83
                return self.out(ops.matmul(ops.softmax(scores, -1), self.v(x)).mean(axis=1))

        return Attention()


class Cut(Counted):
    """Makes a tensor of a tensor, where MindSpore's graphs cut the gradient."""

    def loss(self, model, batch):
        x, y, _ = batch
        hidden = Tensor(model[0](x), ms.float32)
        return Loss(ops.square(model[2](ops.tanh(hidden)) - y).sum(), weight=len(y))


class Overflowing(Counted):
    """Its loss is finite, but not its gradient."""

    def loss(self, model, batch):
        x, y, _ = batch
        found = model(x)
        return Loss(ops.sqrt(ops.square(found - found)).sum(), weight=len(y))


class RateOfNN(Counted):
    """Changes the rate of an optimizer of `mindspore.nn` after an update."""

    def optimizer(self, model):
        self.built = nn.SGD(model.trainable_params(), 0.1)
        return self.built

    def after_update(self, model, update):
        ops.assign(self.built.learning_rate, ms.Tensor(5.0, ms.float32))


class ScaledOptimizer(Weighted):
    def optimizer(self, model):
        return nn.Momentum(model.trainable_params(), 0.05, 0.0, loss_scale=1024.0)


FACTOR = 1.0


class Annealed(Counted):
    """Plain values that it reads change after an update: its own, its model's, or its module's.

    Args:
        what: the name of the one that changes; "calls" is not read.
    """

    def __init__(self, what):
        super().__init__()
        self.what, self.beta, self.shift, self.calls = what, 1.0, Tensor(0.0), 0

    def model(self):
        class Warm(nn.Cell):
            def __init__(self):
                super().__init__()
                self.dense, self.temperature = nn.Dense(5, 2), 1.0

            def construct(self, x):
                return self.dense(x) / self.temperature

        return Warm()

    def loss(self, model, batch):
        x, y, _ = batch
        return Loss(self.weighted(ops.square(model(x) - y).sum()), weight=len(y))

    def weighted(self, total):
        return self.beta * total * FACTOR + self.shift

    def after_update(self, model, update):
        self.calls += 1
        if self.what == "beta":
            self.beta = 2.0
        elif self.what == "shift":
            self.shift = Tensor(1.0)
        elif self.what == "temperature":
            model.temperature = 2.0
        elif self.what == "FACTOR":
            globals()["FACTOR"] += 1.0


class Warming(Named):
    """Reads the update's number from the run; the net of a cell goes into evaluation mode."""

    def model(self):
        return nn.SequentialCell([nn.Dense(5, 7), nn.Dropout(p=0.5), nn.Dense(7, 2)])

    def loss(self, model, batch):
        errors = ops.square(model(batch["x"]) - batch["y"]).sum()
        return Loss(errors * (1.0 + current_run.update), weight=len(batch["x"]))

    def after_update(self, model, update):
        if update == 1:
            model[1].set_train(False)


class NumpyNoise(Counted):
    def loss(self, model, batch):
        x, y, _ = batch
        noise = Tensor(np.random.standard_normal((1, 5)).astype(np.float32))
        return Loss(ops.square(model(x + noise) - y).sum(), weight=len(y))


class Labelled(Counted):
    def collate(self, samples):
        return Tensor(np.float32([x for x, *_ in samples])), "name"


class AttentionDropout(Counted):
    def __init__(self, rate=0.1, recompute=False):
        super().__init__()
        self.rate, self.recompute = rate, recompute

    def model(self):
        job = self

        class Attending(nn.Cell):
            def __init__(self):
                super().__init__()
                self.embed, self.out = nn.Dense(1, 8), nn.Dense(8, 2)
                self.attention = nn.MultiheadAttention(8, 2, dropout=job.rate, batch_first=True)
                if job.recompute:
                    self.embed.recompute()

            def construct(self, x):
                x = self.embed(x.expand_dims(-1))
                return self.out(self.attention(x, x, x)[0].mean(axis=1))

        return Attending()


class Dropped(Counted):
    """Dropout of elements and of channels; one cell is called three times."""

    def model(self):
        class Dropping(nn.Cell):
            def __init__(self):
                super().__init__()
                self.hidden, self.out = nn.Dense(5, 8), nn.Dense(8, 2)
                self.elements, self.channels = nn.Dropout(p=0.3), nn.Dropout2d(p=0.2)

            def construct(self, x):
                x = self.elements(ops.tanh(self.hidden(x)))
                x = self.channels(x.reshape(-1, 8, 1, 1)).reshape(-1, 8)
                return self.elements(self.out(self.elements(x)))

        return Dropping()


class CutDropped(Cut):
    def model(self):
        return nn.SequentialCell([nn.Dense(5, 7), nn.Dropout(p=0.1), nn.Dense(7, 2)])


class UnmeasuredAttention(AttentionDropout):
    metric_names = ("error",)


class Assigning(Counted):
    """Its loss shrinks a trained weight in every micro-step."""

    def loss(self, model, batch):
        ops.assign(model[0].bias, model[0].bias * 0.5)
        return Loss(ops.square(model(batch[0]) - batch[1]).sum(), weight=len(batch[1]))


class Padded(Line):
    """A line through the tokens of sequences of 1 to 14, padded to the longest of a micro-batch, or
    to a multiple of `pad_to`.
    """

    def __init__(self, samples=96, pad_to=1, **more):
        super().__init__(samples, **more)
        self.pad_to = pad_to

    def lengths(self):
        return [1 + 5 * index % 14 for index in range(self.samples)]

    def dataset(self):
        points = iter(Line(samples=sum(self.lengths())).dataset())
        return [[next(points) for _ in range(length)] for length in self.lengths()]

    def collate(self, samples):
        longest = -(-max(map(len, samples)) // self.pad_to) * self.pad_to
        x, y, real = np.zeros((3, len(samples), longest, 1), np.float32)
        for row, points in enumerate(samples):
            for column, (a, b) in enumerate(points):
                x[row, column], y[row, column], real[row, column] = a, b, 1
        return Tensor(x), Tensor(y), Tensor(real)

    def loss(self, model, batch):
        x, y, real = batch
        return Loss((ops.square(model(x) - y) * real).sum(), weight=real.sum())
