"""The folder of a run in its job's arguments, of single runs and of points of a sweep."""

import pytest

from orchestrator.config.command_line import read_command_line
from orchestrator.config.composer import Composer
from orchestrator.errors import ConfigError
from tests.helpers import call
from tests.programs import script

ONE_RANK = ("cluster.nodes=1", "cluster.ranks_per_node=1")
PROGRAM = "import sys\nprint('WORDS', *sys.argv[1:])\n"


def test_each_point_writes_to_its_own_run_folder(tmp_path):
    script(tmp_path, PROGRAM)
    line = ("-m", *ONE_RANK, f"run.dir={tmp_path / 'sweep'}", "job.arguments.seed=1,2")
    words = ("job.arguments.out=${run.dir}/weights", "--", "train.py", "--log", "{run.dir}/log")
    done = call(*line, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for point in "01":
        run = tmp_path / "sweep" / point
        log = (run / "logs" / "rank-00000.log").read_text()
        assert f"WORDS --log {run}/log --seed={int(point) + 1} --out={run}/weights" in log


@pytest.mark.parametrize("override", ["job.x=${run.name}/x", "cluster.account=${run.dir}-x"])
def test_a_null_within_a_text_is_refused(override):
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=r"run\.(name|dir) is null") as caught:
        Composer(read_command_line([f"++{override}"])).compose()
    assert f"{key}={value}" in str(caught.value)
