"""Update policy, loss scale, evaluation figures, time accounting, options, polls and ports."""

import math
import random
import socket
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.reading import read_config
from orchestrator.engine.api import AccumulationOptions, EngineSettings
from orchestrator.engine.common import rendezvous
from orchestrator.engine.common.clock import Clock
from orchestrator.engine.common.job_checks import check_fits, checked_figures, warn_of_names
from orchestrator.engine.common.rendezvous import backoff, keep_port
from orchestrator.engine.common.seeds import seed_python_and_numpy
from orchestrator.engine.common.trailer import Trailer
from orchestrator.engine.common.update_policy import (
    FIRST_SCALE,
    GROW_AFTER,
    LARGEST_SCALE,
    LossScale,
    UpdatePolicy,
)
from orchestrator.errors import ConfigError, JobError, NonFiniteError
from orchestrator.job import Job
from orchestrator.trainer.setup import engine_settings
from tests.engine.torch.jobs import sgd_accumulator
from tests.refusals import refused


def _policy(on_non_finite="stop", *, scales=False, clip_norm=None):
    options = AccumulationOptions(on_non_finite=on_non_finite, clip_norm=clip_norm)
    # Two ranks: the other one had nothing to complain of.
    return UpdatePolicy(options, LossScale(scales=scales), lambda mine: [[-1.0], mine])


def _losses(policy, *rows):
    trailer = Trailer.from_losses([number for row in rows for number in row], 0)
    return policy.norm_and_factor(3, trailer, trailer, 8.0, list)


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([(1.0, 1.0), (-1.0, 1.0)], "update 3 micro-step 1"),
        ([(math.nan, 1.0)], "update 3 rank 1 micro-step 0"),
        ([(0.0, 1.0)], "weights update 3 0 losses 1"),
        ([], "weights update 3 0"),
        ([(1e308, 1.0)] * 2, "weights update 3 inf"),
    ],
)
@pytest.mark.parametrize("on_non_finite", ["stop", "skip"])
def test_weights_that_cannot_be_divided_by_are_refused_by_both_policies(rows, names, on_non_finite):
    with refused(JobError, names):
        _losses(_policy(on_non_finite), *rows)


@pytest.mark.parametrize("on_non_finite", ["stop", "skip"])
def test_an_update_in_which_nothing_counts_is_skipped_with_a_word(on_non_finite):
    with pytest.warns(UserWarning, match="the weights of update 3 add up to 0 .* is skipped"):
        assert _losses(_policy(on_non_finite), (0.0, 0.0), (0.0, 0.0)) is None
    assert math.isnan(Trailer.from_losses([0.0, 0.0], 0).report(())["loss"])


def _decide(policy, weight, norm, named=list, **more):
    totals = Trailer.from_losses([weight, 1.0], 0)
    return policy.norm_and_factor(3, totals, Trailer(), norm, named, **more)


def test_a_gradient_that_is_not_finite_stops_skips_or_is_an_overflow():
    for norm in (math.nan, math.inf):
        assert _decide(_policy("skip"), 2.0, norm) is None
        with pytest.raises(NonFiniteError, match=r"infinite, in a, b, c and 1 more;"):
            _decide(_policy("stop"), 2.0, norm, lambda: ["a", "b", "c", "d"])
        scale = LossScale(scales=True)
        before = scale.scale
        policy = UpdatePolicy(AccumulationOptions(), scale, lambda mine: [mine])
        assert _decide(policy, 2.0, norm) is None
        assert scale.scale == before / 2
        scale.load({"scale": 1.0, "calm": 0})
        with pytest.raises(NonFiniteError):
            _decide(policy, 2.0, norm)


def test_a_gradient_is_averaged_unscaled_and_clipped_at_once():
    assert _decide(_policy(), 4.0, 8.0) == (2.0, 0.25)
    assert _decide(_policy(), 4.0, 8.0, divided_by=4.0) == (8.0, 1.0)
    norm, factor = _decide(_policy(clip_norm=1.0), 4.0, 8.0)
    assert (norm, factor) == (2.0, pytest.approx(0.125, rel=1e-6))


# ------------------------------------------------------------------ Loss scale


def after(scale, windows):
    for _ in range(windows):
        scale.succeeded()
    return scale.scale


def test_it_doubles_exactly_after_so_many_calm_windows_and_again():
    scale = LossScale(scales=True)
    for doublings in range(2):
        assert after(scale, GROW_AFTER - 1) == FIRST_SCALE * 2**doublings
        assert after(scale, 1) == FIRST_SCALE * 2 ** (doublings + 1)


def test_it_stays_within_bounds():
    scale = LossScale(scales=True)
    for _ in range(40):
        scale.overflowed()
    assert scale.scale == 1.0
    scale.load({"scale": LARGEST_SCALE, "calm": GROW_AFTER - 1})
    assert after(scale, 1) == LARGEST_SCALE


def test_a_checkpoint_takes_up_the_scale_and_the_calm_where_they_were():
    scale = LossScale(scales=True)
    after(scale, 3)
    scale.overflowed()  # they count no more
    after(scale, 7)
    resumed = LossScale(scales=True)
    resumed.load(scale.state())
    assert resumed.state() == scale.state() == {"scale": FIRST_SCALE / 2, "calm": 7}
    assert after(resumed, GROW_AFTER - 8) == FIRST_SCALE / 2
    assert after(resumed, 1) == FIRST_SCALE


@pytest.mark.parametrize("scales", [True, False])
def test_a_loss_scale_is_not_that_of_another_precision(scales):
    scale, fresh = LossScale(scales=scales), LossScale(scales=scales).scale
    scale.load(LossScale(scales=not scales).state())
    assert scale.scale == fresh


# ------------------------------------------------------------------ Evaluation


class Digits:
    """A user's job; only its name matters."""


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, "{'accuracy': 0.9} None"),
        (("accuracy", 0.9), "('accuracy', 0.9)"),
        ({"accuracy": "high"}, "'accuracy' 'high'"),
        ({"accuracy": [1.0, 2.0]}, "'accuracy' [1.0, 2.0]"),
        (
            {"a": 1, "b": torch.ones(3)},
            "'b' torch.float32 (3,)",
        ),
        ({"a": np.ones((2, 2))}, "'a' float64 (2, 2)"),
        (
            {"a": torch.empty(0)},
            "'a' torch.float32 (0,)",
        ),
        ({"a": 1j}, "'a' 1j"),
    ],
)
def test_what_is_no_dictionary_of_numbers_is_refused(given, names):
    with refused(JobError, f"Digits.evaluate() {names}"):
        checked_figures(given, Digits())


@pytest.mark.parametrize(
    "number", [1, 1.0, True, torch.tensor(1.0), torch.ones(1, 1), np.float32(1), np.ones(1)]
)
def test_numbers_of_any_kind_are_figures(number):
    assert checked_figures({"accuracy": number}, Digits()) == {"accuracy": 1.0}


@pytest.mark.parametrize("number", [math.nan, math.inf, torch.tensor(-math.inf)])
def test_figures_that_are_not_finite_are_kept_and_warned_of(number):
    with pytest.warns(UserWarning, match="Digits.evaluate\\(\\)'s 'loss' is -?(nan|inf)"):
        figures = checked_figures({"loss": number, "right": 1}, Digits())
    assert not math.isfinite(figures["loss"])


# ------------------------------------------------------------------ Time accounting


@pytest.fixture
def tick(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    return move


def test_each_moment_counts_once_for_the_innermost_activity(tick):
    clock = Clock()
    tick(1)
    with clock.compute:
        tick(2)
        with clock.wait:
            tick(4)
        tick(8)
        with clock.compute:
            tick(16)
    tick(32)
    with clock.optimize:
        tick(64)
    assert clock.seconds() == {"compute_s": 26.0, "wait_s": 4.0, "optimizer_s": 64.0}


def test_after_a_failure_a_window_begins_from_nothing(tick):
    clock = Clock()

    def fails():
        with clock.compute:
            tick(1)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    tick(2)
    assert clock.seconds()["compute_s"] == 1.0
    clock.begin()
    assert set(clock.seconds().values()) == {0.0}


# ------------------------------------------------------------------ Options


def test_a_keyword_overrides_the_options_and_one_that_is_none_is_answered_with_the_nearest():
    model = torch.nn.Linear(2, 1)
    options = AccumulationOptions(clip_norm=1.0, on_non_finite="skip")
    chosen = sgd_accumulator(model, options=options, clip_norm=2.0).options
    assert (chosen.clip_norm, chosen.on_non_finite) == (2.0, "skip")
    assert options.clip_norm == 1.0
    with refused(TypeError, "clip_nrm clip_norm"):
        sgd_accumulator(model, clip_nrm=1.0)


def test_a_text_in_the_place_of_metric_names_is_refused():
    class Comma(Job):
        metric_names = "error"

    config = read_config({"job": {"_target_": "jobs.digits.Digits"}})
    with refused(JobError, "Comma.metric_names ['error']"):
        engine_settings(config, Comma())


def test_every_setting_reaches_the_engine():
    changed = {
        "job": {"_target_": "jobs.digits.Digits"},
        "train": {"precision": "float64", "clip_norm": 2.0, "seed": 5, "on_non_finite": "skip"},
        "accumulation": {"reduction": "reproducible", "micro_batch": 8},
        "engine": {"norm": "group", "mode": "pynative"},
    }
    settings = engine_settings(read_config(changed), Job())
    wanted = EngineSettings(
        seed=5,
        precision="float64",
        clip_norm=2.0,
        on_non_finite="skip",
        reduction="reproducible",
        norm="group",
        mode="pynative",
        optimizer=settings.optimizer,
        bucket_bytes=settings.bucket_bytes,
        loader_workers=settings.loader_workers,
    )
    assert settings == wanted


# ------------------------------------------------------------------ Polls and reserved ports


def test_waiting_ranks_poll_ever_more_rarely(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now[0])
    pauses, polls = backoff(), []
    while now[0] < 60:
        polls.append(now[0])
        now[0] += next(pauses)
    assert sum(poll < 2 for poll in polls) < 25
    assert sum(poll >= 2 for poll in polls) < 45
    assert polls[1] < 0.1


@pytest.fixture(params=[True, False], ids=["both families", "IPv4 alone"])
def keeper(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with keep_port("127.0.0.1") as found:
        yield found


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])  # noqa: S104  # refused
def test_no_other_socket_gets_a_reserved_port_at_any_address(keeper, address):
    """Else a store that listens at all addresses finds it in use at one of them."""
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((address, keeper.getsockname()[1]))


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_a_server_binds_the_reserved_port_and_it_stays_reserved_afterwards(keeper, address):
    place = (address, keeper.getsockname()[1])
    for _ in range(2):
        socket.create_server(place).close()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(place)


def test_weights_that_do_not_fit_are_named_without_guesses():
    found = {f"layers.{n}.weight": ("float32", (2,)) for n in range(4)}
    wanted = {f"layers.{n}.weight": ("float32", (2,)) for n in range(3, 9)}
    with pytest.raises(ConfigError) as caught:
        check_fits(found, wanted)
    assert str(caught.value) == (
        "the weights do not fit this model: the model has no layers.0.weight; the model has no "
        "layers.1.weight; the model has no layers.2.weight; layers.4.weight is missing; "
        "layers.5.weight is missing; and 3 more"
    )


# ------------------------------------------------------------------ Names of a job's methods


def method(self, *_):
    return None


def rate_of(self, epoch):
    return 0.1


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"collate_fn": method}, r"Named\.collate_fn\(\); did you mean collate\(\)"),
        ({"val_dataset": method}, r"Named\.val_dataset\(\); did you mean validation\(\)"),
        ({"learning_rate": rate_of}, r"Named\.learning_rate\(\) gets the number of an update"),
    ],
)
def test_uncalled_methods_are_warned_of(members, said):
    with pytest.warns(UserWarning, match=said):
        warn_of_names(type("Named", (Job,), members)())


@pytest.mark.parametrize("members", [{}, {"collate_fn": method, "collate": method}])
def test_a_jobs_own_helpers_are_not_warned_of(members, recwarn):
    warn_of_names(type("Named", (Job,), members)())
    assert not recwarn


@given(st.integers(0, 2**64 - 1))
def test_python_and_numpy_are_seeded_as_by_their_own_functions(seed):
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
    python, numpys = random.getstate(), np.random.get_state(legacy=False)
    np.random.standard_normal()  # leaves a second one for the next call
    random.gauss(0.0, 1.0)
    seed_python_and_numpy(seed)
    assert random.getstate() == python
    state = np.random.get_state(legacy=False)
    assert (state["state"]["key"] == numpys["state"]["key"]).all()
    assert state["state"]["pos"] == numpys["state"]["pos"]
    assert (state["has_gauss"], state["gauss"]) == (0, 0.0)
