"""What a search may choose from: Hydra's words for a sweep, and what cannot be drawn is refused."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from orchestrator.config.loader import Loader
from orchestrator.config.schema import SweepConfig
from orchestrator.errors import ConfigError
from orchestrator.sweep.search_space import space_of
from orchestrator.sweep.sweep import require_optuna


def space(*texts):
    return space_of(OverridesParser.create(config_loader=Loader(None)).parse_overrides([*texts]))


@pytest.mark.parametrize(
    ("text", "may_be"),
    [
        ("a=interval(2,3)", lambda value: 2 <= value <= 3),
        ("a=int(interval(1,8))", lambda value: value in range(1, 9)),
        ("a=tag(log,interval(0.001,0.1))", lambda value: 0.001 <= value <= 0.1),
        ("a=tag(log,int(interval(1,1000)))", lambda value: value in range(1, 1001)),
        ("a=range(1,8,2)", lambda value: value in (1, 3, 5, 7)),
        ("a=range(3,0,-1)", lambda value: value in (3, 2, 1)),
        ("+a=1,2,4", lambda value: value in (1, 2, 4)),
        ("a=choice(7)", lambda value: value == 7),
    ],
)
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_every_draw_is_within_what_was_written(text, may_be, sampler):
    require_optuna()
    [axis] = space(text).axes
    drawn = {
        axis.text(space(text).draw(SweepConfig(search=sampler, seed=seed), [])[axis.key])
        for seed in range(20)
    }
    for override in drawn:
        key, _, value = override.partition("=")
        assert key == text.partition("=")[0]
        assert may_be(float(value))
    assert len(drawn) > 1 or "choice(7)" in text


def test_alternatives_are_drawn_in_the_words_of_the_line():
    found = space("optimizer=glob(*)", "job.name='a b',c", "train.seed=3")
    assert found.fixed == ("train.seed=3",)
    assert found.axes[1].texts == ("'a b'", "c")
    assert "optimizer=sgd" in [found.axes[0].text(text) for text in found.axes[0].texts]
    assert found.grid_size(None) == 2 * len(found.axes[0].texts)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a=interval(2,1)", r"lower end, 2, is above its upper end, 1; .* interval\(1,2\)"),
        ("a=interval(1,1)", "its lower end and its upper end are both 1"),
        ("a=int(interval(1.2,1.9))", "its lower end and its upper end are both 1"),
        ("a=interval(-inf,1)", "finite"),
        ("a=interval(0,nan)", "finite"),
        ("a=tag(log,interval(0,1))", "not above 0"),
        ("a=tag(log,range(1,9))", r"interval\(…\) alone"),
        ("a=tag(fast,interval(1,2))", "tag fast"),
        ("a=shuffle(1,2,3)", "shuffled"),
        ("a=shuffle(range(1,4))", "shuffled"),
        ("a=range(3,1)", "no value"),
        ("a=range(1,3,0)", "cannot be drawn"),
        ("~a=1,2", "takes a key away"),
        ("run.name=a,b", "tells no trial from another"),
        ("a=3", r"'interval\(0.001,0.1\)'"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(text, why):
    with pytest.raises(ConfigError, match=why) as refused:
        space(text)
    assert "\n" not in str(refused.value)


def test_a_key_is_chosen_once():
    with pytest.raises(ConfigError, match="a is chosen twice"):
        space("a=1,2", "+a=interval(1,2)")
