"""The folder of a run in its job's arguments, of single runs and of points of a sweep."""

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
