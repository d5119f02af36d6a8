"""The accumulator outside any loop: what it refuses, what it survives, what it counts."""

import gc
import math
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from orchestrator import Loss
from orchestrator.engine.torch import Accumulator, TorchGroup
from orchestrator.errors import ConfigError, JobError, NonFiniteError, SilenceError
from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.plan.wire import Wire
from tests.engine.torch.jobs import numbers_of, sgd_accumulator
from tests.refusals import refused

WIDTH = 6


def _model(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1), *extra)


def _accumulator(group=None, model=None, **more):
    model = model or _model()
    return sgd_accumulator(model, group, **more), model


def _loss(model, scale=1.0):
    return Loss((model(torch.ones(2, WIDTH)) * scale).sum(), weight=2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [64, 100, 256, 10**6])
@pytest.mark.parametrize("shard", [False, True])
def test_an_update_sends_what_the_plan_says(ranks, bucket_bytes, shard):
    steps, given = 3, {"bucket_bytes": bucket_bytes, "shard_optimizer": shard}

    def train(group):
        ours, model = _accumulator(group, metric_names=("right",), **given)
        reports = []
        for _ in range(2):
            for step in range(steps):
                total = _loss(model).total
                ours.backward(Loss(total, 2, {"right": 1}), last=step == steps - 1)
            reports.append(ours.boundary())
        return reports, ours.parameter_count()

    for reports, parameters in run_in_threads(ranks, train):
        sizes = {"itemsize": 4, "metric_count": 1, "bucket_bytes": bucket_bytes}
        wire = Wire(**sizes, ranks=ranks, sharded=shard)
        for report in reports:
            assert report.collectives == wire.collectives(parameters)
            assert report.bytes_on_wire == wire.bytes_sent(parameters)
            assert report.metrics == {"right": 0.5}


# ------------------------------------------------------------------ not finite


@pytest.mark.parametrize(
    ("bad", "reduction"), [(math.nan, "fast"), (math.inf, "fast"), (math.nan, "reproducible")]
)
def test_a_loss_that_is_not_finite_stops_all_ranks_naming_one(bad, reduction):
    def train(group):
        ours, model = _accumulator(group, reduction=reduction)
        before = numbers_of(model)
        ours.begin_window(update=7, leaves=6)
        for step in range(2):
            scale = bad if (group.rank, step) == (1, 1) else 1.0
            ours.backward(_loss(model, scale=scale), last=step == 1, leaf=2 * group.rank + step)
        with pytest.raises(NonFiniteError) as caught:
            ours.boundary()
        assert torch.equal(numbers_of(model), before)
        ours.close()
        return str(caught.value)

    messages = run_in_threads(3, train)
    assert len(set(messages)) == 1
    assert "in update 7, first on rank 1, micro-step 1;" in messages[0]


def _expect_equal_bits(one, other):
    """Compare what two ranks return of `one` with what they return of `other`."""
    for found, wanted in zip(run_in_threads(2, one), run_in_threads(2, other), strict=True):
        assert torch.equal(found, wanted)


def test_a_window_after_a_failed_one_is_as_if_nothing_had_been():
    def train(group, fail):
        ours, model = _accumulator(group, on_non_finite="skip")
        if fail:
            ours.backward(_loss(model, scale=math.nan if group.rank else 1.0), last=True)
            report = ours.boundary()
            assert not report.applied
            assert math.isnan(report.loss)
        ours.backward(_loss(model), last=True)
        assert ours.boundary().applied
        return numbers_of(model)

    _expect_equal_bits(partial(train, fail=True), partial(train, fail=False))


@pytest.mark.parametrize("shard", [False, True])
def test_a_gradient_that_is_not_finite_stops_all_ranks_naming_parameters(shard):
    def train(group):
        ours, model = _accumulator(group, shard_optimizer=shard)
        loss = _loss(model)
        if group.rank == 1:  # finite, with a gradient that is not: the root's slope at 0
            loss = Loss((model(torch.ones(1, WIDTH)) * 0.0).sqrt().sum(), 1.0)
        ours.backward(loss, last=True)
        with pytest.raises(NonFiniteError, match=r"the gradient became NaN .*0\.weight"):
            ours.boundary()
        ours.close()

    run_in_threads(2, train)


# ------------------------------------------------------------------ the job's contract


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda rows: None, "Loss(total, weight) NoneType"),
        (lambda rows: rows.sum(), "Loss(total, weight) tensor"),
        (lambda rows: Loss(rows, 2), "torch.float32 (2, 1)"),
        (lambda rows: Loss(1.0, 2), "1.0 .item()"),
        (lambda rows: Loss(rows.sum().detach(), 2, {"right": 1}), "graph"),
        (lambda rows: Loss(rows.sum(), None), "Loss.weight"),
        (lambda rows: Loss(rows.sum(), 2, None), "Loss.metrics"),
        (lambda rows: Loss(rows.sum(), 2, {"right": "x"}), "Loss.metrics['right']"),
        (lambda rows: Loss(rows.sum(), 2, {"rigt": 1}), "'rigt' 'right'"),
        (lambda rows: Loss(rows.sum(), 2), "'right'"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_refused(make, names):
    ours, model = _accumulator(metric_names=("right",))
    with refused(JobError, names):
        ours.backward(make(model(torch.ones(2, WIDTH))))


def test_a_model_without_anything_to_train_is_refused():
    model = _model().requires_grad_(requires_grad=False)
    with refused(JobError, "parameter"):
        _accumulator(model=model)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"clip_norm": 0.0}, "clip_norm 0"),
        ({"bucket_bytes": 2}, "bucket 2"),
        ({"on_non_finite": "ignore"}, "stop skip"),
        ({"precision": "bfloat61"}, "train.precision=bfloat61 bfloat16"),
        ({"reduction": "reproducable"}, "reproducible"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings, names):
    with refused(ConfigError, names):
        _accumulator(**settings)


# ------------------------------------------------------------------ what users do


def test_a_backward_run_by_other_code_is_recorded():
    """As a pipeline's schedule does it."""

    def train(group, record):
        ours, model = _accumulator(group)
        ours.begin_window()
        for _ in range(2):
            loss = _loss(model)
            if record:
                loss.total.backward()
                ours.record(loss)
            else:
                ours.backward(loss)
        assert ours.boundary().weight == 8.0
        return numbers_of(model)

    _expect_equal_bits(partial(train, record=True), partial(train, record=False))


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_a_released_accumulator_frees_its_gradient(shard_optimizer):
    def train(group):
        ours, model = _accumulator(group, shard_optimizer=shard_optimizer)
        ours.backward(_loss(model))
        buffers = weakref.ref(ours.buffers)
        ours.close(release=True)
        ours.close(release=True)  # as when the next group is lost while it forms
        return buffers() is None and all(p.grad is None for p in model.parameters())

    assert run_in_threads(2, train) == [True, True]


def test_record_declares_only_the_backwards_before_it():
    ours, model = _accumulator()
    ours.begin_window()
    recorded = _loss(model)
    recorded.total.backward()
    ours.record(recorded)
    _loss(model).total.backward()
    with pytest.raises(JobError, match="without the accumulator's knowledge"):
        ours.boundary()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_give_the_same_gradient(reentrant):
    def train(group, checkpoints):
        ours, model = _accumulator(group, bucket_bytes=64)
        x = torch.ones(2, WIDTH, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=reentrant) if checkpoints else model(x)
        ours.backward(Loss(y.sum(), 2), last=True)
        ours.boundary()
        return numbers_of(model)

    _expect_equal_bits(partial(train, checkpoints=True), partial(train, checkpoints=False))


def test_a_gradient_that_grows_after_it_was_sent_is_noticed():
    def train(group):
        torch.manual_seed(0)
        shared = nn.Linear(WIDTH, WIDTH)
        ours, _ = _accumulator(group, shared, bucket_bytes=8)
        x = torch.ones(2, WIDTH, requires_grad=True)
        for _ in range(2):
            x = checkpoint(shared, x, use_reentrant=True)
        ours.backward(Loss(x.sum(), 2), last=True)

    with pytest.raises(JobError, match=r"grew after it was sent: .* overlap=False"):
        run_in_threads(2, train)


def test_channels_last_parameters_get_gradients_with_their_strides():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    ours = sgd_accumulator(model)
    x = torch.randn(2, 3, 5, 5)
    ours.backward(Loss(model(x).square().sum(), 2), last=True)
    wanted = torch.autograd.grad(model(x).square().sum(), model.weight)[0]
    assert model.weight.grad.stride() == model.weight.stride()
    torch.testing.assert_close(model.weight.grad, wanted)


def test_a_compiled_model_is_taken_as_the_one_that_it_wraps_and_gives_the_same_gradient():
    def train(group, compiled):
        model = _model()
        run = torch.compile(model, backend="aot_eager") if compiled else model
        ours = sgd_accumulator(run, group)
        for step in range(2):
            ours.backward(_loss(run), last=step == 1)
        ours.boundary()
        return numbers_of(model)

    _expect_equal_bits(partial(train, compiled=True), partial(train, compiled=False))


def test_buckets_leave_during_the_last_backward_and_not_before():
    def train(group):
        ours, model = _accumulator(group, bucket_bytes=64)
        sent, before = [], group.counters.collectives
        for step in range(3):
            ours.backward(_loss(model), last=step == 2)
            sent.append(group.counters.collectives - before)
        return sent, ours.boundary().collectives

    for sent, whole in run_in_threads(2, train):
        assert sent[:2] == [0, 0]
        assert 0 < sent[2] < whole


def test_batch_norm_is_warned_of_once():
    ours, model = _accumulator(model=_model(nn.BatchNorm1d(1)))
    for update in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            ours.backward(_loss(model))
        ours.boundary()
        assert [one.filename for one in found] == [__file__] * (update == 0)


def test_an_expected_weight_that_cannot_be_one_is_refused():
    ours, model = _accumulator()
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="`expected_weight` must be above 0"):
            ours.begin_window(expected_weight=wrong)
    ours.begin_window(expected_weight=2.0)
    with pytest.raises(ConfigError, match=r"record\(\) is not for `expected_weight`"):
        ours.record(_loss(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [200.0, 3000.0, 1e8])
def test_expected_weight_does_not_round_gradients_in_half_precision(dtype, weight):
    def gradient(expected_weight):
        parameter = nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        accumulator = Accumulator([parameter], optimizer, TorchGroup.alone())
        accumulator.begin_window(expected_weight=expected_weight)
        accumulator.backward(Loss((parameter * 96).sum(), weight=weight))
        accumulator.boundary()
        return accumulator.buffers.flat_grads[0]

    exact = torch.full((4,), 96 / weight)
    assert torch.allclose(gradient(weight), exact, rtol=1e-6, atol=0.0)
    assert torch.allclose(gradient(None), exact, rtol=1e-6, atol=0.0)


def test_half_precision_total_whose_factor_is_rounded_is_warned_of():
    """Autocast of the user's own is not known when a window begins."""
    for dtype, weight in ((torch.bfloat16, 200.0), (torch.bfloat16, 256.0), (torch.float32, 200.0)):
        ours, model = _accumulator()
        ours.begin_window(expected_weight=weight)
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            ours.backward(Loss(_loss(model).total.to(dtype), weight=200))
        is_rounded = dtype == torch.bfloat16 and weight == 200.0
        assert ["factor of its gradient (0.005)" in str(r.message) for r in records] == (
            [True] * is_rounded
        )


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.bfloat16, "256"), (torch.float16, "2048"), (torch.float32, "")]
)
def test_figures_in_half_precision_are_warned_of(dtype, most):
    ours, model = _accumulator(metric_names=("weight",))
    count = torch.ones(4, dtype=dtype).sum()
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        ours.backward(Loss(_loss(model).total, weight=count, metrics={"weight": count}))
    sentences = [str(record.message) for record in records]
    figures = ("Loss.weight", "Loss.metrics['weight']") if most else ()
    for figure, sentence in zip(figures, sentences, strict=True):
        assert f"{figure} is a {str(dtype)[6:]} number" in sentence
        assert f"whole numbers up to {most} only" in sentence


def test_a_window_that_could_not_begin_keeps_nothing_of_the_one_before():
    ours, model = _accumulator()
    ours.backward(_loss(model))
    ours.boundary()
    with pytest.raises(ValueError, match="learning_rate"):
        ours.begin_window(learning_rate=-1.0)
    with pytest.raises(JobError, match="begins it anew"):
        ours.backward(_loss(model))
    ours.begin_window(learning_rate=0.1)
    ours.backward(_loss(model))
    assert ours.boundary().micro_steps == 1


def test_a_window_whose_warning_was_an_error_has_to_begin_anew():
    ours, model = _accumulator(model=_model(nn.BatchNorm1d(1)))
    loss = _loss(model)
    with pytest.raises(UserWarning, match="batch norm"):  # pytest makes errors of warnings
        ours.backward(loss)
    with pytest.raises(JobError, match="begins it anew"):
        ours.backward(loss)
    ours.begin_window()
    ours.backward(loss)
    assert ours.boundary().micro_steps == 1


def test_a_recorded_backward_under_float16_is_refused_as_it_was_not_scaled():
    ours, model = _accumulator(precision="float16")
    ours.begin_window()
    with pytest.raises(ConfigError, match="has not scaled its loss"):
        ours.record(_loss(model))
    ours.backward(_loss(model))
    assert ours.boundary().micro_steps == 1


def test_one_that_is_dropped_in_mid_window_does_not_disturb_the_next():
    dropped, model = _accumulator()
    dropped.backward(_loss(model), last=True)  # then, say, memory ran out
    del dropped
    gc.collect()
    ours = sgd_accumulator(model)
    for last in (False, True):
        ours.backward(_loss(model), last=last)
    assert ours.boundary().micro_steps == 2


def test_a_stop_request_of_one_rank_reaches_all():
    def train(group):
        ours, model = _accumulator(group)
        ours.backward(_loss(model), last=True)
        return ours.boundary(stop=group.rank == 1).stop_requested

    assert run_in_threads(3, train) == [True] * 3


def test_only_a_change_of_which_parameters_are_used_costs_one_more_collective():
    def train(group):
        model = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in range(2)])
        ours = sgd_accumulator(model, group, warn_about_layers=False, broadcast=True)
        counts = []
        for update in range(4):
            mine = 0 if group.rank == 0 or update == 3 else 1
            ours.backward(_loss(model[mine]), last=True)
            report = ours.boundary()
            counts.append((report.collectives, report.exchanges))
        return counts

    changed = (2, 1)
    assert run_in_threads(2, train) == [[changed, (1, 0), (1, 0), changed]] * 2


# ------------------------------------------------------------------ several accumulators, and none


def _two_parts(group, **more):
    """Return a model and an accumulator for each of its two layers."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    return model, [sgd_accumulator(layer, group, **more) for layer in model]


@pytest.mark.parametrize("more", [{"expected_weight": 2.0}, {"precision": "float16"}])
def test_a_backward_that_another_accumulator_scaled_cannot_be_recorded(more):
    options = {key: value for key, value in more.items() if key == "precision"}
    window = {key: value for key, value in more.items() if key != "precision"}
    group = TorchGroup.alone()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    first, second = sgd_accumulator(model[0], group, **options), sgd_accumulator(model[1], group)
    first.begin_window(**window)
    second.begin_window()
    loss = _loss(model)
    first.backward(loss)
    with pytest.raises(ConfigError, match="the backward of another accumulator that scaled its"):
        second.record(loss)
    second.begin_window()  # discards it
    second.backward(_loss(model))


def test_where_a_window_is_not_silent_no_bucket_leaves_before_the_boundary():
    def train(group):
        ours, model = _accumulator(group, silent=False, bucket_bytes=64)
        before = group.mark()
        ours.backward(_loss(model), last=True)
        return group.since(before).collectives, ours.boundary().collectives

    assert all(early == 0 < sent for early, sent in run_in_threads(2, train))


def test_a_boundary_leaves_other_open_windows_silent():
    group = TorchGroup.alone()
    model, (first, second) = _two_parts(group)
    first.begin_window()
    second.begin_window()
    first.backward(_loss(model))
    first.boundary()
    with pytest.raises(SilenceError, match="in mid-window of update 0"):
        group.all_reduce_sum(torch.ones(1))
    second.begin_window()
    second.backward(_loss(model))
    second.boundary()
    group.all_reduce_sum(torch.ones(1))


@pytest.mark.parametrize("way", ["close", "drop"])
def test_an_accumulator_that_ends_in_mid_window_ends_its_silence(way):
    group = TorchGroup.alone()
    ours, model = _accumulator(group)
    ours.backward(_loss(model))
    if way == "close":
        ours.close()
    del ours
    gc.collect()
    group.all_reduce_sum(torch.ones(1))


def test_one_that_could_not_be_built_guards_nothing():
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="did you mean 'reproducible'") as kept:
        Accumulator(model, optimizer, reduction="reproducable")
    ours = Accumulator(model, optimizer)
    ours.backward(_loss(model))
    assert ours.boundary().applied, kept


class Remembering(torch.optim.SGD):
    """Extrapolates from the last gradient, of which it keeps no copy."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            last = self.state[parameter].get("last", parameter.grad)
            parameter.sub_(2 * parameter.grad - last)
            self.state[parameter]["last"] = parameter.grad


def test_an_optimizer_that_keeps_the_gradient_itself_is_refused():
    model = _model()
    ours = Accumulator(model, Remembering(model.parameters(), 0.1), TorchGroup.alone())
    ours.backward(_loss(model), last=True)
    with refused(ConfigError, "Remembering .grad 'last' p.grad.clone()"):
        ours.boundary()


def test_an_optimizer_may_have_no_learning_rate():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return closure

    model = _model()
    optimizer = Own(model.parameters(), lr=0.1)
    for group in optimizer.param_groups:
        group["lr"] = None
    ours = Accumulator(model, optimizer)
    ours.backward(_loss(model))
    assert ours.boundary().applied


def test_ranks_that_do_not_all_broadcast_are_told_so():
    def build(group):
        with refused(JobError, "broadcast True"):
            _accumulator(group, broadcast=group.rank == 2)

    run_in_threads(3, build)
