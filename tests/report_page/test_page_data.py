"""The data of a page: what runs made, what differs, charts."""

import json
import math

import pytest
import vl_convert

from orchestrator.report_page.charts import COLOURS, charts, theme
from orchestrator.report_page.data import data_of
from orchestrator.report_page.page import FORMATS
from orchestrator.rundir import metrics
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.status import from_folder
from orchestrator.rundir.warnings import warn_of
from tests.run_folders import record, result


def test_figures_have_their_values_and_texts(made):
    data = data_of(made("one").path)
    [run] = data["runs"]
    assert run["figures"]["seconds_per_update"] == {"value": 0.2, "text": "200 ms"}
    assert run["figures"]["samples_per_second"]["value"] == 256 / 0.2
    assert run["metrics"]["accuracy"] == {"value": 0.9534, "text": "0.9534"}
    assert run["series"]["samples"] == [256, 512, 768, 1024, 1280]
    assert run["series"]["loss"][:2] == [1.0, 0.5]
    assert run["evaluations"] == {"update": [5], "accuracy": [0.9]}


def test_secrets_among_overrides_are_hidden_everywhere(made):
    data = data_of(made("one", "+job.api_key=hunter2", "train.seed=4").path)
    assert "hunter2" not in json.dumps(data)
    assert "train.seed=4" in data["runs"][0]["command"]
    sweep = made("sweep/0", "+job.api_key=hunter2").path.parent
    made("sweep/1", "+job.api_key=hunter3")
    assert "hunter" not in json.dumps(data_of(sweep))


def test_numbers_of_tokens_are_no_secrets(made):
    [run] = data_of(made("one", "accumulation.micro_tokens=64").path)["runs"]
    assert "accumulation.micro_tokens=64" in run["command"]
    [run] = data_of(made("two", "+job.api_tokens=hunter2").path)["runs"]
    assert "hunter2" not in json.dumps(run)


def test_the_command_repeats_the_run_wherever_its_folder_and_settings_came_from(made):
    chosen = ("run.dir=some", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=4", "sweep.search=tpe")
    words = ["+cluster=slurm", *chosen, "++run.dir=x", "job.hydra.dir=a b", "train.updates=9"]
    asked = {"overrides": words, "flags": ["--config-name", "mine"]}
    run = made("one")
    write_json(run.submission, run.read_submission() | asked)
    write_json(run.resumes, {"resumes": [{"overrides": ["train.epochs=2"]}]})
    [found] = data_of(run.path)["runs"]
    line = "--config-name mine +cluster=slurm 'job.hydra.dir=a b' train.epochs=2"
    assert found["command"] == f"python -m orchestrator.launch {line}"


def test_a_sweep_has_the_values_that_resumes_set(made, tmp_path):
    for point, updates in enumerate((6, 5)):
        run = made(f"some/{point}", "train.updates=3")
        write_json(run.resumes, {"resumes": [{"overrides": [f"train.updates={updates}"]}]})
    runs = data_of(tmp_path / "some")["runs"]
    assert [run["overrides"] for run in runs] == [{"train.updates": n} for n in "65"]
    assert [run["command"].split()[-1] for run in runs] == ["train.updates=6", "train.updates=5"]


def test_table_of_a_search(made, tmp_path):
    run = made("some/0", "job.lr=0.3", ended=result(state="stopped"))
    write_json(run.pruned, {"why": "worse after update 1 than the median"})
    trial = {"number": 0, "state": "pruned", "value": 0.5, "point": ["job.lr=0.3"]}
    found = {"search": "tpe", "objective": "loss", "maximize": False, "wanted": 2, "best": 0}
    write_json(
        RunDir(tmp_path / "some").search,
        {**found, "trials": [trial | {"folder": "0", "why": None}]},
    )
    page = data_of(tmp_path / "some")
    assert "median" in page["runs"][0]["why"]
    assert page["sentences"][0] == "1 of 2 trials: 1 pruned"
    assert page["sentences"][1].startswith("the best is trial 0: loss ")


def test_a_resume_with_changed_inputs_is_on_the_page(made):
    run = made("one")
    entry = {"overrides": [], "attempt": 1, "changed_inputs": ["job.py has changed"]}
    write_json(run.resumes, {"resumes": [entry]})
    [sentence] = data_of(run.path)["sentences"]
    assert "was resumed with --changed (attempt 1): job.py has changed" in sentence


def test_long_runs_are_thinned_for_the_page(made, monkeypatch):
    monkeypatch.setattr("orchestrator.report_page.data.POINTS", 40)
    lines = [record(n) for n in range(540)]
    [run] = data_of(made("long", records=lines).path)["runs"]
    assert len(run["series"]["loss"]) == 40
    assert run["series"]["update"][0] == 1
    assert run["series"]["update"][-1] == 540
    assert run["drawn"] == "40 of 540 updates"


def test_curves_and_figures_are_taken_while_a_long_run_is_read_once(made, monkeypatch):
    reads = []
    read = metrics._record
    monkeypatch.setattr(metrics, "_record", lambda line: reads.append(1) or read(line))
    monkeypatch.setattr(metrics, "KEPT_BYTES", 1000)
    monkeypatch.setattr("orchestrator.report_page.data.POINTS", 40)
    lines = [record(n, attempt=n // 300) for n in range(540)]
    [run] = data_of(made("long", records=lines).path)["runs"]
    assert (len(run["series"]["loss"]), len(run["marks"])) == (40, 1)
    assert run["marks"][0]["update"] == 301
    assert len(reads) <= 2 * 541 + 1, "for the positions of what counts, and for all the rest"


def test_numbers_that_json_cannot_say_are_left_out(made):
    lines = [record(0), record(1, loss=math.nan)]
    data = data_of(made("nan", records=lines).path)
    assert data["runs"][0]["series"]["loss"] == [1.0, None]
    json.dumps(data, allow_nan=False)


def test_no_name_or_word_of_others_does_anything_to_a_terminal(made, tmp_path):
    evil = "\x1b[2J\x07\x9b"
    culprit = {"rank": 0, "node": f"n{evil}", "cause": evil, "log_tail": []}
    ended = result(state="failed", culprit=culprit, metrics={f"top{evil}": math.nan, evil: 1.0})
    lines = [record(0), record(1, evaluation={f"top{evil}": math.inf})]
    run = made("run", records=lines, ended=ended, command=[evil])
    warn_of(run.attempt(0) / "warnings-00000.jsonl", 0, f"see{evil}")
    data = data_of(run.path.rename(tmp_path / f"run{evil}"))
    assert data["runs"][0]["warnings"] == ["see"]
    assert data["runs"][0]["metrics"]["top"] == {"value": None, "text": "nan"}
    for form in ("json", "csv"):
        text = FORMATS[form](data)
        assert all(sign.isprintable() or sign in "\r\n" for sign in text), form
    assert charts(data)


def test_a_run_that_has_not_begun_has_a_page(made):
    [run] = data_of(made("new", records=[], ended=False).path)["runs"]
    assert run["series"] == {}
    assert run["state"] == "no result"


def test_warnings_of_every_attempt_are_shown_also_those_without_an_update(made):
    run = made("warned", ended=result(state="failed"))
    for attempt, sentences in enumerate((["slow", "early"], ["slow", "after the last boundary"])):
        for sentence in sentences:
            warn_of(run.attempt(attempt) / "warnings-00000.jsonl", 0, sentence)
        run.begin_attempt()
    [found] = data_of(run.path)["runs"]
    assert found["warnings"] == ["slow", "early", "after the last boundary"]


def test_a_page_and_status_say_the_same_of_a_stop(made):
    culprit = {"rank": None, "node": "n1", "cause": "cancelled (scancel)", "log_tail": []}
    cancelled = made("cancelled", ended=result(state="stopped", culprit=culprit))
    asked = made("asked", ended=result(state="stopped", why="asked to stop by SIGINT"))
    pruned = made("pruned", ended=result(state="stopped"))
    write_json(pruned.pruned, {"why": "worse than the median"})
    for run, state in ((cancelled, "cancelled"), (asked, "stopped"), (pruned, "pruned")):
        [found] = data_of(run.path)["runs"]
        status = from_folder(run)
        assert found["state"] == status.state == state
        assert status.reason in found["why"]


def test_points_come_in_their_numbers_order_named_by_what_varies(sweep):
    found = data_of(sweep)
    assert [run["name"] for run in found["runs"]] == ["steps=1", "steps=2", "steps=4"]
    assert found["differing"] == [{"key": "accumulation.steps", "values": ["1", "2", "4"]}]


def test_runs_that_differ_in_nothing_that_is_shown_have_names_of_their_own(made, tmp_path):
    for number, restarts in enumerate((0, 1)):
        for steps in (1, 2):
            overrides = (f"accumulation.steps={steps}", f"run.max_restarts={restarts}")
            made(f"some/{2 * number + steps}", *overrides)
    names = [run["name"] for run in data_of(tmp_path / "some")["runs"]]
    assert names == ["steps=1 (1)", "steps=2 (2)", "steps=1 (3)", "steps=2 (4)"]


def test_a_damaged_point_is_named_and_the_others_are_shown(made, tmp_path):
    for steps in (1, 2, 4):
        made(f"some/{steps}", f"accumulation.steps={steps}")
    (tmp_path / "some" / "2" / "plan.json").write_text("{")
    found = data_of(tmp_path / "some")
    assert [run["name"] for run in found["runs"]] == ["steps=1", "steps=4"]
    assert found["sentences"][-1].startswith("not read: ")


def test_a_chart_marks_restarts_and_the_failure(made):
    again = {
        "restart": {"attempt": 1, "why": "rank 1 was killed", "resumed_from": 2, "lost_updates": 0}
    }
    lines = [record(n, attempt=n // 2, **(again if n == 2 else {})) for n in range(4)]
    culprit = {"rank": 1, "node": "node0", "cause": "killed", "log_tail": []}
    run = made("one", records=lines, ended=result(state="failed", culprit=culprit))
    data = data_of(run.path)
    [one] = data["runs"]
    assert [(m["what"], m["update"], m["samples"]) for m in one["marks"]] == [
        ("restart", 3, 768),
        ("failed", 4, 1024),
    ]
    drawn = {chart["id"]: chart for chart in charts(data)}
    assert "one went on at update 3: rank 1 was killed" in drawn["loss-update"]["says"]


@pytest.mark.parametrize("shade", COLOURS)
def test_every_chart_of_a_sweep_can_be_drawn(sweep, shade):
    for chart in charts(data_of(sweep)):
        spec = {**chart["spec"], "width": 350, "config": theme(shade)}
        drawn = vl_convert.vegalite_to_svg(json.dumps(spec))
        assert drawn.count("<path") > 5, chart["id"]
        for name in ("steps=1", "steps=2", "steps=4"):
            assert name in chart["says"] or name in drawn


def test_lines_are_told_apart_by_dashes_too(sweep):
    first = charts(data_of(sweep))[0]
    assert len({line["dash"] for line in first["key"]["lines"]}) == 3
    assert "strokeDash" in first["spec"]["layer"][0]["encoding"], "the layer below its marks"


def test_many_runs_have_a_course_of_colours_instead_of_names(made, tmp_path):
    for seed in range(8):
        made(f"many/{seed}", f"train.seed={seed}")
    first = charts(data_of(tmp_path / "many"))[0]
    assert first["key"] == {"lines": [], "course": "from seed=0 (dark) to seed=7 (bright)"}


def test_work_and_waiting_of_ranks_are_drawn_those_first_that_wait_least(made):
    seconds = {"work": [2.0, 9.0, 3.0], "wait": [8.0, 1.0, 7.0]}
    data = data_of(made("ranks", ended=result(seconds_of_ranks=seconds)).path)
    [chart] = [chart for chart in charts(data) if chart["id"] == "work-by-rank"]
    assert chart["says"].startswith(
        "rank 1 waits least: 1.00 s beside 9.00 s of work; rank 0 most: 8.00 s"
    )
    drawn = [value["rank"] for value in chart["spec"]["data"]["values"]]
    assert drawn == ["rank 1", "rank 1", "rank 2", "rank 2", "rank 0", "rank 0"]
    seconds = {"work": [1.0] * 1000, "wait": [float(rank) for rank in range(1000)]}
    [run] = data_of(made("many", ended=result(seconds_of_ranks=seconds)).path)["runs"]
    assert [run["seconds_of_ranks"][n]["rank"] for n in (0, -1)] == [0, 999]
    assert len(run["seconds_of_ranks"]) < 100


@pytest.mark.parametrize(
    ("seconds", "size", "unit", "text"),
    [
        (0.004, 1e-3, "ms", "4.00 ms"),
        (40.0, 1.0, "s", "40.0 s"),
        (9000.0, 3600.0, "h", "2 h 30 min"),
    ],
)
def test_axes_of_time_have_the_unit_that_fits_their_values(made, seconds, size, unit, text):
    lines = [record(n, time=n * seconds, update_s=seconds, compute_s=seconds) for n in range(2)]
    ranks = {"work": [seconds, seconds], "wait": [0.0, 0.0]}
    run = made("0", records=lines, ended=result(seconds_of_ranks=ranks))
    drawn = {chart["id"]: chart for chart in charts(data_of(run.path))}
    curve, shares, by_rank = (
        drawn[name]["spec"] for name in ("loss-elapsed_s", "time-of-updates", "work-by-rank")
    )
    assert curve["encoding"]["x"]["title"] == f"time since the run began to train ({unit})"
    assert curve["data"]["values"][0]["x"][1] == pytest.approx(2 * seconds / size, rel=1e-5)
    assert shares["encoding"]["y"]["title"] == f"time of rank 0 ({unit})"
    assert shares["data"]["values"][0]["compute"][0] == pytest.approx(seconds / size, rel=1e-5)
    assert by_rank["encoding"]["x"]["title"].endswith(f"({unit})")
    assert by_rank["data"]["values"][0]["time"] == pytest.approx(seconds / size)
    assert by_rank["data"]["values"][0]["text"] == text


def test_memory_is_drawn_in_its_unit_and_counts_of_the_plan_have_separators(made):
    parts = {"parameters": 3 * 2**30, "gradients": 2**29}
    data = data_of(made("0", ended=result(memory=parts)).path)
    [chart] = [chart for chart in charts(data) if chart["id"] == "memory"]
    assert chart["spec"]["encoding"]["x"]["title"] == "memory of the largest rank (GiB)"
    assert [value["memory"] for value in chart["spec"]["data"]["values"]] == [3.0, 0.5]
    assert chart["says"] == "parameters: 3.00 GiB; gradients: 512 MiB"
    plan = data["runs"][0]["plan"]
    assert plan["parameters"]["text"] == f"{plan['parameters']['value']:,}"
    assert "," in plan["parameters"]["text"]


def test_the_stages_of_a_batch_schedule_are_on_the_page(made):
    stages = "accumulation.batch_schedule=[[2,512],[4,700]]"
    [run] = data_of(made("grows", "accumulation.global_batch=256", stages).path)["runs"]
    assert "from update 2 on 512 samples in " in run["plan"]["batch_schedule"]["text"]
    assert "; from update 4 on 700 samples in " in run["plan"]["batch_schedule"]["text"]
