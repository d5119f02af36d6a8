"""The engine behind the loop: windows of a job become updates, on any split the same."""

import random
from collections import UserDict
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from orchestrator import Loss
from orchestrator.engine.common.replicas import minority_ranks
from orchestrator.engine.common.seeds import derived_seed
from orchestrator.engine.torch import TorchGroup
from orchestrator.engine.torch.consistency_checks import machine_warning, versions
from orchestrator.engine.torch.model import moved, seed_everything
from orchestrator.errors import ConfigError, JobError, SilenceError
from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.plan.split import assign, assign_leaves
from tests.engine.torch.jobs import SAMPLES, Curve, engine_of, numbers_of
from tests.engine.windows import make_window, run, window_of
from tests.refusals import refused


def _train(split, job=None, **settings):
    def be(group):
        engine = engine_of(job or Curve(), group, **settings)
        reports = run(engine, [window_of(split, group.rank, update) for update in range(3)])
        engine.accumulator.close()
        return engine, reports

    return run_in_threads(split.ranks, be)


@pytest.mark.parametrize("sizes", [[15, 14], [29, 0, 0], [1, 20, 3, 5]])
def test_updates_do_not_depend_on_the_split(sizes):
    settings = {"optimizer": {"name": "sgd"}, "precision": "float64", "clip_norm": 0.5}
    job = Curve(dropout=0.0)
    [(alone, wanted)] = _train(assign([SAMPLES], steps=1), job, **settings)
    for engine, reports in _train(assign(sizes, cap=4), job, **settings):
        found = numbers_of(engine.model)
        torch.testing.assert_close(found, numbers_of(alone.model), rtol=1e-12, atol=1e-13)
        for ours, theirs in zip(reports, wanted, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-12)
            assert ours.metrics["size"] == 1.0
            assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-12)


def test_reproducible_mode_gives_one_digest_with_dropout():
    results = set()
    for leaves in ([8], [4, 4], [0, 3, 5], [1, 1, 1, 1, 1, 3], [2, 6, 0]):
        split = assign_leaves(leaves, samples=SAMPLES, leaf_size=4)
        for engine, reports in _train(split, reduction="reproducible", optimizer={"name": "adamw"}):
            figures = [(r.loss, r.weight, r.metrics, r.gradient_norm) for r in reports]
            results.add((engine.weights_sha256(), str(figures)))
    assert len(results) == 1


def test_evaluation_leaves_the_model_as_it_was():
    [(engine, _)] = _train(assign([SAMPLES], steps=2))
    engine.model[2].eval()
    figures = engine.evaluate()
    assert isinstance(figures["loss"], float)
    assert engine.model.training
    assert not engine.model[2].training


class Meddling(Curve):
    def __init__(self, meddle):
        super().__init__()
        self.meddle = meddle

    def evaluate(self, model):
        self.meddle(model)
        return {}


@pytest.mark.parametrize(
    "meddle", [lambda m: m[0].weight.add_(1), lambda m: m[0].weight.requires_grad_(False)]
)
def test_an_evaluation_that_changes_the_model_is_named_as_that(meddle):
    with pytest.raises(JobError, match=r"Meddling\.evaluate\(\) changed 0\.weight"):
        engine_of(Meddling(meddle)).evaluate()


class NoisySGD(torch.optim.SGD):
    """SGD on gradients with noise."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.randn_like(parameter), alpha=0.1)
        return super().step(closure)


class Drawing(Curve):
    """Draws `extra` numbers in each micro-step, others in the optimizer, after it, and when it
    evaluates.
    """

    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        torch.rand(self.extra)
        return loss

    def optimizer(self, model):
        return NoisySGD(model.parameters(), lr=0.01)

    def after_update(self, model, update):
        model[0].weight.add_(torch.randn_like(model[0].weight), alpha=random.random())

    def evaluate(self, model):
        return {"drawn": float(torch.rand(())) + random.random() + np.random.random()}


def test_what_is_drawn_outside_micro_steps_follows_from_the_update_alone():
    split = assign([SAMPLES], cap=8)
    [(few, _)], [(many, _)] = (_train(split, Drawing(n), optimizer=None) for n in (0, 5))
    assert few.weights_sha256() == many.weights_sha256()
    torch.rand(3)
    assert few.evaluate() == many.evaluate()


class Evaluating(Curve):
    def loss(self, model, batch):
        model.eval()
        return super().loss(model, batch)


def test_a_loss_that_leaves_the_model_in_evaluation_mode_is_refused():
    with refused(JobError, "Evaluating.loss() model.eval() model.train()"):
        _train(assign([15, 14], cap=8), Evaluating())


def test_small_questions_have_plain_answers():
    engine = engine_of(Curve())
    assert engine.peak_memory_bytes() > 2**20
    assert engine.warnings() == []
    assert versions()["torch"] == torch.__version__


class Compiled(Curve):
    def __init__(self, compile_model):
        super().__init__()
        self.compile_model = compile_model

    def model(self):
        return self.compile_model(super().model())


def _compiled_in_place(model, **options):
    model.compile(backend="eager", **options)
    return model


@pytest.mark.parametrize(
    ("compile_model", "reduction", "is_warned"),
    [
        (partial(torch.compile, backend="eager"), "reproducible", True),
        (_compiled_in_place, "reproducible", True),
        (partial(_compiled_in_place, dynamic=True), "reproducible", True),
        (partial(_compiled_in_place, dynamic=False), "reproducible", False),
        (partial(_compiled_in_place, disable=True), "reproducible", False),
        (partial(torch.compile, backend="eager", dynamic=False), "reproducible", False),
        (partial(torch.compile, backend="eager"), "fast", False),
        (lambda model: model, "reproducible", False),
    ],
)
def test_reproducible_mode_warns_of_code_compiled_for_all_sizes(
    compile_model, reduction, is_warned
):
    sentences = engine_of(Compiled(compile_model), reduction=reduction).warnings()
    assert ["dynamic=False" in sentence for sentence in sentences] == [True] * is_warned


def test_ranks_on_other_machines_are_named():
    rows = [[1.0], [1.0], [2.0]]
    assert minority_ranks(rows) == [2]
    assert minority_ranks(rows[1:]) == [1]
    [sentence] = machine_warning(lambda _: rows, "reproducible")
    assert sentence.startswith("rank 2 computes with another version of torch")
    assert machine_warning(lambda _: rows[:2], "fast") == []


class Sparse(Curve):
    def model(self):
        model = super().model()
        model[0].rows = nn.Embedding(3, 3, sparse=True)
        return model


def test_sparse_gradients_are_warned_about():
    [sparse] = engine_of(Sparse()).warnings()
    assert "sparse gradients of 0.rows" in sparse


class OddBuffers(Curve):
    def model(self):
        model = super().model()
        model.register_buffer("ones", torch.ones(1).expand(3))
        model.register_buffer("edges", torch.eye(3).to_sparse(), persistent=False)
        return model

    def loss(self, model, batch):
        parts = [model[number] for number in range(4)]
        return super().loss(nn.Sequential(*parts), batch)


def test_buffers_that_cannot_be_written_or_are_sparse_are_left_alone():
    [(_, reports)] = _train(assign([SAMPLES], steps=2), OddBuffers())
    assert reports[-1].applied


class Chatty(Curve):
    def loss(self, model, batch):
        self.group.barrier()
        return super().loss(model, batch)


class Declared(Chatty):
    talks_in_window = True


def test_a_job_that_talks_in_mid_window_has_to_declare_it():
    def be(group, kind):
        job = kind()
        job.group = group
        window = window_of(assign([15, 14], steps=2), group.rank, 0)
        [report] = run(engine_of(job, group), [window])
        return report.collectives

    with pytest.raises(
        SilenceError,
        match=r"'barrier' was called in mid-window of update 0.*talks_in_window = True",
    ):
        run_in_threads(2, lambda group: be(group, Chatty))
    assert run_in_threads(2, lambda group: be(group, Declared)) == [3, 3]


@pytest.mark.parametrize(
    ("job", "transport", "said"),
    [(Declared, "gloo", "talks_in_window"), (Curve, "hccl", "transport=hccl")],
)
def test_losses_are_not_survived_where_collectives_cannot_be_interrupted(job, transport, said):
    group = TorchGroup.alone(transport=transport, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"run.survive=true is not available with {said}"):
        engine_of(job(), group, survive=True)


class OwnOptimizer(Curve):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)


class NoTorchOptimizer(Curve):
    def optimizer(self, model):
        return "an optimizer"


class Unsaved(nn.Linear):
    def get_extra_state(self):
        return {"seen": {1, 2}}


def with_edges():
    model = nn.Linear(4, 1)
    model.register_buffer("edges", torch.eye(3).to_sparse())
    return model


class Of(Curve):
    def __init__(self, model):
        super().__init__()
        self.model = model


@pytest.mark.parametrize(
    ("job", "settings", "kind", "names"),
    [
        (Of(lambda: Unsaved(4, 1)), {}, JobError, "set"),
        (Of(with_edges), {}, JobError, "edges torch.sparse_coo"),
        (Of(lambda: nn.LazyLinear(1)), {}, ConfigError, "weight shape"),
        (Of(lambda: nn.Linear(4, 1, device="meta")), {}, ConfigError, "weight meta"),
        (Of(lambda: "a model"), {}, JobError, "torch.nn.Module str"),
        (NoTorchOptimizer(), {"optimizer": {}}, ConfigError, "NoTorchOptimizer.optimizer str"),
        (OwnOptimizer(), {"optimizer": {"name": "adam"}}, ConfigError, "optimizer=null"),
        (Curve(), {"optimizer": {}}, ConfigError, "optimizer=adam"),
    ],
)
def test_jobs_and_settings_that_cannot_be_used_are_refused(job, settings, kind, names):
    with refused(kind, names):
        engine_of(job, **settings)


class Duck:
    def model(self):
        return nn.Linear(2, 1)

    def dataset(self):
        return [({"x": torch.ones(2)}, 1.0)] * 4

    def loss(self, model, batch):
        inputs, targets = batch
        return Loss((model(inputs["x"])[:, 0] - targets).square().sum(), len(targets))


def test_a_job_need_not_derive_from_job():
    engine = engine_of(Duck(), precision="float64")
    [report] = run(engine, [make_window(0, [(0, 2), (2, 2)])])
    assert report.weight == 4.0
    assert engine.evaluate() == {}


def test_float64_reaches_complex_parameters_too():
    """Torch's own double() would leave them in single precision."""
    model = nn.Linear(4, 2, dtype=torch.complex64)
    model.register_buffer("count", torch.tensor(1))
    engine = engine_of(Of(lambda: model), precision="float64")
    assert engine.model.weight.dtype == torch.complex128
    assert engine.model.count.dtype == torch.int64
    assert engine.parameter_count() == 2 * (4 * 2 + 2)


class Pair(NamedTuple):
    x: object
    y: object


class Tokens(UserDict):
    """As tokenizers give them: a mapping with attributes."""

    def __getattr__(self, name):
        return self.data[name]


def test_batches_of_any_shape_are_moved_and_stay_what_they_are():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    values = torch.tensor(1), torch.tensor(1j), "text", packed
    batch = Pair([Tokens(x=torch.ones(1))], {"a": values})
    found = moved(batch, torch.device("meta"), double=True)
    assert isinstance(found, Pair)
    [tokens], (whole, turn, text, packed) = found.x, found.y["a"]
    assert (tokens.x.device.type, tokens.x.dtype) == ("meta", torch.float64)
    assert (whole.dtype, turn.dtype, text) == (torch.int64, torch.complex128, "text")
    assert isinstance(packed, PackedSequence)
    assert (packed.data.device.type, packed.batch_sizes.tolist()) == ("meta", [2, 1, 1])


def test_seeds_are_written_down():
    """They are part of what makes a run repeat in a year: they must never change."""
    found = [derived_seed("step", 1, 2, 3), derived_seed("data", 1, 2, 3), derived_seed("model", 1)]
    assert found == [3512366156060974893, 12678527393264773468, 10538647175422201918]


def test_python_and_numpy_draw_other_numbers_from_the_same_seed():
    seed_everything(found := derived_seed("step", 1, 2, 3))
    drawn = [random.random(), np.random.rand()]
    assert drawn[0] != drawn[1]
    seed_everything(found)
    assert [random.random(), np.random.rand()] == drawn
