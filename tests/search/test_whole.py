"""Whole searches, as commands, of a plain program: killed, pruned, reported of from the folder."""

import json
import signal

import pytest

from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import is_locked
from orchestrator.sweep.tasks import locked_sweep
from tests.docs.json_fields import Fields, printed
from tests.helpers import begin, call, result, until, verb
from tests.search.helpers import line_of

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

WITH_A_VALUE, IN_ALL = 4, 6
SEED = 1  # draws two points that cannot be among its first six


def trials_of(folder):
    return json.loads((folder / "search.json").read_text())["trials"]


def over_in(folder):
    known = trials_of(folder) if (folder / "search.json").exists() else []
    return sum(trial["state"] != "open" for trial in known)


def test_a_killed_search_goes_on_from_another_start_and_tells_its_best(tmp_path):
    folder = tmp_path / "found"
    line = (
        "-m",
        *line_of(
            folder,
            f"sweep.trials={IN_ALL}",
            f"sweep.seed={SEED}",
            "sweep.parallel=1",
            "job.arguments.pause=0.05",
        ),
    )
    begun = begin(*line)
    until(lambda: over_in(folder) >= 2)
    begun.send_signal(signal.SIGKILL)
    begun.communicate()
    until(lambda: not is_locked(RunDir(folder)))  # the kernel ends what the search had forked
    with locked_sweep(folder):  # as another shell would
        refused = call(*line)
    assert refused.returncode == 2
    assert "in progress" in refused.stderr
    done = call(*line, code=0)
    trials = trials_of(folder)
    assert [trial["state"] for trial in trials].count("complete") == WITH_A_VALUE
    assert [trial["state"] for trial in trials].count("failed") == IN_ALL - WITH_A_VALUE
    values = {trial["value"]: trial for trial in trials if trial["value"] is not None}
    for value, trial in values.items():
        assert result(folder / trial["folder"])["loss"] == value
    assert f"the best is trial {values[min(values)]['number']}" in done.stdout
    shown = verb("status", folder, code=0)
    assert f"{IN_ALL} of {IN_ALL} trials: {WITH_A_VALUE} complete, 2 failed" in shown.stdout
    rows = json.loads(verb("status", folder, "--json").stdout)
    reported = {trial["number"]: trial["value"] for row in rows for trial in row["trials"]}
    assert reported == {trial["number"]: trial["value"] for trial in trials}


def test_a_hopeless_trial_is_stopped_and_stays_pruned_when_the_search_goes_on(tmp_path):
    folder = tmp_path / "found"
    script = line_of(folder)[-2:]
    shared = (
        "cluster.nodes=1",
        "cluster.ranks_per_node=1",
        "tracker=none",
        "sweep.search=grid",
        "sweep.prune=median",
        "sweep.parallel=1",
        f"run.dir={folder}",
        "job.arguments.k=1",
        "job.arguments.updates=600",
        "job.arguments.pause=0.05",
        "job.arguments.slow_from=1",
    )
    line = ("-m", "job.arguments.lr=0.3,0.31,0.32,0.33,0.34,5", *shared, *script)
    done = call(*line, code=0)
    assert [trial["state"] for trial in trials_of(folder)] == ["complete"] * 5 + ["pruned"]
    assert "worse after update 1 than the median" in done.stdout
    stopped = result(folder / "5")
    assert stopped["state"] == "stopped"
    assert stopped["updates"] < 600
    listed = verb("status", folder).stdout
    assert "6 of 6 trials: 5 complete, 1 pruned" in listed
    assert "the best is trial 0: loss " in listed
    (tmp_path / "own").mkdir()
    verb("resume", folder, "--config-dir", "own", cwd=tmp_path, code=0)
    assert result(folder / "5")["updates"] == stopped["updates"], "it is not run again"
    line = json.loads((folder / "search.json").read_text())["line"]
    assert line["config_dir"] == str(tmp_path / "own"), "as it was meant where it was typed"


def test_unknown_figure_is_refused_at_the_first_evaluation(tmp_path):
    space = ("-m", "job=digits", "schedule.base_lr=0.1,0.2,0.3", "sweep.search=grid")
    more = (
        "cluster.nodes=1",
        "cluster.ranks_per_node=1",
        "tracker=none",
        "train.epochs=500",
        "train.evaluate_every=1",
        "sweep.parallel=2",
        f"run.dir={tmp_path / 'found'}",
    )
    done = call(*space, *more, "sweep.objective=acuracy", "sweep.direction=maximize", code=2)
    said = done.stdout + done.stderr
    assert "sweep.objective=acuracy: the job does not evaluate it" in said
    assert "did you mean 'held_out.accuracy'" in said
    assert "interrupted twice" not in said


def test_held_out_figures_have_names_of_their_own_and_are_the_default(tmp_path):
    space = ("-m", "job=digits", "schedule.base_lr=0.001,0.01", "sweep.search=grid")
    more = ("cluster.nodes=1", "cluster.ranks_per_node=1", "tracker=none", "train.updates=2")
    for name, objective in (("auto", ()), ("training", ("sweep.objective=loss",))):
        folder = tmp_path / name
        call(*space, *more, *objective, f"run.dir={folder}", code=0)
        for trial in trials_of(folder):
            found = result(folder / trial["folder"])
            held_out = found["metrics"]["loss"]
            assert held_out != found["loss"]
            assert trial["value"] == (held_out if name == "auto" else found["loss"])
    table = json.loads((tmp_path / "auto" / "search.json").read_text())
    assert table["objective"] == "held_out.loss"


def test_status_has_the_documented_fields_of_trials(tmp_path):
    fields, folder = Fields("status"), tmp_path / "search"
    call("-m", *line_of(folder, "sweep.trials=6", "sweep.seed=1"), cwd=tmp_path)
    fields.check(printed("status", folder))
    assert not {path for path in fields.unseen if "/trials" in path}
