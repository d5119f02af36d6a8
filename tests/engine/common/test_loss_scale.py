"""The loss scale: halves at an overflow, doubles after a calm time, and a checkpoint holds both."""

from orchestrator.engine.common.boundary.loss_scale import (
    FIRST_SCALE,
    GROW_AFTER,
    LARGEST_SCALE,
    LossScale,
)


def after(scale, windows):
    for _ in range(windows):
        scale.succeeded()
    return scale.scale


def test_it_doubles_exactly_after_so_many_calm_windows_and_again():
    scale = LossScale(scales=True)
    assert after(scale, GROW_AFTER - 1) == FIRST_SCALE
    assert after(scale, 1) == 2 * FIRST_SCALE
    assert after(scale, GROW_AFTER - 1) == 2 * FIRST_SCALE
    assert after(scale, 1) == 4 * FIRST_SCALE


def test_an_overflow_halves_it_and_the_calm_begins_anew():
    scale = LossScale(scales=True)
    after(scale, GROW_AFTER - 1)
    scale.overflowed()
    assert scale.scale == FIRST_SCALE / 2
    assert after(scale, GROW_AFTER - 1) == FIRST_SCALE / 2
    assert after(scale, 1) == FIRST_SCALE


def test_it_stays_within_bounds():
    scale = LossScale(scales=True)
    for _ in range(40):
        scale.overflowed()
    assert (scale.scale, scale.may_overflow) == (1.0, False)
    scale.load({"scale": LARGEST_SCALE, "calm": GROW_AFTER - 1})
    assert after(scale, 1) == LARGEST_SCALE
    assert scale.may_overflow


def test_a_checkpoint_takes_up_the_scale_and_the_calm_where_they_were():
    scale = LossScale(scales=True)
    scale.overflowed()
    after(scale, 7)
    resumed = LossScale(scales=True)
    resumed.load(scale.state())
    assert resumed.state() == scale.state() == {"scale": FIRST_SCALE / 2, "calm": 7}
    assert after(resumed, GROW_AFTER - 8) == FIRST_SCALE / 2
    assert after(resumed, 1) == FIRST_SCALE


def test_without_scaling_it_is_one_for_ever():
    scale = LossScale(scales=False)
    assert after(scale, GROW_AFTER + 1) == 1.0
    assert not scale.may_overflow


def test_a_scale_of_one_cannot_overflow_and_any_other_may():
    scale = LossScale(scales=True)
    for held, may in ((1.0, False), (2.0, True), (LARGEST_SCALE, True)):
        scale.load({"scale": held, "calm": 3})
        assert (scale.scale, scale.may_overflow) == (held, may)
    scale.load({"scale": 2.0, "calm": 3})
    scale.overflowed()
    assert scale.state() == {"scale": 1.0, "calm": 0}
