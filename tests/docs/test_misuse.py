"""Mistakes with an accumulator or `run.windows`, as users make them, and the message about each.

Rows that need no function of their own have the calls in their order.
"""

import contextlib
import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from orchestrator import Accumulator, Loss, TorchGroup, run_in_threads
from orchestrator.client.run import CurrentRun
from orchestrator.errors import ConfigError, OrchestratorError

BATCH = {"global_batch": 8, "micro_batch": 2, "updates": 3}
ERRORS = (OrchestratorError, ValueError, RuntimeError, TypeError)
GROUPS = []
pytestmark = pytest.mark.filterwarnings(
    "ignore:Using backward.. with create_graph", "ignore:the loop over run.windows.. was left"
)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def accumulated(group=None, model=None, **more):
    model = model or net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Accumulator(model, optimizer, group or TorchGroup.alone(), **more), model


def loss_of(model, samples=2):
    return Loss(model(torch.ones(samples, 4)).square().sum(), weight=samples)


def backward(ours, model, **options):
    ours.backward(loss_of(model), **options)


def last_backward(ours, model):
    backward(ours, model, last=True)


def direct(ours, model):
    """Call `loss.backward()` by habit."""
    loss_of(model).total.backward()


def record(ours, model):
    ours.record(loss_of(model))


def boundary(ours, model):
    ours.boundary()


def begin(ours, model, **options):
    ours.begin_window(**options)


def scale_weights(ours, model):
    model[0].weight.detach().mul_(0.5)


def compute(ours, model, windows=1):
    """Train for so many windows of a micro-step."""
    for _ in range(windows):
        ours.backward(loss_of(model), last=True)
        ours.boundary()


def begun(samples=24, group=None, **options):
    """Return the windows of a loop without a run, the accumulator and its model."""
    ours, model = accumulated(group)
    return CurrentRun({}).windows(samples, ours, **{**BATCH, **options}), ours, model


@contextlib.contextmanager
def one_process_group():
    """Form torch's default group, which its own wrappers need, of this process alone.

    The group lives on: torch's destructor waits for the group's thread while it holds Python's
    lock, for which that thread may wait to release the last collective. That is a deadlock.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    GROUPS.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------ calls of an accumulator


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("no room")


def go_on_after_a_failed_backward(ours, model):
    hidden = Fails.apply(model[0](torch.ones(2, 4)))
    with contextlib.suppress(MemoryError):  # and skip the batch
        ours.backward(Loss(model[2](hidden).sum(), 2))
    ours.backward(loss_of(model))


def go_on_after_a_failed_boundary(ours, model, group):
    ours.backward(loss_of(model))
    if group.rank == 0:
        scale_weights(ours, model)
        with contextlib.suppress(OrchestratorError):
            ours.boundary()
        ours.begin_window()
    ours.boundary()


def go_on_after_a_failed_optimizer(ours, model, group):
    def fail(*_):
        raise MemoryError("no room")

    ours.backward(loss_of(model))
    if group.rank == 0:
        hook = ours.optimizer.register_step_pre_hook(fail)
        with contextlib.suppress(MemoryError):
            ours.boundary()
        hook.remove()
        ours.backward(loss_of(model))
    ours.boundary()


def write_gradients_of_torch_func(ours, model):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.grad(
        lambda w: torch.func.functional_call(model, w, (torch.ones(2, 4),)).sum()
    )(weights)
    for name, parameter in model.named_parameters():
        parameter.grad = found[name]


def create_a_graph_of_the_gradient(ours, model):
    loss = loss_of(model)
    torch.set_warn_always(True)  # a warning that torch gives once stays for tests of it
    loss.total.backward(create_graph=True)
    torch.set_warn_always(False)
    ours.record(loss)


def leave_one_rank_in_eval_mode(ours, model, group):
    torch.manual_seed(0)
    layers = nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)
    ours, model = accumulated(group, nn.Sequential(*layers))
    model.train(mode=group.rank > 0)
    compute(ours, model)


def load_another_optimizers_state(ours, model, group):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    ours = Accumulator(model, optimizer, group, shard_optimizer=True)
    compute(ours, model)
    optimizer.state_dict()


def calls(*steps):
    """Return one function that makes these calls."""

    def misuse(ours, model, group):
        for step in steps:
            step(ours, model)

    return misuse


def on_cross_entropy(ours, model):
    scores = model(torch.ones(2, 4))
    ours.backward(Loss(cross_entropy(scores, torch.tensor([0, 1])), weight=2))


def add_parameters(ours, model):
    ours.optimizer.add_param_group({"params": net().parameters()})


WRITTEN = r"the gradient of .* was written by something else than a backward.*"
ONE_RANK = {
    "before record.. a backward reached .* call begin_window.. before it": [direct, record],
    "begin_window.. came in mid-window: update .* has gradients": [backward, begin],
    "gradients on this rank are not those .* begins it anew": [go_on_after_a_failed_backward],
    "backward.. was called while backward.. of the same accumulator ran": [
        lambda o, m: m[0].weight.register_hook(lambda _: backward(o, m)),
        backward,
    ],
    "call accumulator.boundary.. instead": [backward, lambda o, m: o.optimizer.step()],
    "this accumulator was closed": [lambda o, m: o.close(), backward],
    "Loss.total is a mean, made by .* with reduction='sum'": [on_cross_entropy],
    WRITTEN + "use Accumulator.*clip_norm=": [
        backward,
        lambda o, m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
        backward,
    ],
    WRITTEN + "gradients from torch.func or by hand cannot be accumulated": [
        begin,
        write_gradients_of_torch_func,
        record,
        boundary,
    ],
    WRITTEN + "zero_grad.. is not needed": [
        backward,
        lambda o, m: m.zero_grad(set_to_none=False),
        boundary,
    ],
    "the gradient of .* carries a graph: accumulate by plain backward": [
        begin,
        create_a_graph_of_the_gradient,
        boundary,
    ],
    "parameter .* was changed in mid-window": [backward, scale_weights, boundary],
    "the optimizer was given other parameters after": [add_parameters, begin],
    "other parameters after the accumulator was built": [backward, add_parameters, boundary],
}


@pytest.mark.parametrize("message", ONE_RANK)
def test_wrong_calls_are_refused(message):
    ours, model = accumulated()
    with pytest.raises(ERRORS, match=f"(?s){message}"):
        calls(*ONE_RANK[message])(ours, model, None)


def go_on_after_the_last_micro_step(ours, model, group):
    for _ in range(2 - group.rank):
        last_backward(ours, model)
    ours.boundary()


def expect_another_weight(ours, model, group):
    begin(ours, model, expected_weight=2 + group.rank)
    backward(ours, model)
    ours.boundary()


def change_the_rate_of_another_group(ours, model, group):
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    ours.close()
    ours = Accumulator(model, optimizer, group)
    optimizer.param_groups[1]["lr"] += group.rank
    backward(ours, model)
    ours.boundary()


def begin_other_windows(ours, model, group):
    begun(group=group, global_batch=8 + group.rank)


TWO_RANKS = {
    "micro-step of update .* marked last=True": go_on_after_the_last_micro_step,
    "before boundary.. a backward reached .* call accumulator": calls(direct, boundary),
    "failed on this rank, so it may no longer be in step": go_on_after_a_failed_boundary,
    "and has to end. What failed was MemoryError": go_on_after_a_failed_optimizer,
    "a peer was lost during": lambda *given: compute(*given[:2], 2 + given[2].rank),
    "no gradient reached any parameter in update .*, on any rank": calls(
        lambda o, m: last_backward(o, net()), boundary
    ),
    "ranks do not agree on update .*: expected_weight is": expect_another_weight,
    "ranks do not agree .* rates of further parameter groups is": change_the_rate_of_another_group,
    "ranks do not agree .* layers in training mode is": leave_one_rank_in_eval_mode,
    "call accumulator.optimizer_state.. on all ranks": load_another_optimizers_state,
    "rank 1 differs .* first in global_batch of run.windows": begin_other_windows,
}


@pytest.mark.parametrize("message", TWO_RANKS)
def test_what_one_of_two_ranks_does_wrong_is_refused(message):
    """Nothing is closed: the first error is the one that counts."""
    with pytest.raises(ERRORS, match=f"(?s){message}"):
        run_in_threads(2, lambda group: TWO_RANKS[message](*accumulated(group), group))


def unfreeze_later():
    model = net()
    model[0].requires_grad_(requires_grad=False)
    ours, _ = accumulated(model=model)
    model[0].requires_grad_()
    ours.begin_window()


def accumulate_with(model, optimizer):
    return Accumulator(model, optimizer, TorchGroup.alone())


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def forget_a_layer():
    model = net()
    accumulate_with(model, optimizer_of(model[2]))


def use_a_leaf_without_leaves():
    backward(*accumulated(reduction="reproducible"), leaf=0)


def record_reproducible():
    ours, model = accumulated(reduction="reproducible")
    ours.begin_window(leaves=1)
    direct(ours, model)
    record(ours, model)


ALONE = {
    "lacks .*, which no step would change": forget_a_layer,
    "the optimizer gives 2 optimizers, and an accumulator has one": lambda: accumulate_with(
        net(), {part: optimizer_of(net()) for part in "02"}
    ),
    "is a lazy layer's: call": lambda: accumulated(model=nn.Sequential(nn.LazyLinear(3))),
    "began to require gradients after": unfreeze_later,
    r"backward\(leaf=.*\) goes with begin_window\(leaves=": use_a_leaf_without_leaves,
    "record.. is for reduction='fast'": record_reproducible,
    "a process group of torch.* after init_process_group": lambda: TorchGroup.wrap(None),
    "metric_names must be a list": lambda: accumulated(metric_names="accuracy"),
}


@pytest.mark.parametrize("message", ALONE)
def test_what_cannot_be_accumulated_is_refused(message):
    with pytest.raises(ERRORS, match=f"(?s){message}"):
        ALONE[message]()


@pytest.mark.parametrize(
    "wrong", [optimizer_of(net()), nn.Linear, net().state_dict(), None, [net()[0]]]
)
def test_a_model_must_be_a_module_or_parameters(wrong):
    with pytest.raises(ConfigError, match=r"model must be a torch\.nn\.Module, or its parameters"):
        accumulate_with(wrong, optimizer_of(net()))


WRAPPED = {
    r"model is wrapped in Dist.* the module within, model\.module": lambda: accumulated(
        model=nn.parallel.DistributedDataParallel(net())
    ),
    "is a DTensor that no fully_shard.. made": lambda: accumulated(
        model=distribute_module(net(), init_device_mesh("cpu", (1,)))
    ),
    r"group must be a TorchGroup: TorchGroup\.wrap": lambda: accumulated(group=dist.group.WORLD),
}


@pytest.mark.parametrize("message", WRAPPED)
def test_wrappers_of_torch_are_refused(message):
    with one_process_group(), pytest.raises(ERRORS, match=message):
        WRAPPED[message]()


def test_micro_steps_without_a_boundary_are_reported(capsys):
    ours, model = accumulated()
    compute(ours, model)
    ours.backward(loss_of(model))
    del ours
    gc.collect()
    said = capsys.readouterr().err
    assert "were accumulated and trained nothing: boundary() was not called after them" in said


# ------------------------------------------------------------------ run.windows


def pieces(window, ours, model, **options):
    for piece in window:
        ours.backward(loss_of(model, len(piece)), **options)


def whole(window, ours, model):
    pieces(window, ours, model)
    ours.boundary()


def go_through(body, most=None):
    """Use `body` as the body of a loop over windows."""
    windows, ours, model = begun()
    for window in itertools.islice(windows, most):
        body(window, ours, model)


def skip_a_micro_batch(window, ours, model):
    for number, piece in enumerate(window):
        if number != 1:
            ours.backward(loss_of(model, len(piece)))


def break_off(window, ours, model):
    for piece in window:
        ours.backward(loss_of(model, len(piece)))
        break
    ours.boundary()


def compute_twice(window, ours, model):
    for piece in window:
        for _ in range(2):
            ours.backward(loss_of(model, len(piece)))


def compute_after_the_window(window, ours, model):
    whole(window, ours, model)
    ours.backward(loss_of(model))


@pytest.mark.parametrize(
    ("message", "body"),
    [
        ("micro-batch .* was taken, but not computed", skip_a_micro_batch),
        ("boundary.. came after 1 of the 4 micro-batches", break_off),
        ("the loop left update .* unfinished.* boundary.. was not called", pieces),
        ("backward.. came for micro-step 2 of .* 1 of its 4 .* compute it once", compute_twice),
        ("backward.. came after boundary.. of .* before the next window", compute_after_the_window),
        ("begins its windows itself", lambda _, ours, model: ours.begin_window()),
        ("leave both out", lambda *given: pieces(*given, last=True)),
    ],
)
def test_what_a_window_is_not_made_for_is_refused(message, body):
    with pytest.raises(ERRORS, match=f"(?s){message}"):
        go_through(body)


def test_a_loop_that_is_left_in_mid_window_warns():
    with pytest.warns(match="was left after .* updates, within update .*: its micro-steps train"):
        go_through(pieces, most=1)


def test_windows_are_gone_through_once():
    run = CurrentRun({})
    ours, model = accumulated()
    windows = run.windows(24, ours, **BATCH)
    for window in windows:
        whole(window, ours, model)
    with pytest.raises(ERRORS, match="are one training, and were gone through already"):
        next(iter(windows))
    with pytest.raises(ERRORS, match="called before for this accumulator: one call is the whole"):
        run.windows(24, ours, **BATCH)


def test_a_window_that_was_kept_is_over():
    windows, ours, model = begun()
    one_after_another = iter(windows)
    kept = next(one_after_another)
    whole(kept, ours, model)
    next(one_after_another)
    with pytest.raises(ERRORS, match=r"the window of update .* is over"):
        whole(kept, ours, model)


def test_the_loop_reports_and_stops_by_itself():
    run = CurrentRun({})
    ours, model = accumulated()
    for window in run.windows(24, ours, **BATCH):
        whole(window, ours, model)
        with pytest.raises(ERRORS, match="which reports, saves and stops by itself"):
            run.should_stop(window.update)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (r"run\.windows\(\): global_batch=8, steps=3 and micro_batch=2 disagree", {"steps": 3}),
        ("must be a whole number, 1 or more", {"samples": TensorDataset(torch.ones(3))}),
        ("no option 'globl_batch' .* did you mean 'global_batch'", {"globl_batch": 8}),
        ("must have state_dict.. and load_state_dict", {"state": {"epoch": 3}}),
    ],
)
def test_wrong_options_of_windows_are_refused(message, options):
    with pytest.raises(ERRORS, match=message):
        begun(**options)


def test_one_of_several_accumulators_has_to_be_named():
    kept = [accumulated(), accumulated()]
    assert len(kept) == 2
    with pytest.raises(ERRORS, match="accumulators: say whose windows they are"):
        CurrentRun({}).windows(24, **BATCH)


def test_ranks_that_would_train_alone_are_refused(monkeypatch):
    ours, model = accumulated()
    variables = {"ORCHESTRATOR_RUN": "/nowhere", "ORCHESTRATOR_WORLD_SIZE": "4"}
    with pytest.raises(ERRORS, match="this run has 4 ranks, but the accumulator's group has 1"):
        CurrentRun(variables).windows(24, ours, **BATCH)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ERRORS, match=r"WORLD_SIZE=3, but .* each of the 3 ranks would train alone"):
        Accumulator(model, optimizer_of(model))
