"""The same data for other programs."""

import csv
import json

import pytest

from orchestrator.errors import UsageError
from orchestrator.page.data import data_of
from orchestrator.page.facts import facts_of
from orchestrator.page.formats import csv_of, json_of, markdown_of, png_of


def test_csv_has_a_line_a_run_with_raw_figures(sweep):
    lines = list(csv.DictReader(csv_of(data_of(facts_of(sweep))).splitlines()))
    assert [line["accumulation.steps"] for line in lines] == ["1", "2", "4"]
    assert [line["state"] for line in lines] == ["finished", "finished", "failed"]
    assert float(lines[0]["seconds_per_update"]) == 0.2


def test_markdown_is_a_table_that_nothing_in_it_breaks(sweep):
    text = markdown_of(data_of(facts_of(sweep)))
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert "&lt;b>bold" in text


def test_json_is_the_pages_data(sweep):
    data = data_of(facts_of(sweep))
    assert json.loads(json_of(data)) == data


def test_a_picture_has_all_charts(sweep, made):
    assert png_of(data_of(facts_of(sweep)))[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(UsageError, match="nothing to draw"):
        png_of(data_of(facts_of(made("new", records=[], ended=False).path)))
