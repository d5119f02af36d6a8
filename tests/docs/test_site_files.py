"""The site files of the page on SLURM make batch scripts, and the weights load in plain torch."""

import re

import pytest
from torch import nn

from orchestrator.clusters.api import cluster_of
from orchestrator.config.command_line import CommandLine
from orchestrator.config.composer import Composer
from tests.docs.scripts import page_text, script
from tests.helpers import SMALL, TINY, call
from tests.tiny_job import Tiny

SITES = dict(
    re.findall(r"```yaml\n# cluster/(\w+)\.yaml\n(.*?)```", page_text("slurm.md"), re.DOTALL)
)
FLAGS = {
    "gpu_site": {"--gpus-per-node=a100:4", "--account=my_project", "--constraint=ib", "--time=720"},
    "cpu_site": {"--mem=61440M", "--exclusive", "--qos=normal", "--mail-type=FAIL"},
}


@pytest.mark.parametrize("site", FLAGS)
def test_a_site_file_makes_a_batch_script(site, tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / f"{site}.yaml").write_text(SITES[site])
    line = CommandLine(overrides=(f"+cluster={site}",), config_dir=str(tmp_path))
    config = Composer(line).compose().config()
    flags = set(
        re.findall(r"^#SBATCH (\S+)", cluster_of(config).request(tmp_path, 0).text, re.MULTILINE)
    )
    assert flags >= FLAGS[site]


def test_the_weights_of_a_run_load_in_plain_torch(tmp_path):
    assert SITES.keys() == FLAGS.keys()
    done = call(TINY, SMALL, "train.updates=2", f"run.dir={tmp_path / 'RUN'}", "-q")
    assert done.returncode == 0, done.stderr
    model = Tiny().model()
    before = [parameter.clone() for parameter in model.parameters()]
    text = script("run-folder.md", "weights.py").replace("RUN", str(tmp_path / "RUN"))
    exec(compile(text, "weights.py", "exec"), {"model": model})  # noqa: S102  # as a reader types it
    after = list(model.parameters())
    assert isinstance(model, nn.Module)
    assert any(not one.equal(other) for one, other in zip(before, after, strict=True))
