"""Search spaces in Hydra's syntax, and refusals before the first trial."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from orchestrator.config.command_line import CommandLine
from orchestrator.config.composer import Composer, compose
from orchestrator.config.loader import Loader
from orchestrator.config.schema import SweepConfig
from orchestrator.errors import ConfigError
from orchestrator.search.method import require_optuna
from orchestrator.search.search import Search
from orchestrator.search.space import space_of
from tests.helpers import TINY
from tests.refusals import refused
from tests.search.helpers import search_of

pytestmark = pytest.mark.whole_runs


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
    ("text", "names"),
    [
        ("a=interval(2,1)", "2 1 interval(1,2)"),
        ("a=interval(1,1)", "both 1"),
        ("a=int(interval(1.2,1.9))", "both 1"),
        ("a=interval(-inf,1)", "finite"),
        ("a=interval(0,nan)", "finite"),
        ("a=tag(log,interval(0,1))", "logarithms above 0"),
        ("a=tag(log,range(1,9))", "interval(…)"),
        ("a=tag(fast,interval(1,2))", "tag fast known log"),
        ("a=shuffle(1,2,3)", "shuffled"),
        ("a=shuffle(range(1,4))", "shuffled"),
        ("a=range(3,1)", "value"),
        ("a=range(1,3,0)", "drawn"),
        ("~a=1,2", "key"),
        ("run.name=a,b", "run.name trial"),
        ("a=3", "'interval(0.001,0.1)'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(text, names):
    with refused(ConfigError, names) as caught:
        space(text)
    assert "\n" not in str(caught.value)


def test_a_key_is_chosen_once():
    with pytest.raises(ConfigError, match="a is stated twice"):
        space("a=1,2", "+a=interval(1,2)")
    with pytest.raises(ConfigError, match="a is stated twice"):
        space("a=1,2", "a=7")


def test_what_is_typed_wins_over_what_a_file_would_choose(tmp_path):
    text = "defaults: [base, _self_]\nhydra: {sweeper: {params: {train.seed: '1,2'}}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    for typed, axes in (("train.seed=7", []), ("train.seed=3,4", ["train.seed"])):
        line = CommandLine(
            overrides=(TINY, LR, typed, "sweep.search=random", "sweep.trials=2"),
            config_dir=str(tmp_path),
            config_name="mine",
            multirun=True,
        )
        composer = Composer(line)
        composer.compose()
        found = Search(composer)
        assert [axis.key for axis in found.space.axes] == [*axes, "schedule.base_lr"]
        point = found.point(0, found.space.draw(found.sweep, []))
        assert point.config.train.seed in (7, 3, 4)


# ------------------------------------------------------------------ What a search cannot do


LR = "schedule.base_lr=interval(0.001,0.1)"


TPE = "sweep.search=tpe sweep.trials=5 "


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("sweep.search=tpe", "sweep.trials=20"),
        ("sweep.search=tpe sweep.trials=0", "sweep.trials must be at least 1"),
        ("sweep.search=tpee sweep.trials=5", "did you mean 'tpe'"),
        ("sweep.search=grid", "schedule.base_lr has them without end"),
        (f"{TPE}sweep.seed=-1", "sweep.seed must be at least 0"),
        (f"{TPE}run.dir=runs/${{schedule.base_lr}}", "and a search has one folder"),
        (f"{TPE}sweep.prune=worst", "none, median"),
        (f"{TPE}sweep.objective=accuracy", "sweep.direction=minimize"),
        (f"{TPE}sweep.objective=seconds sweep.prune=median", "at the end"),
        (f"{TPE}sweep.parallel=0", "from 1 to 10000"),
        (f"{TPE}accumulation.steps=1,0", "no trial can have accumulation.steps=0"),
        (f"{TPE}optimizer=sgd,sdg", "no trial can have optimizer=sdg"),
        (f"{TPE}sweep.seed=5,6", "cannot be swept"),
        (f"{TPE}train.updtes=3", "did you mean"),
    ],
)
def test_what_cannot_be_searched_is_refused(line, why):
    with pytest.raises(ConfigError) as refused:
        search_of(TINY, "tracker=none", LR, *line.split())
    assert why in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 2


@pytest.mark.parametrize(
    "stated", ["objective=seconds", "trials=3", "seed=2", "direction=maximize", "prune=median"]
)
def test_what_a_search_has_is_refused_without_one(stated):
    with refused(ConfigError, f"sweep.{stated.partition('=')[0]} sweep.search=tpe"):
        compose([TINY, f"sweep.{stated}"])


def test_a_search_needs_a_sweep_and_is_the_only_one():
    with refused(ConfigError, "sweep.search -m"):
        compose([TINY, "sweep.search=tpe", "sweep.trials=3"])
    with pytest.raises(ConfigError, match="means nothing here"):
        search_of(TINY, LR, "sweep.search=tpe", "sweep.trials=3", "hydra.sweeper._target_=a.B")


def test_a_value_counts_as_one_that_can_be_where_any_of_the_others_goes_with_it():
    found = search_of(
        TINY,
        "sweep.search=random",
        "sweep.trials=3",
        "accumulation.reduction=fast,reproducible",
        "accumulation.micro_batch=null,8",
    )
    assert found.trials == 3, "reproducible goes with a micro_batch"


def folder_of(*overrides):
    composer = Composer(CommandLine(overrides=(TINY, *overrides), multirun=True))
    return composer.loader.sweep_name(composer.overrides, composer.line)


def test_a_search_is_named_by_all_that_makes_it_one():
    base = ("sweep.search=tpe", "sweep.trials=3", LR)
    name = folder_of(*base)
    assert folder_of("sweep.search=tpe", "sweep.trials=9", "sweep.parallel=2", LR) == name
    assert folder_of(*base, "sweep.seed=1") != name
    assert folder_of(*base[:2], "schedule.base_lr=interval(0.001,0.2)") != name
