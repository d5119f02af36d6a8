"""Sweeps as commands: their folders, their plans, and `resume SWEEP` without the line."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from orchestrator.__main__ import app
from orchestrator.config.command_line import read_command_line
from orchestrator.config.composer import Composer, compose
from orchestrator.errors import ConfigError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import locked
from orchestrator.runs.planning import with_notes
from orchestrator.runs.start import prepare
from tests.helpers import LIGHT, call, result, verb

pytestmark = pytest.mark.whole_runs

ONE = ("cluster.nodes=1", "cluster.ranks_per_node=1", "accumulation.global_batch=8")


def test_unfinished_points_go_on_and_finished_ones_with_more_updates(tmp_path):
    sweep = tmp_path / "sweep"
    line = ("-m", LIGHT, *ONE, "tracker=none", "train.updates=2", "train.seed=1,2")
    call(*line, f"run.dir={sweep}", code=0)
    (sweep / "1" / "result.json").unlink()  # as if its launcher had been killed at the end
    for saved in (sweep / "1" / "checkpoints").iterdir():
        shutil.rmtree(saved)
    sweep = sweep.rename(tmp_path / "moved")
    gone_on = verb("resume", "../moved", cwd=tmp_path / "moved", code=0)
    assert "done (finished)" in gone_on.stdout
    assert "to go on (lost)" in gone_on.stdout
    assert [result(sweep / n)["updates"] for n in "01"] == [2, 2]
    with locked(RunDir(sweep / "1")):
        (sweep / "1" / "result.json").rename(tmp_path / "kept")
        assert "1 point queued or running" in verb("resume", sweep, code=0).stdout
        refused = verb("resume", sweep, "run.max_restarts=1", code=2)
        assert "point 1 of" in refused.stderr
        assert "cannot take run.max_restarts=1 while in progress; to stop first" in refused.stderr
    (tmp_path / "kept").rename(sweep / "1" / "result.json")
    verb("resume", sweep, "train.updates=3", code=0)
    assert [result(sweep / n)["updates"] for n in "01"] == [3, 3]
    assert RunDir(sweep / "0").read_resumes()[-1]["overrides"] == ["train.updates=3"]
    refused = verb("resume", sweep, "train.seed=7", code=2)
    assert "train.seed" in refused.stderr


def test_tables_show_the_values_that_a_resume_set(tmp_path):
    sweep = tmp_path / "sweep"
    line = ("-m", LIGHT, *ONE, "tracker=none", "train.updates=1,2", f"run.dir={sweep}")
    call(*line, code=0)
    verb("resume", sweep / "0", "train.updates=4", code=0)
    resumed = verb("resume", sweep, "train.updates=5", code=0).stdout
    assert "point 1: to go on" in resumed, "they do not differ any more"
    verb("resume", sweep / "0", "train.updates=6", code=0)
    for table in (verb("resume", sweep, code=0).stdout, call(*line, code=0).stdout):
        rows = [row.split()[:3] for row in table.splitlines() if " finished " in row]
        assert rows == [["0", "6", "finished"], ["1", "5", "finished"]]


def test_a_sweep_goes_on_from_any_folder_also_where_its_job_cannot_be_imported(tmp_path):
    (tmp_path / "own_light.py").write_text("from tests.light_job import Light as Own\n")
    words = ("job._target_=own_light.Own", *ONE, "tracker=none", "train.updates=2", "run.dir=sweep")
    call("-m", *words, "train.seed=1,2", cwd=tmp_path, code=0)
    for point in "01":
        (tmp_path / "sweep" / point / "result.json").unlink()
    done = verb("resume", "../sweep", cwd=tmp_path / "sweep", code=0)
    assert "2 of 2 points finished" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    "override",
    [
        "job.x=${run.name}/x",
        "cluster.account=${run.dir}-x",
        "cluster.preamble=['cd ${run.name}/x']",
        "job.more={x: [a, '${run.name}/x']}",
    ],
)
def test_a_null_within_a_text_is_refused(override):
    with pytest.raises(ConfigError, match=r"run\.(name|dir) is null") as caught:
        Composer(read_command_line([f"++{override}"])).compose()
    assert str(caught.value).startswith(override.partition("=")[0])


# ------------------------------------------------------------------ Plans


def planned(*arguments):
    done = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("asked", "points"),
    [(["-m", "cluster.nodes=1,3", "accumulation.steps=2"], 2), (["-m", "train.updates=5"], 1)],
)
def test_each_point_of_a_sweep_has_the_plan_that_it_has_alone(asked, points):
    found = json.loads(planned(*asked, "--json"))
    assert len({str(plan["overrides"]) for plan in found}) == points
    for plan in found:
        config = compose(plan.pop("overrides"))
        alone = with_notes(prepare(config), config)
        assert plan.pop("point")["action"] == "to run"
        assert plan == json.loads(json.dumps(alone))
    words = planned(*asked)
    for number in range(points):
        assert f"point {number}: " in words
    assert words.count("samples in the data set") == 1, "what they have in common comes once"


def test_labels_of_points_have_short_keys_that_vary():
    lines = planned("-m", "++train.seed=1,2", "++train.clip_norm=1").splitlines()
    assert [line.rstrip() for line in lines if line.startswith("point ")] == [
        "point 0: seed=1",
        "point 1: seed=2",
    ]


def test_a_plan_without_a_sweep_is_one():
    assert json.loads(planned("train.updates=5", "--json"))["updates"] == 5
    assert "point 0" not in planned("train.updates=5")


def test_swept_keys_that_end_alike_keep_their_names():
    values = ("+cluster.environment.seed=a,b", "train.seed=1,2", "train.clip_norm=1,2")
    assert "cluster.environment.seed=b train.seed=1 clip_norm=2" in planned("-m", *values)
