"""`status --sort`, `--columns` and `--tag`: runs by their figures, settings and names."""

import json
import math
from pathlib import Path

import pytest

from orchestrator.rundir.status import RunStatus
from orchestrator.runs.status import sorted_by
from tests.helpers import LIGHT, SMALL, call, verb

COMMON = (
    LIGHT,
    SMALL,
    "cluster.nodes=1",
    "train.evaluate_every=2",
    "accumulation.global_batch=24",
    "accumulation.steps=2",
    "tracker=none",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, more in {
        "short": ("train.updates=2", "run.tags=[base,1e3]", "run.note='first try, seed 0'"),
        "long": ("train.updates=20", "run.tags=[best]", "train.keep_best=-held_out.loss"),
        "none": ("train.updates=4", "train.seed=3"),
    }.items():
        call(*COMMON, *more, f"run.dir={folder / 'runs' / name}", cwd=folder, code=0)
    return folder


def names(folder, *words):
    rows = json.loads(verb("status", *words, "--json", cwd=folder, code=0).stdout)
    return [row["folder"].rpartition("/")[2] for row in rows], rows


def test_runs_are_sorted_by_a_figure_and_columns_are_chosen(folder):
    order, rows = names(folder, "--sort", "-held_out.loss")
    assert order[0] == "long"
    assert [row["held_out.loss"] for row in rows] == sorted(row["held_out.loss"] for row in rows)
    assert names(folder, "--sort", "updates")[0] == ["long", "none", "short"]
    assert names(folder, "--sort", "best")[0][0] == "long"  # the only one that keeps its best
    shown = verb("status", "--columns", "train.seed,note,tags,best", cwd=folder, code=0).stdout
    heading, *lines = shown.splitlines()
    assert heading.split() == ["run", "state", "train.seed", "note", "tags", "best"]
    [short] = [line for line in lines if "runs/short" in line]
    assert "first try, seed 0" in short
    assert "base, 1e3" in short
    assert names(folder, "--columns", "train.seed")[1][0]["train.seed"] == 0


def test_runs_are_found_by_tags_and_a_resume_changes_them(folder):
    assert names(folder, "--tag", "1e3")[0] == ["short"]
    assert names(folder, "--tag", "other")[0] == []
    assert (
        "no run has the tag other in runs/" in verb("status", "--tag", "other", cwd=folder).stdout
    )
    verb("resume", "runs/none", "train.updates=5", "run.tags=[other]", cwd=folder, code=0)
    assert names(folder, "--tag", "other")[0] == ["none"]
    verb("resume", "runs/none", "train.updates=6", "run.tags=[]", cwd=folder, code=0)
    assert names(folder, "--tag", "other")[0] == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--sort", "held_out.los"], "did you mean 'held_out.loss'?"),
        (["--columns", "train.sed"], "did you mean 'train.seed'?"),
        (["--columns", "lr"], "no run has a value of 'lr'"),
    ],
)
def test_what_no_run_has_is_refused(folder, words, text):
    done = verb("status", *words, cwd=folder)
    assert done.returncode == 2
    assert text in done.stderr


@pytest.mark.parametrize("figure", ["loss", "-loss"])
def test_runs_that_diverged_come_after_those_with_a_number(figure):
    losses = {"a": 0.5, "b": math.nan, "c": 0.1, "d": math.inf, "e": None, "f": math.nan, "g": 0.3}
    runs = [
        RunStatus(folder=Path(name), state="finished", cluster="local", loss=loss)
        for name, loss in losses.items()
    ]
    order = "".join(run.folder.name for run in sorted_by(runs, figure))
    assert order == ("dagc" if figure == "loss" else "cgad") + "bfe"


@pytest.mark.parametrize("words", [("--columns", "train.seed"), ("--sort", "train.seed")])
def test_a_run_with_an_edited_configuration_hides_no_other(folder, words):
    config = folder / "runs" / "none" / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("seed: 3", "seed: 4"))
    done = verb("status", *words, "--json", cwd=folder, code=0)
    alone = verb("status", "runs/none", *words, cwd=folder, code=2)
    config.write_text(text)
    rows = {row["folder"].rpartition("/")[2]: row["train.seed"] for row in json.loads(done.stdout)}
    assert rows == {"short": 0, "long": 0, "none": None}
    assert done.stderr.count("config.yaml is damaged") == 1
    assert "config.yaml is damaged" in alone.stderr
