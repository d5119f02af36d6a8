"""Charts are drawn by the library itself, without a browser."""

import json

import pytest

from orchestrator.page.charts import charts
from orchestrator.page.data import data_of
from orchestrator.page.facts import facts_of
from orchestrator.page.html import library
from orchestrator.page.vega import COLOURS, theme


@pytest.mark.parametrize("shade", COLOURS)
def test_every_chart_of_a_sweep_can_be_drawn(sweep, shade):
    for chart in charts(data_of(facts_of(sweep))):
        spec = {**chart["spec"], "width": 350, "config": theme(shade)}
        drawn = library().vegalite_to_svg(json.dumps(spec))
        assert drawn.count("<path") > 5, chart["id"]
        for name in ("steps=1", "steps=2", "steps=4"):
            assert name in chart["says"] or name in drawn


def test_lines_are_told_apart_by_dashes_too(sweep):
    first = charts(data_of(facts_of(sweep)))[0]
    assert len({line["dash"] for line in first["key"]["lines"]}) == 3
    assert "strokeDash" in first["spec"]["layer"][0]["encoding"], "the layer below its marks"


def test_one_run_has_its_own_charts(made):
    names = {chart["id"] for chart in charts(data_of(facts_of(made("one").path)))}
    assert {"loss-update", "loss-elapsed_s", "evaluation-accuracy", "time-of-updates"} <= names


def test_many_runs_have_a_course_of_colours_instead_of_names(made, tmp_path):
    for seed in range(8):
        made(f"many/{seed}", f"train.seed={seed}")
    first = charts(data_of(facts_of(tmp_path / "many")))[0]
    assert first["key"] == {"lines": [], "course": "from seed=0 (dark) to seed=7 (bright)"}


def test_before_the_first_update_there_is_none(made):
    assert charts(data_of(facts_of(made("new", records=[], ended=False).path))) == []
