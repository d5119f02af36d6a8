"""Every figure of a page, raw and as text."""

import json
import math

from orchestrator.page.charts import charts
from orchestrator.page.data import data_of
from orchestrator.page.facts import facts_of
from orchestrator.page.formats import FORMATS
from tests.report.conftest import record, result


def test_figures_have_their_values_and_texts(made):
    data = data_of(facts_of(made("one").path))
    [run] = data["runs"]
    assert run["figures"]["seconds_per_update"] == {"value": 0.2, "text": "200 ms"}
    assert run["figures"]["samples_per_second"]["value"] == 256 / 0.2
    assert run["metrics"]["accuracy"] == {"value": 0.9534, "text": "0.9534"}
    assert run["series"]["samples"] == [256, 512, 768, 1024, 1280]
    assert run["series"]["loss"][:2] == [1.0, 0.5]
    assert run["evaluations"] == {"update": [5], "accuracy": [0.9]}


def test_secrets_among_overrides_are_hidden_everywhere(made):
    data = data_of(facts_of(made("one", "+job.api_key=hunter2", "train.seed=4").path))
    assert "hunter2" not in json.dumps(data)
    assert "train.seed=4" in data["runs"][0]["command"]


def test_the_command_makes_the_run_again_wherever_it_lay_and_whoever_chose_it(made):
    chosen = ("run.dir=some", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=4", "sweep.search=tpe")
    words = ["+cluster=slurm", *chosen, "++run.dir=x", "job.hydra.dir=a b"]
    run = made("one")
    run.write_own(run.submission, run.read_submission() | {"overrides": words})
    [found] = data_of(facts_of(run.path))["runs"]
    assert found["command"] == "python -m orchestrator.launch +cluster=slurm 'job.hydra.dir=a b'"


def test_long_runs_are_thinned_to_what_a_page_can_hold_and_it_is_said(made, monkeypatch):
    monkeypatch.setattr("orchestrator.page.data.POINTS", 40)
    lines = [record(n) for n in range(540)]
    [run] = data_of(facts_of(made("long", records=lines).path))["runs"]
    assert len(run["series"]["loss"]) == 40
    assert run["series"]["update"][0] == 1
    assert run["series"]["update"][-1] == 540
    assert run["drawn"] == "40 of 540 updates"


def test_numbers_that_json_cannot_say_are_left_out(made):
    lines = [record(0), record(1, loss=math.nan)]
    data = data_of(facts_of(made("nan", records=lines).path))
    assert data["runs"][0]["series"]["loss"] == [1.0, None]
    json.dumps(data, allow_nan=False)


def test_no_name_or_word_of_others_does_anything_to_a_terminal(made, tmp_path):
    evil = "\x1b[2J\x07\x9b"
    culprit = {"rank": 0, "node": f"n{evil}", "cause": evil, "log_tail": []}
    ended = result(state="failed", culprit=culprit, metrics={f"top{evil}": math.nan, evil: 1.0})
    lines = [record(0, warnings=[evil]), record(1, evaluation={f"top{evil}": math.inf})]
    run = made("run", records=lines, ended=ended, command=[evil])
    data = data_of(facts_of(run.path.rename(tmp_path / f"run{evil}")))
    assert data["runs"][0]["metrics"]["top"] == {"value": None, "text": "nan"}
    for form in ("json", "md", "csv"):
        text = FORMATS[form](data)
        assert all(sign.isprintable() or sign in "\r\n" for sign in text), form
    assert charts(data)


def test_a_run_that_has_not_begun_has_a_page(made):
    [run] = data_of(facts_of(made("new", records=[], ended=False).path))["runs"]
    assert run["series"] == {}
    assert run["state"] == "no result"
