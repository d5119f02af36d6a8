"""Whether a window is applied, skipped or refused: one answer for both engines."""

import math

import pytest

from orchestrator.engine.common.boundary.loss_scale import LossScale
from orchestrator.engine.common.boundary.loss_sums import LossSums
from orchestrator.engine.common.boundary.update_policy import UpdatePolicy
from orchestrator.engine.settings import AccumulationOptions
from orchestrator.errors import ConfigError, JobError, NonFiniteError


class Sums(LossSums):
    def floats(self, rows):
        return rows


def _policy(on_non_finite="stop", *, scales=False, clip_norm=None):
    options = AccumulationOptions(on_non_finite=on_non_finite, clip_norm=clip_norm)
    # Two ranks: the other one had nothing to complain of.
    return UpdatePolicy(options, LossScale(scales=scales), lambda mine: [[-1.0], mine])


def _losses(policy, *rows):
    sums = Sums(0)
    for row in rows:
        sums.add(row)
    return policy.losses_usable(3, sums.trailer(), sums)


def test_losses_that_can_be_divided_are_usable_whatever_the_policy():
    for on_non_finite in ("stop", "skip"):
        assert _losses(_policy(on_non_finite), (2.0, 1.5), (0.0, 0.0))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(1.0, 1.0), (-1.0, 1.0)], "negative or not finite in update 3, .* 1, micro-step 1;"),
        ([(math.nan, 1.0)], "negative or not finite in update 3, first on rank 1, micro-step 0;"),
        ([(0.0, 1.0)], "the weights of update 3 add up to 0"),
        ([], "the weights of update 3 add up to 0"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("on_non_finite", ["stop", "skip"])
def test_weights_that_cannot_be_divided_by_are_refused_by_both_policies(rows, said, on_non_finite):
    with pytest.raises(JobError, match=said):
        _losses(_policy(on_non_finite), *rows)


def test_a_loss_that_is_not_finite_stops_or_skips():
    rows = [(1.0, 1.0), (1.0, math.inf)]
    assert not _losses(_policy("skip"), *rows)
    with pytest.raises(NonFiniteError, match="update 3, first on rank 1, micro-step 1;"):
        _losses(_policy("stop"), *rows)


def test_a_gradient_that_is_not_finite_stops_skips_or_is_an_overflow():
    for norm in (math.nan, math.inf):
        assert _policy("skip").factor(3, 2.0, norm, list) is None
        with pytest.raises(NonFiniteError, match=r"infinite, in a, b, c and 1 more;"):
            _policy("stop").factor(3, 2.0, norm, lambda: ["a", "b", "c", "d"])
        scale = LossScale(scales=True)
        before = scale.scale
        policy = UpdatePolicy(AccumulationOptions(), scale, lambda mine: [mine])
        assert policy.factor(3, 2.0, norm, list) is None
        assert scale.scale == before / 2


def test_a_gradient_is_averaged_unscaled_and_clipped_at_once():
    assert _policy().factor(0, 4.0, 8.0, list) == (2.0, 0.25)
    norm, factor = _policy(clip_norm=1.0).factor(0, 4.0, 8.0, list)
    assert (norm, factor) == (2.0, pytest.approx(0.125, rel=1e-6))


def test_a_policy_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="must be stop or skip, but is 'ignore'"):
        _policy("ignore")
