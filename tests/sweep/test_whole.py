"""Whole sweeps as commands: their folders, and `resume SWEEP` without the line."""

import shutil

import pytest

from orchestrator.config.command_line import read_command_line
from orchestrator.config.composer import Composer
from orchestrator.errors import ConfigError
from orchestrator.sweep.points import check_points, shared_output
from tests.helpers import LIGHT, call, result, verb
from tests.programs import script

ONE = ("cluster.nodes=1", "cluster.ranks_per_node=1", "accumulation.global_batch=8")


def test_unfinished_points_go_on_and_finished_ones_with_more_updates(tmp_path):
    sweep = tmp_path / "sweep"
    line = (
        "-m",
        LIGHT,
        *ONE,
        "tracker=none",
        "train.updates=2",
        "train.seed=1,2",
        f"run.dir={sweep}",
    )
    call(*line, code=0)
    (sweep / "1" / "result.json").unlink()  # as if its launcher had been killed at the end
    for saved in (sweep / "1" / "checkpoints").iterdir():
        shutil.rmtree(saved)
    gone_on = verb("resume", sweep, code=0)
    assert "done (finished)" in gone_on.stdout
    assert "to go on (lost)" in gone_on.stdout
    assert [result(sweep / n)["updates"] for n in "01"] == [2, 2]
    verb("resume", sweep, "train.updates=3", code=0)
    assert [result(sweep / n)["updates"] for n in "01"] == [3, 3]
    refused = verb("resume", sweep, "train.seed=7", code=2)
    assert "train.seed" in refused.stderr


PROGRAM = "import sys\nprint('WORDS', *sys.argv[1:])\n"


def test_each_point_writes_to_its_own_run_folder(tmp_path):
    script(tmp_path, PROGRAM)
    line = ("-m", *ONE[:2], f"run.dir={tmp_path / 'sweep'}", "job.arguments.seed=1,2")
    words = ("job.arguments.out=${run.dir}/weights", "--", "train.py", "--log", "{run.dir}/log")
    done = call(*line, *words, cwd=tmp_path, code=0)
    for point in "01":
        run = tmp_path / "sweep" / point
        log = (run / "logs" / "rank-00000.log").read_text()
        assert f"WORDS --log {run}/log --seed={int(point) + 1} --out={run}/weights" in log
    assert "same place" not in done.stdout


@pytest.mark.parametrize("override", ["job.x=${run.name}/x", "cluster.account=${run.dir}-x"])
def test_a_null_within_a_text_is_refused(override):
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=r"run\.(name|dir) is null") as caught:
        Composer(read_command_line([f"++{override}"])).compose()
    assert f"{key}={value}" in str(caught.value)


def test_a_warning_names_an_output_that_points_share(tmp_path, monkeypatch):
    script(tmp_path, PROGRAM)
    monkeypatch.chdir(tmp_path)

    def warning(*words):
        line = ["-m", "job.arguments.seed=1,2", "--", "train.py", *words]
        return shared_output(check_points(Composer(read_command_line(line))))

    assert "--output_dir {run.dir}/results" in warning("--output_dir", "a/results")
    assert warning("--output_dir", "{run.dir}/results") is None
    assert warning("--data_dir", "results") is None
