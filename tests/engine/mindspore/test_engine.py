"""One rank's engine in this process: modes, splits, state, the framework's own style, bad jobs."""

import dataclasses
import importlib.metadata
import itertools
import random
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.dataset import NumpySlicesDataset, vision
from mindspore.experimental import optim
from mindspore.train import Model
from safetensors.numpy import load_file, save_file

from orchestrator import Loss, current_run
from orchestrator.config.composer import compose
from orchestrator.config.rules import refuse_unsupported
from orchestrator.data import HeldOutData
from orchestrator.engine.api import EngineSettings, GroupSpec
from orchestrator.engine.common.update_policy import FIRST_SCALE
from orchestrator.engine.mindspore.accumulator import Accumulator
from orchestrator.engine.mindspore.engine import build_engine
from orchestrator.engine.mindspore.framework import check_installed
from orchestrator.engine.mindspore.group import MindSporeGroup, choose_transport
from orchestrator.engine.mindspore.model import advice
from orchestrator.errors import (
    ConfigError,
    JobError,
    NonFiniteError,
    RunFolderError,
    TransportError,
)
from orchestrator.runs.start import prepare
from tests.engine.held_out import evaluate_held_out
from tests.engine.mindspore import jobs
from tests.engine.mindspore.program import RATE, _distance
from tests.engine.windows import make_window, run
from tests.refusals import mentions, refused

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def compilers_files_go_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("MS_OM_PATH", str(tmp_path))
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def alone():
    return MindSporeGroup(rank=0, size=1, transport="mccl")


def built(job=None, **settings):
    job = job or jobs.Weighted()
    return build_engine(job, EngineSettings(metric_names=job.metric_names, **settings), alone())


def weights(engine):
    return [p.asnumpy().copy() for p in engine._model.trainable_params()]


def update(engine, sizes, number=0, rate=RATE):
    starts = itertools.accumulate(sizes[:-1], initial=0)
    [report] = run(engine, [make_window(number, [*zip(starts, sizes, strict=True)], rate=rate)])
    return report


@pytest.mark.parametrize("mode", ["pynative", "jit", "graph"])
def test_every_mode_and_split_gives_numpys_update_with_the_rate_of_each(mode):
    engine = built(mode=mode)
    before = weights(engine)
    report = update(engine, [30, 20, 11])
    after = weights(engine)
    assert _distance(after, jobs.numpy_update(before, RATE)) < 1e-6
    assert (report.collectives, report.micro_steps) == (0, 3)
    assert (report.compile_s > 0) == (mode != "pynative")
    assert (report.plain_step_s > 0) == (mode != "pynative")
    assert update(engine, [30, 20, 11], 1, rate=0.0).plain_step_s == 0
    assert _distance(weights(engine), after) == 0


@pytest.mark.parametrize(
    ("job", "precision", "limit", "unclipped"),
    [(jobs.Weighted, "float64", 0.01, 0.01), (jobs.Steepest, "float32", 1.0, 1e20)],
    ids=["after averaging", "though its squares overflow"],
)
def test_the_gradient_is_clipped_once(job, precision, limit, unclipped):
    engine = built(job(), mode="pynative", clip_norm=limit, precision=precision)
    before = weights(engine)
    report = update(engine, [31, 30], rate=1.0)
    moved = np.concatenate([(a - b).ravel() for a, b in zip(before, weights(engine), strict=True)])
    assert unclipped < report.gradient_norm < 1e21
    assert np.linalg.norm(moved) == pytest.approx(limit, rel=1e-5)


def test_parameter_groups_keep_their_ratio_to_the_rate():
    job = jobs.Decaying(lambda groups, lr: optim.SGD([{**groups[0], "lr": lr / 10}, groups[1]], lr))
    engine = built(job, mode="jit", optimizer={})
    for number, rate in enumerate((0.1, 0.02)):
        update(engine, [61], number, rate=rate)
        rates = [float(group["lr"].asnumpy()) for group in job.built.param_groups]
        assert rates == pytest.approx([rate / 10, rate])


def test_the_rate_of_a_jobs_own_optimizer_is_the_one_that_was_typed():
    assert built(jobs.OwnOptimizer(), mode="pynative", optimizer={}).optimizer_used()["lr"] == 0.01


@pytest.mark.parametrize("builder", [nn.SGD, optim.SGD])
@pytest.mark.parametrize("mode", ["pynative", "jit"])
def test_gradients_reach_their_parameters_in_whatever_order_the_optimizer_has_them(mode, builder):
    engine = built(jobs.Decaying(builder), mode=mode, optimizer={})
    before = weights(engine)
    update(engine, [30, 31])
    assert _distance(weights(engine), jobs.numpy_update(before, RATE)) < 1e-6


@pytest.mark.parametrize("style", ["own", "framework"])
def test_a_batch_may_be_a_tensor_or_a_tuple_or_a_dictionary(style):
    found = []
    for job in (jobs.Counted(), jobs.Named(), jobs.Single()):
        engine = built(job, style=style)
        update(engine, [15] * 4)
        found.append(weights(engine))
    assert all(_distance(one, found[0]) < 1e-6 for one in found[1:])


@pytest.mark.parametrize("mode", ["pynative", "jit", "graph"])
def test_an_evaluation_leaves_no_trace_and_drops_nothing(mode):
    job = jobs.Dropped()
    engine = built(job, mode=mode)
    update(engine, [31, 30])
    engine._model.elements.set_train(False)
    before = random.getstate(), repr(np.random.get_state()), ms.get_seed()
    trained = engine.weights_sha256()
    modes = [cell.training for _, cell in engine._model.cells_and_names()]
    data = HeldOutData({"a": job.dataset(), "b": job.dataset()[:7]})
    first, again = (evaluate_held_out(engine, alone(), data, size=9).figures for _ in range(2))
    assert first == again
    assert evaluate_held_out(engine, alone(), data, size=61).figures == pytest.approx(
        first, rel=1e-6
    )
    assert (random.getstate(), repr(np.random.get_state()), ms.get_seed()) == before
    assert engine.weights_sha256() == trained
    assert [cell.training for _, cell in engine._model.cells_and_names()] == modes
    ms.set_context(mode=ms.PYNATIVE_MODE)
    engine._model.set_train(False)
    loss = job.loss(
        engine._model, next(engine.batches([make_window(0, [(0, 61)]).micro_batches[0]]))
    )
    assert float(loss.total.asnumpy()) / 61 == pytest.approx(first["a.loss"], rel=1e-6)


def test_compiled_or_not_a_forward_moves_statistics_once():
    found = []
    for mode in ("pynative", "jit"):
        engine = built(jobs.Normed(), mode=mode)
        update(engine, [30, 31])
        parameters = engine._model.get_parameters()
        found.append([p.asnumpy() for p in parameters if not p.requires_grad])
    assert _distance(*found) < 1e-5


@pytest.mark.parametrize(
    ("job", "optimizer", "mode"),
    [
        (jobs.Weighted, {"name": "adamw"}, "pynative"),
        (jobs.Weighted, {"_target_": "mindspore.nn.Momentum", "momentum": 0.9}, "jit"),
        (jobs.OwnOptimizer, {}, "graph"),
    ],
)
def test_the_learning_rate_of_each_update_is_the_one_it_steps_with(job, optimizer, mode):
    engine = built(job(), mode=mode, optimizer=optimizer)
    moved = []
    for number, rate in enumerate((RATE, 0.0, RATE)):
        before = weights(engine)
        update(engine, [61], number, rate=rate)
        moved.append(_distance(weights(engine), before))
    assert [distance > 0 for distance in moved] == [True, False, True]


@pytest.mark.parametrize(
    ("mode", "optimizer", "job"),
    [
        ("pynative", {"name": "sgd", "momentum": 0.9}, jobs.Weighted),
        ("jit", {"name": "adam"}, jobs.Weighted),
        ("jit", {"_target_": "mindspore.experimental.optim.NAdam"}, jobs.Weighted),
        ("pynative", {"_target_": "mindspore.experimental.optim.ASGD", "t0": 1.0}, jobs.Weighted),
        ("jit", {}, jobs.OwnListState),
    ],
)
def test_state_that_is_loaded_in_mid_training_or_anew_gives_the_same_bits(
    tmp_path, mode, optimizer, job
):
    engine, other = (built(job(), mode=mode, optimizer=optimizer, seed=seed) for seed in (0, 5))
    update(engine, [61])
    extra = engine.save_state(tmp_path)
    assert load_file(tmp_path / "weights.safetensors")["0.weight"].shape == (7, 5)
    update(engine, [61], 1)
    ended = engine.weights_sha256()
    for one in (engine, other):
        one.load_state(tmp_path, extra)
        update(one, [61], 1)
        assert one.weights_sha256() == ended


class Drawing(list):
    def __getitem__(self, index):
        return np.random.rand(2).astype(np.float32) + super().__getitem__(index)


class Random(jobs.Weighted):
    def dataset(self):
        return Drawing(range(9))


@pytest.mark.parametrize("augments", [False, True])
def test_what_a_data_set_draws_depends_on_seed_and_position_alone(augments, monkeypatch):
    monkeypatch.setattr(Random, "augments", augments, raising=False)

    def drawn(seed, state):
        engine = built(Random(), seed=seed)
        np.random.seed(state)  # as another update would leave it
        work = make_window(1, [(0, 3), (3, 2)]).micro_batches
        return [batch.asnumpy().tolist() for batch in engine.batches(work)]

    assert drawn(3, state=1) == drawn(3, state=2)
    assert drawn(3, state=1) != drawn(4, state=1)


class Flipping(list):
    def __getitem__(self, index):
        image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
        return np.float32(vision.RandomHorizontalFlip(0.5)(image)[0, 0, 0])


class Flips(jobs.Weighted):
    augments = True

    def dataset(self):
        return Flipping(range(32))


def test_augmentations_of_mindspore_draw_for_each_sample():
    engine = built(Flips(), mode="pynative")
    work = make_window(0, [(0, 16), (16, 16)]).micro_batches
    first, second = ([batch.asnumpy().tolist() for batch in engine.batches(work)] for _ in "ab")
    assert first == second
    assert all(len(set(batch)) == 2 for batch in first)


def test_float16_skips_what_overflows_and_a_checkpoint_keeps_the_scale(tmp_path):
    """Groups of ranks do so under jit, see `program`."""
    engine, split = built(jobs.Steep(), mode="pynative", precision="float16"), [31, 30]
    before = weights(engine)
    reports = [update(engine, split, number) for number in range(8)]
    skipped = [report for report in reports if not report.applied]
    assert [r.loss_scale for r in skipped] == [FIRST_SCALE / 2**n for n in range(len(skipped))]
    assert 0 < len(skipped) < 8
    assert _distance(weights(engine), before) > 0
    extra = engine.save_state(tmp_path)
    other = built(jobs.Steep(), mode="pynative", precision="float16", seed=5)
    other.load_state(tmp_path, extra)
    assert update(other, split, 8).loss_scale == reports[-1].loss_scale


def test_another_models_checkpoint_is_refused(tmp_path):
    class Wider(jobs.Weighted):
        def model(self):
            return nn.SequentialCell([nn.Dense(5, 8), nn.Tanh(), nn.Dense(8, 2)])

    extra = built(mode="pynative").save_state(tmp_path)
    with refused(RunFolderError, f"{tmp_path}/weights.safetensors 0.weight float32[7, 5]"):
        built(Wider(), mode="pynative").load_state(tmp_path, extra)


def test_weights_of_a_compiled_torch_model_are_taken(tmp_path):
    engine, other = (built(mode="pynative", seed=seed) for seed in (0, 5))
    engine.save_state(tmp_path)
    saved = load_file(tmp_path / "weights.safetensors")
    save_file({f"_orig_mod.{name}": array for name, array in saved.items()}, tmp_path / "compiled")
    other.load_weights(tmp_path / "compiled")
    assert other.weights_sha256() == engine.weights_sha256()


@pytest.mark.parametrize(
    ("job", "precision", "names"),
    [
        (jobs.Cut, "float32", "gradient 0.weight"),
        (jobs.Cut, "float16", "gradient 0.weight"),
        (jobs.CutDropped, "float32", "gradient 0.weight"),
        (jobs.Detached, "float32", "compile"),
    ],
)
def test_a_gradient_that_the_compiler_cuts_is_refused(job, precision, names):
    with refused(JobError, f"{names} engine.mode=pynative"):
        update(built(job(), mode="jit", precision=precision), [31, 30])


def test_a_gradient_that_is_nothing_but_rounding_is_not_taken_for_one_that_was_cut():
    assert update(built(jobs.Attentive(), mode="jit", precision="float16"), [30, 31]).applied


@pytest.mark.parametrize("mode", ["pynative", "jit"])
def test_parameters_of_integers_stay_integers_in_float64(mode):
    assert update(built(jobs.Integers(), mode=mode, precision="float64"), [61]).applied


class Noisy(jobs.Counted):
    def loss(self, model, batch):
        x, y, _ = batch
        noise = ops.standard_normal(x.shape)
        return Loss(ops.square(model(x + noise) - y).sum(), weight=len(y))


def test_random_numbers_of_a_loss_do_not_pass_for_a_gradient_that_was_cut():
    with pytest.warns(UserWarning, match=r"loss\(\) "):
        assert update(built(Noisy(), mode="jit"), [31, 30]).plain_step_s == 0


def test_dropout_of_attention_is_warned_of():
    engine = built(jobs.AttentionDropout(), mode="jit")
    assert any(mentions(warning, "dropout attention") for warning in engine.warnings())
    with pytest.warns(UserWarning, match=r"loss\(\) "):
        assert update(engine, [31, 30]).plain_step_s == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_cells_of_mindspore_may_change_what_they_keep_in_python(recompute):
    engine = built(jobs.AttentionDropout(0.0, recompute), mode="jit")
    compiled = update(engine, [31, 30])
    plain = update(built(jobs.AttentionDropout(0.0), mode="pynative"), [31, 30])
    assert compiled.loss == pytest.approx(plain.loss)


@pytest.mark.parametrize("mode", ["jit", "graph", "pynative"])
def test_masks_of_dropout_depend_on_seed_and_position_alone(mode):
    def trained(*windows, **settings):
        engine = built(jobs.Dropped(), mode=mode, **settings)
        assert engine.warnings() == []
        losses = [report.loss for report in run(engine, windows)]
        return losses, engine.weights_sha256()

    two = [make_window(number, [(0, 30), (30, 31)]) for number in range(2)]
    once = trained(*two)
    assert trained(*two) == once
    assert trained(*two, seed=1) != once
    # As drawn by two ranks, of which each has half of the samples.
    halves = [make_window(0, [piece], rate=0.0) for piece in [(0, 30), (30, 30)]]
    same = dataclasses.replace(
        halves[1],
        micro_batches=(dataclasses.replace(halves[1].micro_batches[0], indices=tuple(range(30))),),
    )
    assert trained(halves[0])[0] != trained(same)[0]


@pytest.mark.parametrize(
    ("what", "mode"), [("calls", "jit"), ("beta", "pynative"), ("temperature", "pynative")]
)
def test_plain_values_may_change_where_no_compiled_code_reads_them(what, mode):
    engine = built(jobs.Annealed(what), mode=mode)
    losses = [update(engine, [31, 30], number, rate=0.0).loss for number in range(3)]
    assert (losses[2] == pytest.approx(losses[0])) == (what == "calls")


def test_the_runs_update_is_read_and_changed_modes_are_saved(tmp_path, monkeypatch):
    def trained(engine, first, last):
        for number in range(first, last):
            current_run.set_update(number, 0)
            report = update(engine, [31, 30], number)
        return report.loss, engine.weights_sha256()

    monkeypatch.setattr(current_run, "_update", None)
    monkeypatch.setattr(current_run, "_epoch", None)
    whole = trained(built(jobs.Warming(), mode="pynative"), 0, 4)
    for stop in range(1, 4):
        engine = built(jobs.Warming(), mode="pynative")
        trained(engine, 0, stop)
        folder = tmp_path / str(stop)
        folder.mkdir()
        extra = engine.save_state(folder)
        resumed = built(jobs.Warming(), mode="pynative")
        resumed.load_state(folder, extra)
        assert trained(resumed, stop, 4) == whole


def test_compiled_code_that_reads_the_runs_update_is_refused(monkeypatch):
    monkeypatch.setattr(current_run, "_update", 0)
    engine = built(jobs.Warming(), mode="jit")
    update(engine, [31, 30])
    current_run.set_update(1, 0)
    with refused(JobError, "current_run.update 0 1 loss()"):
        update(engine, [31, 30], 1)


def test_nesterovs_momentum_is_the_same_in_both_precisions():
    given = {"mode": "jit", "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}}
    engines = [built(jobs.Counted(), precision=p, **given) for p in ("float32", "float64")]
    for number in range(3):
        for engine in engines:
            update(engine, [61], number)
    assert _distance(*map(weights, engines)) < 1e-5


def test_an_error_in_plain_python_is_reported_by_python():
    with pytest.raises(AttributeError, match="no_such_method") as caught:
        update(built(jobs.Unknown(), mode="jit"), [31, 30])
    assert caught.traceback[-1].path.name == "jobs.py"


def test_code_that_does_not_compile_is_reported_with_its_line():
    with refused(JobError, "compile engine.mode=pynative") as caught:
        update(built(jobs.Unparsable(), mode="jit"), [31, 30])
    assert "jobs.py, line" in str(caught.value), str(caught.value)
    assert "orchestrator/engine" not in str(caught.value)
    assert "site-packages" not in str(caught.value)


def test_the_frameworks_own_style_gives_the_same_losses_and_weights_as_does_its_model_train():
    def columns():
        x, y, _ = jobs.points()
        return tuple(column[:60].astype(np.float32) for column in (x, y, y[:, 0]))

    both = [jobs.Counted(), jobs.Counted()]
    ours, theirs = (built(job, style=s) for job, s in zip(both, ("own", "framework"), strict=True))
    for number in range(2):
        losses = [update(engine, [15] * 4, number).loss for engine in (ours, theirs)]
        assert abs(losses[0] - losses[1]) < 1e-5
    assert _distance(weights(theirs), weights(ours)) < 1e-6
    assert [job.followed for job in both] == [[0, 1]] * 2
    update(ours, [15] * 4, 2)
    data = NumpySlicesDataset(columns(), shuffle=False).batch(60)
    Model(theirs._cell).train(1, data, dataset_sink_mode=False)
    assert _distance(weights(theirs), weights(ours)) < 1e-6


class ByWeight(jobs.Counted):
    def loss(self, model, batch):
        x, y, w = batch
        return Loss((ops.square(model(x) - y).sum(axis=1) * w).sum(), weight=w.sum())


def test_the_frameworks_own_style_refuses_unequal_micro_batches_and_other_weights():
    with refused(ConfigError, "engine.style=framework 29 samples accumulation.ragged=drop"):
        update(built(jobs.Counted(), style="framework"), [15, 14])
    with refused(JobError, "engine.style=framework Loss.weight engine.style=own"):
        update(built(ByWeight(), style="framework"), [15, 15])


class LaterMasked(ByWeight):
    """Samples from the 46th on count nothing."""

    def dataset(self):
        return [(x, y, float(i < 45)) for i, (x, y, _) in enumerate(super().dataset())]


@pytest.mark.parametrize("first", [False, True])
def test_the_frameworks_own_style_checks_the_weight_of_each_micro_batch(first):
    engine = built(LaterMasked(), style="framework")
    masked = [(30, 15), (45, 15)]
    if not first:
        update(engine, [15, 15])
    before = weights(engine)
    with refused(JobError, "engine.style=framework Loss.weight 0 15 samples update 1"):
        run(engine, [make_window(1, masked, rate=RATE)])
    assert _distance(weights(engine), before) == 0


def test_layers_that_depend_on_the_split_are_named():
    warnings = advice(nn.SequentialCell([nn.Dense(2, 2), nn.BatchNorm1d(2), nn.Dropout(p=0.5)]))
    assert mentions(warnings[0], "batch norm 1"), warnings[0]
    assert mentions(warnings[1], "dropout 2"), warnings[1]


@pytest.mark.parametrize("norm", ["group", "layer", "frozen"])
def test_batch_norms_may_be_frozen_or_replaced_so_that_splits_agree(norm):
    found = []
    for split in ([61], [30, 20, 11]):
        engine = built(jobs.Normed(), mode="pynative", norm=norm)
        update(engine, split)
        found.append(weights(engine))
        warnings = [warning for warning in engine.warnings() if mentions(warning, "batch norm")]
    assert _distance(*found) < 1e-4
    [warning] = warnings
    assert mentions(warning, f"engine.norm={norm} 1 3.norm"), warning
    names = [p.name for p in engine._model.trainable_params()]
    assert {"1.gamma", "3.norm.gamma", "3.dense.weight"} <= set(names)
    assert len(names) == len(set(names))


def test_cpus_never_replace_requested_devices(tmp_path):
    def spec(asked, devices):
        return GroupSpec(
            rank=3,
            size=4,
            local_rank=1,
            node="n1",
            address="127.0.0.1",
            folder=tmp_path,
            transport=asked,
            device_request=devices,
        )

    assert choose_transport(spec("auto", "")) == "mccl"
    assert choose_transport(spec("mccl", "cluster.gpus_per_node=2")) == "mccl"
    with refused(TransportError, "(cluster.slurm_flags.gres=npu:8) rank 3 n1 transport=mccl"):
        choose_transport(spec("auto", "cluster.slurm_flags.gres=npu:8"))


def test_a_rate_that_is_changed_behind_the_engines_back_is_refused():
    with refused(JobError, "Reschedules.optimizer scheduler"):
        built(jobs.Reschedules(scheduler=True), mode="pynative", optimizer={})
    engine = built(jobs.Reschedules(), mode="pynative", optimizer={})
    with refused(JobError, "lr after_update update 0"):
        update(engine, [61])


class Loop:
    """A loop of one's own, whose loss is a method."""

    factor = 1.0

    def total(self, model, batch):
        return model(batch).sum() * self.factor, len(batch), {}


def test_the_loss_of_a_loop_of_ones_own_may_be_a_method():
    loop = Loop()
    accumulator = Accumulator(nn.Dense(5, 2), loop.total, alone(), EngineSettings(mode="jit"))
    assert accumulator.add(ops.ones((3, 5))).asnumpy()[0] == 3
    loop.factor = 2.0
    with refused(JobError, "Loop.factor 1.0 2.0"):
        accumulator.add(ops.ones((3, 5)))


def averaged(model, batch):
    x, y = batch
    return ops.square(model(x) - y).mean(), len(x), {}


@pytest.mark.parametrize("mode", ["pynative", "jit"])
def test_a_mean_is_refused_at_the_first_batch_of_several_samples(mode):
    def batch(samples):
        drawn = np.random.default_rng(samples)
        return tuple(ms.Tensor(drawn.random((samples, n)), ms.float32) for n in (5, 2))

    def accumulator(loss, **more):
        return Accumulator(nn.Dense(5, 2), loss, alone(), EngineSettings(mode=mode), **more)

    own = accumulator(averaged)
    own.add(batch(1))
    with refused(JobError, "Loss.total mean Loss.weight 5 sum"):
        own.add(batch(5))
    accumulator(averaged, refuse_means=False).add(batch(5))

    class Averaged(jobs.Counted):
        def loss(self, model, batch):
            x, y, _ = batch
            return Loss(ops.square(model(x) - y).mean(), weight=len(y))

    with refused(JobError, "Loss.total mean Loss.weight 30 sum"):
        update(built(Averaged(), mode=mode), [30, 31])


class Evaluating(jobs.Weighted):
    def after_update(self, model, update):
        model.set_train(False)


class Stalled(jobs.Counted):
    after_update = Evaluating.after_update


class Half(jobs.Weighted):
    def model(self):
        model = super().model()
        model[2].weight.set_dtype(ms.float16)
        return model


class Another(jobs.Counted):
    """Its optimizer is not of `mindspore.nn`."""

    def optimizer(self, model):
        return optim.SGD(model.trainable_params(), lr=0.1)


class Unmeasured(jobs.Counted):
    """Lacks its metric: tests/engine/torch/test_accumulator.py has all of a loss's contract."""

    metric_names = ("error",)


JIT = {"mode": "jit"}
OWN = {"optimizer": {}}  # the job builds its own
FRAMEWORK_STYLE = {"style": "framework"}


@pytest.mark.parametrize(
    ("job", "settings", "error", "names"),
    [
        (Evaluating, {}, JobError, "Evaluating.loss() model.set_train(False) model.set_train()"),
        (Half, {}, JobError, "2.weight Float16 train.precision=float16"),
        (partial(jobs.Decaying, left_out=1), OWN, ConfigError, "SGD 2.bias"),
        (partial(jobs.Decaying, lambda *_: []), OWN, ConfigError, "Decaying.optimizer list"),
        (jobs.ScaledOptimizer, OWN, JobError, "loss_scale=1024.0 train.precision=float16"),
        (partial(jobs.Thawing, True), {}, JobError, "0.bias began requires_grad"),
        (partial(jobs.Thawing, False), {}, JobError, "0.bias ceased requires_grad"),
        (jobs.Overflowing, {}, NonFiniteError, "gradient 0.weight 0.bias"),
        (jobs.Overflowing, FRAMEWORK_STYLE, NonFiniteError, "loss weight update checkpoint"),
        (jobs.RateOfNN, {**FRAMEWORK_STYLE, **OWN}, JobError, "lr after_update update 0"),
        (Stalled, FRAMEWORK_STYLE, JobError, "Stalled.loss() model.set_train(False)"),
        (partial(jobs.Annealed, "beta"), JIT, JobError, "Annealed.beta 1.0 2.0 ops.assign"),
        (partial(jobs.Annealed, "shift"), JIT, JobError, "Annealed.shift ops.assign"),
        (partial(jobs.Annealed, "temperature"), JIT, JobError, "model.temperature ops.assign"),
        (
            partial(jobs.Annealed, "FACTOR"),
            JIT,
            JobError,
            f"{jobs.__name__}.FACTOR engine.mode=pynative",
        ),
        (partial(jobs.Annealed, "beta"), {**JIT, **FRAMEWORK_STYLE}, JobError, "Annealed.beta"),
        (jobs.NumpyNoise, JIT, JobError, "NumPy ops.standard_normal engine.mode=pynative"),
        (jobs.Assigning, JIT, JobError, "0.bias after_update"),
        (jobs.Labelled, {}, JobError, "batch str 1"),
        (Unmeasured, JIT, JobError, "Loss.metrics 'error'"),
        (jobs.UnmeasuredAttention, JIT, JobError, "Loss.metrics 'error'"),
        (
            jobs.Weighted,
            FRAMEWORK_STYLE,
            ConfigError,
            "engine.style=framework Weighted metric_names",
        ),
        (Another, {**FRAMEWORK_STYLE, **OWN}, ConfigError, "Another.optimizer() engine.style=own"),
        (
            jobs.Counted,
            {**FRAMEWORK_STYLE, "optimizer": {"name": "sgd", "x": True}},
            ConfigError,
            "'x' True",
        ),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused(job, settings, error, names, monkeypatch):
    monkeypatch.setattr(jobs, "FACTOR", 1.0)

    def train():
        engine = built(job(), **{"mode": "pynative", **settings})
        for number in range(2):
            update(engine, [61], number)

    with refused(error, names):
        train()


# ------------------------------------------------------------------ Refusals


FRAMEWORK = (
    "job=line",
    "engine.style=framework",
    "cluster.nodes=1",
    "cluster.ranks_per_node=1",
    "accumulation.ragged=drop",
)


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("cluster.ranks_per_node=2", "engine.style=framework cluster.ranks_per_node=1"),
        ("engine.mode=pynative", "engine.style=framework engine.mode=graph"),
        ("train.clip_norm=1.0", "engine.style=framework train.clip_norm=null"),
        ("accumulation.ragged=update", "engine.style=framework accumulation.ragged=drop"),
        ("accumulation.batch_schedule=[[2,256]]", "engine.style=framework"),
        ("train.on_non_finite=skip", "engine.style=framework train.on_non_finite=stop"),
        ("transport=gloo", "mindspore transport=auto"),
        ("optimizer=adam", "engine.style=framework optimizer=sgd"),
        ("train.precision=bfloat16", "engine.style=framework train.precision=float32"),
    ],
)
def test_the_frameworks_own_style_is_refused_where_it_cannot_be(override, names):
    with refused(ConfigError, f"{override.replace(',', ', ')} {names}"):
        prepare(compose([*FRAMEWORK, override]))


def test_the_frameworks_own_style_is_taken_where_it_can_be():
    prepare(compose(FRAMEWORK))


REPRODUCIBLE = (
    "accumulation.reduction=reproducible",
    "accumulation.micro_batch=8",
    "accumulation.steps=null",
)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            ["job=line", *REPRODUCIBLE],
            "accumulation.reduction=reproducible mindspore accumulation.reduction=fast",
        ),
        (
            ["job=line", "train.precision=float64", "optimizer=adam"],
            "train.precision=float64 optimizer=adam optimizer=adamw",
        ),
        (
            ["job=line", "train.precision=bfloat16"],
            "train.precision=bfloat16 train.precision=float16",
        ),
        (
            ["job=line", "engine.jit_level=O2"],
            "engine.jit_level=O2 mindspore engine.jit_level=auto",
        ),
        (
            ["job=line", "engine.mode=pynative", "engine.jit_level=O1"],
            "engine.jit_level=O1 engine.mode=pynative engine.mode=jit",
        ),
        (["engine.mode=pynative"], "engine.mode=pynative torch MindSpore engine.mode=jit"),
        (["engine.style=framework"], "engine.style=framework torch MindSpore engine.style=own"),
        (["transport=mccl"], "transport=mccl torch transport=gloo"),
    ],
)
def test_settings_that_the_jobs_engine_does_not_have_are_refused(overrides, names):
    with refused(ConfigError, names):
        prepare(compose(overrides))


def test_half_precision_is_taken_where_a_device_has_it():
    device = ["job=line", "train.precision=bfloat16", "transport=hccl"]
    refuse_unsupported(compose(device), "mindspore")
    prepare(compose(["job=line", "train.precision=float16"]))


@pytest.mark.parametrize(
    ("installed", "names"),
    [
        ({}, "MindSpore pip install 'mindspore==2.10.*' 'numpy<2'"),
        ({"mindspore": "2.7.0", "numpy": "1.26.4"}, "MindSpore 2.7.0 'mindspore==2.10.*'"),
        ({"mindspore": "2.10.0", "numpy": "2.4.1"}, "NumPy 2.4.1 pip install 'numpy<2'"),
    ],
)
def test_a_mindspore_that_cannot_work_is_refused(monkeypatch, installed, names):
    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with refused(JobError, names):
        check_installed()
    prepare(compose(["job=line", "+cluster=slurm"]))  # the login node may have none
