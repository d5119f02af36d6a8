"""`run.windows`: the big batch's updates in a loop of one's own, wherever it was stopped."""

import gc
import json
import os
import random
import signal
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from orchestrator import (
    Accumulator,
    ConfigError,
    JobError,
    Loss,
    Shards,
    TorchGroup,
    run_in_threads,
)
from orchestrator.callbacks import Callback
from orchestrator.client.run import CurrentRun
from orchestrator.errors import NonFiniteError, RunFolderError
from orchestrator.local_ranks.processes import run_ranks
from orchestrator.plan.order import DataOrder
from orchestrator.rundir.program_link import ATTEMPT, RUN, WARNINGS
from orchestrator.rundir.warnings import read_warnings
from tests.engine.torch.jobs import numbers_of, sgd_accumulator
from tests.refusals import refused
from tests.run_folders import make_run, record

pytestmark = pytest.mark.whole_runs

SAMPLES = 53
X = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


def net(dropout=0.0):
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def backward(ours, model, piece):
    total = cross_entropy(model(X[piece]), Y[piece], reduction="sum")
    ours.backward(Loss(total, weight=len(piece)))


class Training:
    """One start of a rank's loop, and its record."""

    def __init__(self, group, *, dropout=0.0, stops=None, wobbles=False, freezes=False, **options):
        """Train.

        Args:
            stops: after how many micro-steps of this start the rank hears of a stop.
            freezes: a layer is frozen after some updates, and dropout is switched off.
        """
        self.run, model = CurrentRun({}), net(dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        rate = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        reduction = "reproducible" if wobbles else "fast"
        ours = Accumulator(model, optimizer, group, clip_norm=0.5, reduction=reduction)
        if "checkpoints" in options:
            options["state"] = {"rate": rate}
        steps, self.updates, self.collectives = 0, [], []
        self.windows = self.run.windows(SAMPLES, ours, **options)
        for window in self.windows:
            for piece in window:
                backward(ours, model, piece)
                steps += 1
                if steps == stops:
                    self.run._stop._handle(15, None)
            report = ours.boundary()
            rate.step()
            if freezes and window.update == 3:
                model[0].requires_grad_(False)
                model[2].eval()
            self.updates.append(window.update)
            self.collectives.append(report.collectives)
        ours.close()
        self.weights = numbers_of(model)


def big_batches(global_batch, updates, ragged, stages=()):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    order = DataOrder(
        dataset_samples=SAMPLES, global_batch=global_batch, ragged=ragged, batch_schedule=stages
    )
    for update in range(updates):
        these = torch.from_numpy(order.indices(update).copy())
        optimizer.zero_grad()
        cross_entropy(model(X[these]), Y[these]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        rate.step()
    return numbers_of(model)


@pytest.mark.filterwarnings("ignore:ragged=drop", "ignore:.*idle", "ignore:.*takes? .*micro-step")
@pytest.mark.parametrize("ragged", ["update", "drop", "carry"])
@pytest.mark.parametrize(
    ("ranks", "batch"),
    [
        (1, {"global_batch": 17, "micro_batch": 4}),
        (2, {"global_batch": 17, "steps": 3}),
        (3, {"global_batch": 20, "micro_batch": 3}),
        (3, {"steps": 2, "micro_batch": 4}),
        (5, {"global_batch": 3, "micro_batch": 2}),
        (2, {"global_batch": 11, "steps": 2, "batch_schedule": [[2, 17], [4, 40], [6, 9]]}),
        (3, {"global_batch": 7, "micro_batch": 3, "batch_schedule": [[1, 8], [5, 53]]}),
    ],
)
def test_the_loop_takes_the_big_batchs_steps_on_any_ranks(ranks, batch, ragged):
    found = run_in_threads(
        ranks, lambda group: Training(group, **batch, updates=7, ragged=ragged, seed=0)
    )
    stages = tuple(map(tuple, batch.get("batch_schedule", ())))
    wanted = big_batches(found[0].windows.plan.batch.global_batch, 7, ragged, stages)
    for one in found:
        torch.testing.assert_close(one.weights, wanted, rtol=1e-12, atol=1e-13)
        assert set(one.collectives) == {int(ranks > 1)}


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [1, 3])
def test_stopped_at_random_ranks_and_moments_it_ends_with_the_same_bits(
    tmp_path, ranks, seed, freezes
):
    how = {"global_batch": 16, "micro_batch": 3, "updates": 12, "dropout": 0.3 * (ranks == 1)}
    how["freezes"] = freezes
    undisturbed = run_in_threads(ranks, lambda group: Training(group, **how))
    draw, seen = random.Random(seed), []
    for _ in range(30):
        asked = {rank: draw.randint(1, 9) for rank in draw.sample(range(ranks), 1)}
        starts = run_in_threads(
            ranks,
            lambda group, asked=asked: Training(
                group,
                **how,
                stops=asked.get(group.rank),
                checkpoints=tmp_path,
                checkpoint_every=0,
            ),
        )
        assert len({tuple(one.updates) for one in starts}) == 1, "they leave together"
        if not freezes:  # ranks exchange which parameters are used when that changes
            assert {n for one in starts for n in one.collectives} <= {int(ranks > 1)}
        seen += starts[0].updates
        if not starts[0].run.stopping:
            break
    assert seen == [*range(12)]
    assert all(one.weights.equal(undisturbed[0].weights) for one in starts)


@pytest.mark.filterwarnings("ignore:.*leaves do not divide", "ignore:.*so it ends before")
@pytest.mark.parametrize("schedule", [(), [[5, 22], [7, 9]]])
def test_killed_anywhere_it_goes_on_from_the_newest_checkpoint_on_other_ranks(tmp_path, schedule):
    """With reduction="reproducible" to the same bits, although 3 ranks go on for 1."""
    how = {"global_batch": 16, "micro_batch": 4, "wobbles": True, "batch_schedule": schedule}
    (undisturbed,) = run_in_threads(1, lambda group: Training(group, **how, updates=9))
    run_in_threads(
        1, lambda g: Training(g, **how, updates=6, checkpoints=tmp_path, checkpoint_every=2)
    )
    starts = run_in_threads(
        3, lambda group: Training(group, **how, updates=9, checkpoints=tmp_path)
    )
    assert starts[2].updates == [6, 7, 8]
    assert all(one.weights.equal(undisturbed.weights) for one in starts)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({"global_batch": 15}, "global_batch 15 16"),
        ({"batch_schedule": [[4, 9]]}, "batch_schedule [[4, 9]]"),
        ({"seed": 1}, "seed 1"),
        ({"ragged": "carry"}, "ragged carry"),
        ({"updates": 2}, "updates=2 updates=3"),
        ({"shards": Shards((50, 3), 4)}, "shards 4 2"),
        ({"shards": None}, "shards None [50, 3]"),
    ],
)
def test_another_training_than_the_one_that_was_begun_is_refused(tmp_path, other, names):
    begun = {"global_batch": 16, "micro_batch": 4, "updates": 3, "checkpoints": tmp_path}
    begun["shards"] = Shards((50, 3), 2)
    Training(TorchGroup.alone(), **begun)
    with refused(ConfigError, names):
        Training(TorchGroup.alone(), **begun | other)
    assert Training(TorchGroup.alone(), **begun | {"updates": 4}).updates == [3]


def _train(folder, updates):
    """Train on one rank, to a checkpoint; return its model and accumulator."""
    ours = sgd_accumulator(model := net())
    how = {"global_batch": 16, "micro_batch": 4, "updates": updates, "checkpoints": folder}
    for window in CurrentRun({}).windows(SAMPLES, ours, **how):
        for piece in window:
            backward(ours, model, piece)
        ours.boundary()
    return model, ours, how


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_refusal_the_corrected_call_is_allowed(tmp_path, ranks):
    *_, how = _train(tmp_path, updates=5)

    def rank(group):
        ours, run = sgd_accumulator(net(), group), CurrentRun({})
        with refused(ConfigError, "updates=3 updates=5"):
            run.windows(SAMPLES, ours, **how | {"updates": 3})
        return run.windows(SAMPLES, ours, **how | {"updates": 7}).first

    assert run_in_threads(ranks, rank) == [5] * ranks


def test_a_second_call_for_an_accumulator_restores_nothing(tmp_path):
    model, ours, how = _train(tmp_path, updates=2)
    with torch.no_grad():
        model[0].weight += 1.0
    before = numbers_of(model)
    with refused(JobError, "run.windows()"):
        CurrentRun({}).windows(SAMPLES, ours, **how)
    assert numbers_of(model).equal(before)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("micro_tokens", (20, 30)),
        ("pad_to", (1, 2)),
        ("balance", ("even", "measured")),
        ("cost", (lambda length, n: n * length, lambda length, n: n * length**2)),
    ],
)
def test_ranks_that_would_form_other_micro_steps_are_refused(name, values):
    """Else samples would be computed twice, and others by no rank."""
    options = {"global_batch": 16, "micro_tokens": 20, "lengths": [1 + n % 9 for n in range(53)]}

    def rank(group):
        with refused(JobError, name):
            Training(group, **options | {name: values[group.rank]})

    run_in_threads(2, rank)


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ({"state": torch.nn.Linear(1, 1)}, "state state={'rate': scheduler}"),
        ({"callbacks": Callback()}, "callbacks callbacks=[losses]"),
        ({"callbacks": [print]}, "callbacks orchestrator.callbacks.Callback"),
        ({"shards": [50, 3]}, "shards shards=data.shards [50, 3]"),
        ({"checkpoints": ""}, "checkpoints ''"),
        ({"total_samples": 9, "epochs": 2}, "epochs=2 total_samples=9"),
        ({"ragged": "cary"}, "run.windows() ragged carry"),
        ({"batch_schedule": [[0, 9]]}, "run.windows() batch_schedule [0, 9]"),
        ({"epochs": 0}, "run.windows() epochs 0"),
        ({"epochs": float("nan")}, "epochs nan"),
        ({"seed": 2**63}, "run.windows() seed 2**63"),
        ({"seed": -1}, "seed 0 -1"),
        ({"micro_batch": 0}, "micro_batch 1 0"),
    ],
)
def test_option_of_another_type_is_refused(option, names):
    with refused(ConfigError, names):
        CurrentRun({}).windows(SAMPLES, sgd_accumulator(net()), global_batch=9, **option)


def test_state_that_does_not_fit_or_that_no_checkpoint_can_hold_is_refused(tmp_path):
    def train(**state):
        ours = sgd_accumulator(model := net())
        how = {"global_batch": 9, "micro_batch": 9, "updates": 1, "checkpoints": tmp_path}
        for window in CurrentRun({}).windows(SAMPLES, ours, state=state, **how):
            for piece in window:
                backward(ours, model, piece)
            ours.boundary()

    odd = SimpleNamespace(state_dict=lambda: {"seen": {1, 2}}, load_state_dict=print)
    with refused(JobError, "odd.seen set"):
        train(odd=odd)
    assert not list(tmp_path.iterdir()), "refused before the first update"
    train(ema=nn.Linear(2, 1))
    with refused(RunFolderError, "state['ema'] update-000000001"):
        train(ema=nn.Linear(3, 1))

    def differ(group):
        own = SimpleNamespace(state_dict=lambda: {"seed": group.rank}, load_state_dict=print)
        how = {"global_batch": 9, "checkpoints": tmp_path / "other", "state": {"own": own}}
        CurrentRun({}).windows(SAMPLES, sgd_accumulator(net(), group), **how)

    with refused(JobError, "state= own"):
        run_in_threads(2, differ)


@pytest.mark.parametrize(
    ("built", "saved"),
    [("before", "no"), ("before", "itself"), ("before", "within"), ("after", "no")],
)
def test_a_scheduler_that_no_checkpoint_holds_is_warned_of_once(tmp_path, built, saved):
    ours = sgd_accumulator(model := net())
    first = torch.optim.lr_scheduler.StepLR(ours.optimizer, 2, 0.7) if built == "before" else None
    within = SimpleNamespace(state_dict=dict, load_state_dict=print, rate=first)
    state = {"no": {}, "itself": {"rate": first}, "within": {"all": within}}[saved]
    how = {"global_batch": 9, "micro_batch": 9, "updates": 2, "checkpoint_every": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        windows = CurrentRun({}).windows(SAMPLES, ours, state=state, checkpoints=tmp_path, **how)
        rate = first or torch.optim.lr_scheduler.StepLR(ours.optimizer, 2, 0.7)
        for window in windows:
            for piece in window:
                backward(ours, model, piece)
            ours.boundary()
            rate.step()
    messages = [str(w.message) for w in caught if "scheduler" in str(w.message)]
    assert len(messages) == (saved == "no")


def test_loop_with_its_own_checkpoints_stops(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.rundir.warnings._destination", None)
    (tmp_path / "attempts" / "000").mkdir(parents=True)
    run, done = CurrentRun({RUN: str(tmp_path)}), []
    ours = sgd_accumulator(model := net())
    for window in run.windows(SAMPLES, ours, global_batch=20, micro_batch=20, updates=9, first=3):
        for piece in window:
            backward(ours, model, piece)
        if window.update == 5:
            run._stop._handle(15, None)
        ours.boundary()
        run.save_done(window.update)
        done.append(window.update)
    assert done == [3, 4, 5]
    assert run.stopping
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "metrics.jsonl").read_text().count('"saved"') == 3


def test_a_stop_signal_is_a_request_from_the_first_window_on_and_until_the_loop_ends(tmp_path):
    seen, how = [], {"global_batch": 16, "updates": 3, "checkpoints": tmp_path}

    class Seen(Callback):
        def on_micro_step(self, update, done, steps):
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    assert Training(TorchGroup.alone(), **how, stops=1, callbacks=[Seen()]).run.stopping
    assert before not in seen
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_may_read_ahead_what_the_windows_will_hand_out(workers):
    ours = sgd_accumulator(model := net())
    windows = CurrentRun({}).windows(SAMPLES, ours, global_batch=16, micro_batch=5, epochs=2)
    data, indices = torch.utils.data.TensorDataset(X, Y), windows.indices()
    loader = torch.utils.data.DataLoader(data, batch_sampler=indices, num_workers=workers)
    batches = iter(loader)
    for window in windows:
        for piece in window:
            x, _ = next(batches)
            assert x.equal(X[piece])
            backward(ours, model, piece)
        ours.boundary()
        with refused(JobError, "windows.indices() iter()"):
            iter(indices)  # would lose what was read ahead
    assert next(batches, None) is None
    with refused(JobError, "windows.indices()"):
        windows.indices()


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return X[index], torch.randn(())


def test_batches_are_those_of_the_windows_and_draw_alike_in_workers_and_after_a_resume(tmp_path):
    def train(workers, updates, name):
        ours, drawn = sgd_accumulator(model := net()), []
        how = {"global_batch": 16, "micro_batch": 5, "checkpoints": tmp_path / name}
        windows = CurrentRun({}).windows(SAMPLES, ours, updates=updates, **how)
        batches = windows.batches(Noisy(), workers=workers, augments=True)
        for window in windows:
            for piece in window:
                x, noise = next(batches)
                assert x.equal(X[piece])
                drawn += noise.tolist()
                backward(ours, model, piece)
            ours.boundary()
        batches.close()
        return drawn

    whole = train(0, 6, "whole")
    assert len({*whole}) == len(whole)
    assert train(2, 3, "parts") + train(0, 6, "parts") == whole


def test_reading_batches_changes_no_random_number_of_a_micro_step():
    def train(workers):
        ours, drawn = sgd_accumulator(model := net()), []
        windows = CurrentRun({}).windows(SAMPLES, ours, global_batch=16, micro_batch=5, updates=2)
        batches = None if workers is None else windows.batches(Noisy(), workers=workers)
        for window in windows:
            for piece in window:
                if batches is not None:
                    next(batches)
                drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
                backward(ours, model, piece)
            ours.boundary()
        return drawn

    assert train(None) == train(0) == train(2)


def test_what_a_loop_draws_once_an_update_is_equal_on_all_ranks_and_after_a_resume(tmp_path):
    def train(group, updates, name):
        ours, drawn = sgd_accumulator(model := net(), group), []
        torch.manual_seed(group.rank)
        how = {"global_batch": 16, "micro_batch": 5, "checkpoints": tmp_path / name}
        for window in CurrentRun({}).windows(SAMPLES, ours, updates=updates, **how):
            drawn.append(torch.rand(()).item())
            for piece in window:
                backward(ours, model, piece)
            drawn.append(torch.rand(()).item())
            ours.boundary()
        return drawn

    [whole] = run_in_threads(1, lambda group: train(group, 4, "whole"))
    begun = run_in_threads(2, lambda group: train(group, 2, "parts"))
    [rest] = run_in_threads(1, lambda group: train(group, 4, "parts"))
    assert len({*whole}) == len(whole)
    assert [one + rest for one in begun] == [whole, whole]


def test_what_a_loop_changes_in_place_after_its_backward_does_not_count():
    found = []
    for reused in (torch.zeros(()), None):
        ours = sgd_accumulator(model := net())
        for piece in ([0, 1], [2, 3, 4]):
            weight = torch.zeros(()) if reused is None else reused
            total = cross_entropy(model(X[piece]), Y[piece], reduction="sum")
            ours.backward(Loss(total, weight.fill_(len(piece))))
            total.detach().zero_()
        report = ours.boundary()
        found.append((report.weight, report.loss, numbers_of(model).tolist()))
    assert found[0] == found[1]
    assert found[0][0] == 5


def test_after_a_backward_or_a_boundary_that_failed_the_way_out_is_one_that_exists():
    def windows():
        return CurrentRun({}).windows(SAMPLES, ours, global_batch=9, micro_batch=9)

    ours = sgd_accumulator(model := net())
    going = iter(windows())
    piece = next(iter(next(going)))
    total = cross_entropy(model(X[piece]), Y[piece], reduction="sum")
    total.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours.backward(Loss(total, 9))
    with pytest.raises(JobError, match="the next start goes on from the newest checkpoint"):
        backward(ours, model, piece)
    with pytest.warns(UserWarning, match="was left after 0 of"):
        going.close()
    ours.close()
    ours = sgd_accumulator(model := net())
    going = iter(windows())
    for piece in next(going):
        total = cross_entropy(model(X[piece]), Y[piece], reduction="sum") * float("nan")
        ours.backward(Loss(total, 9))
    with pytest.raises(NonFiniteError):
        ours.boundary()
    with pytest.raises(JobError, match=r"were computed, and boundary\(\) failed"):
        next(going)


@pytest.mark.parametrize(("shown", "warned"), [("before", True), ("meanwhile", False)])
def test_leaving_a_loop_is_warned_of_unless_an_error_was_shown_meanwhile(
    monkeypatch, capsys, shown, warned
):
    """As in a notebook, which keeps `sys.last_value` for its life."""
    monkeypatch.setattr(sys, "last_value", KeyError("of an earlier cell"), raising=False)
    ours = sgd_accumulator(model := net())
    loop = iter(CurrentRun({}).windows(SAMPLES, ours, global_batch=9, micro_batch=9))
    backward(ours, model, next(iter(next(loop))))
    if shown == "meanwhile":
        monkeypatch.setattr(sys, "last_value", KeyError("of this loop"))
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        loop.close()
    assert any("was left after 0 of" in str(record.message) for record in records) == warned
    del ours
    gc.collect()
    assert ("trained nothing: boundary() was not called" in capsys.readouterr().err) == warned


def _two_models(group, folder, batch):
    if group.size > 1:
        where = f"file://{folder}/met"
        dist.init_process_group("gloo", init_method=where, rank=group.rank, world_size=group.size)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(2)]
    samples = torch.randn(8, 8)
    both = [
        Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=1024)
        for model in models
    ]
    sent = []
    for window in CurrentRun({}).windows(8, both, global_batch=batch, micro_batch=1, updates=4):
        for piece in window:
            for model, ours in zip(models, both, strict=True):
                ours.backward(Loss(model(samples[piece]).square().sum(), len(piece)))
        sent.append([ours.boundary().collectives for ours in reversed(both)])
    return sent, [numbers_of(model).tolist() for model in models]


@pytest.mark.parametrize("batch", [1, 3])  # with one sample, the second rank has none
def test_two_accumulators_on_torchs_default_group_neither_mix_nor_miscount(tmp_path, batch):
    _, expected = _two_models(TorchGroup.alone(), tmp_path, batch)
    for sent, found in run_ranks(2, tmp_path, _two_models, str(tmp_path), batch):
        assert len({count for counts in sent for count in counts}) == 1
        assert found == [pytest.approx(values, rel=1e-5) for values in expected]


def test_two_accumulators_share_windows_each_in_a_pass_of_its_own():
    models = [net(), net()]
    both = [sgd_accumulator(model) for model in models]
    for window in CurrentRun({}).windows(SAMPLES, both, global_batch=16, micro_batch=5, updates=4):
        for model, ours in zip(models, both, strict=True):
            for piece in window:
                backward(ours, model, piece)
            ours.boundary()
    assert numbers_of(models[0]).equal(numbers_of(models[1]))
    assert not numbers_of(models[0]).equal(numbers_of(net()))


def _begin_elsewhere(group, reduction):
    """Begin on a rank with kernels of its own; return the warnings of a loop of one's own, and
    those with windows.
    """
    os.environ["MKL_CBWR"] = "COMPATIBLE" if group.rank == 2 else "AUTO"
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        ours = sgd_accumulator(net(), group, reduction=reduction)
        of_loop = [str(record.message) for record in records]
        CurrentRun({}).windows(SAMPLES, ours, global_batch=24, micro_batch=4, updates=1)
    return of_loop, [str(record.message) for record in records]


def test_ranks_whose_kernels_differ_are_warned_of_once_in_reproducible_mode(tmp_path):
    rank, *others = run_ranks(3, tmp_path, _begin_elsewhere, "reproducible")
    for sentences in rank:
        assert [sentence[:36] for sentence in sentences] == ["rank 2 computes with another version"]
    assert others == [([], []), ([], [])]


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_mean_with_a_weight_of_1_is_warned_of_where_it_is_of_several_samples(micro_batch):
    ours, options = sgd_accumulator(model := net()), {"global_batch": 8, "updates": 1}
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for window in CurrentRun({}).windows(SAMPLES, ours, micro_batch=micro_batch, **options):
            for piece in window:
                ours.backward(Loss(model(X[piece]).square().mean(), weight=1))
            ours.boundary()
    sentences = [str(r.message) for r in records if "made by mean()" in str(r.message)]
    assert len(sentences) == (0 if micro_batch == 1 else 2)
    assert all("updates depend on how a batch is split" in sentence for sentence in sentences)


def test_windows_record_the_environment_and_warn_where_it_changed(tmp_path, monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    run, options = make_run(tmp_path), {"global_batch": 16, "micro_batch": 4, "updates": 1}
    for attempt in range(3):
        run.attempt(attempt).mkdir(parents=True)
        monkeypatch.setattr("orchestrator.rundir.warnings._destination", None)
        monkeypatch.setenv(WARNINGS, str(run.warnings(attempt, 0)))
        if attempt == 2:
            monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
        current = CurrentRun({RUN: str(tmp_path), ATTEMPT: str(attempt)})
        current.windows(SAMPLES, sgd_accumulator(net()), first=0, **options)
        sentences = [warning.sentence for warning in read_warnings(run.attempt(attempt))]
        assert ["MKL_CBWR COMPATIBLE against none" in s for s in sentences] == [True] * (
            attempt == 2
        )
        assert run.read_environment()["framework"]["torch"] == torch.__version__


def test_a_loop_is_dealt_by_the_speeds_that_a_run_has_recorded(tmp_path):
    run = make_run(tmp_path / "run")
    speeds = [1.0, 1.0], [1.5, 0.5]
    lines = [json.dumps(record(n, speeds=speeds[n])) + "\n" for n in range(2)]
    run.metrics.write_text("".join(lines))
    options = {"global_batch": 16, "micro_batch": 4, "updates": 3, "balance": str(run.path)}

    def rank(group):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        ours = Accumulator(model, optimizer, group)
        sizes = []
        for window in CurrentRun({}).windows(SAMPLES, ours, **options):
            sizes.append(0)
            for piece in window:
                backward(ours, model, piece)
                sizes[-1] += len(piece)
            ours.boundary()
        ours.close()
        return sizes

    assert run_in_threads(2, rank) == [[8, 12, 12], [8, 4, 4]]


@pytest.mark.parametrize(
    ("ranks", "balance", "names"),
    [
        (3, "run", "2 3 ranks"),
        (2, "damaged", "metrics.jsonl 0 [1.5, None]"),
        (2, "measurd", "balance even measured"),
    ],
)
def test_recorded_speeds_of_other_ranks_or_of_no_run_are_refused(tmp_path, ranks, balance, names):
    run = make_run(tmp_path / "run")
    speeds = [1.5, None if balance == "damaged" else 0.5]
    run.metrics.write_text(json.dumps(record(0, speeds=speeds)) + "\n")
    folder = balance if balance == "measurd" else str(run.path)

    def rank(group):
        with refused(ConfigError, names):
            Training(group, global_batch=16, updates=1, balance=folder)

    run_in_threads(ranks, rank)


def test_a_training_may_be_as_long_as_it_takes_to_see_so_many_samples():
    options = {"global_batch": 16, "batch_schedule": [[2, 20]], "total_samples": 70}
    sizes = [16, 16, 20, 1, 20]  # an epoch has 53
    windows = Training(TorchGroup.alone(), **options).windows
    assert windows.updates == len(sizes)
    assert windows.plan.length.samples == 70
    assert [windows.plan.order.samples_of(update) for update in range(5)] == sizes
