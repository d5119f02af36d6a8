"""A sweeper that chooses points by what came of earlier ones is told it, and which have failed."""

import json

from tests.helpers import ROOT, call

ASKER = '''
import json
from pathlib import Path
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.sweeper import Sweeper

class Asker(Sweeper):
    """Asks for one batch of points after another, and writes down what it is told."""

    def __init__(self, batches, then=None, **_):
        self.batches, self.then = batches, then

    def setup(self, *, hydra_context, task_function, config):
        from hydra.core.plugins import Plugins
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments):
        told = []
        if self.then:
            raise RuntimeError(self.then)
        for batch in self.batches:
            points = [[*arguments, *point.split()] for point in batch]
            for came in self.launcher.launch(points, initial_job_idx=len(told)):
                try:
                    told.append(came.return_value)
                except Exception as error:  # the point's own, whatever it is
                    told.append(str(error))
        Path(self.config.hydra.sweep.dir, "told.json").write_text(json.dumps(told))
'''
ONE_RANK = (
    "job._target_=tests.tiny_job.Tiny", "cluster.nodes=1", "cluster.ranks_per_node=1",
    "train.updates=2", "tracker=none",
)  # fmt: skip


def asked(folder, *words):
    """What a search of the asker's in this folder came to."""
    plugin = folder / "path" / "hydra_plugins" / "asker" / "__init__.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text(ASKER)
    return call(
        "-m", *ONE_RANK, "hydra.sweeper._target_=hydra_plugins.asker.Asker", *words,
        f"run.dir={folder}/found", cwd=folder, PYTHONPATH=f"{plugin.parents[2]}:{ROOT}",
    )  # fmt: skip


def test_a_sweeper_is_told_the_objective_of_each_point_and_that_one_has_failed(tmp_path):
    fails = "train.seed=2 job.fault=raise job.fault_rank=0"
    batches = f"[['train.seed=1','{fails}'],['train.seed=3','train.seed=3'],['train.seed=1']]"
    done = asked(tmp_path, f"+hydra.sweeper.batches={batches}", "sweep.objective=loss")
    assert done.returncode == 1, done.stdout + done.stderr
    first, failed, third, twice, again = json.loads((tmp_path / "found" / "told.json").read_text())
    results = [
        json.loads((tmp_path / "found" / str(number) / "result.json").read_text())
        for number in range(3)
    ]
    assert (twice, again) == (third, first), "what has been computed is not computed again"
    assert sorted(path.name for path in (tmp_path / "found").glob("[0-9]*")) == ["0", "1", "2"]
    assert [first, third] == [results[0]["loss"], results[2]["loss"]]
    assert "rank 0" in failed, "who failed, and why"
    assert [r["state"] for r in results] == ["finished", "failed", "finished"]


def test_a_sweeper_that_fails_by_itself_is_named_and_the_configuration_is_not_blamed(tmp_path):
    done = asked(tmp_path, "+hydra.sweeper.batches=[]", "+hydra.sweeper.then='out of its mind'")
    assert done.returncode == 2
    why = "the sweeper hydra_plugins.asker.Asker ended with RuntimeError: out of its mind"
    assert why in " ".join(done.stderr.split())
