"""Examples of pages do what the pages say, some of them made shorter."""

import json
import re

import pytest
from torch import nn

from orchestrator import Shards
from orchestrator.client.options import WindowOptions, plan_of
from orchestrator.clusters.api import cluster_of
from orchestrator.config.command_line import CommandLine
from orchestrator.config.composer import Composer
from tests.docs.printed import ROOT, blocks, typed
from tests.docs.scripts import page_text, script
from tests.helpers import call, result, verb

pytestmark = pytest.mark.long

LENGTHS = (20, 7, 33, 12, 25, 3)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shards.py").write_text(script("data.md", "shards.py"))
    (tmp_path / "data").mkdir()
    number = 0
    for shard, length in enumerate(LENGTHS):
        rows = [[n / 100, n / 50 + 1] for n in range(number, number + length)]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / "data" / f"{shard}.jsonl").write_text(text)
        number += length
    return tmp_path


def test_the_job_over_shards_has_the_same_bits_on_other_ranks_and_its_weights_load(folder):
    same = (
        "job._target_=shards.Numbers",
        "job.folder=data",
        "accumulation.global_batch=24",
        "accumulation.micro_batch=4",
        "accumulation.reduction=reproducible",
        "cluster.nodes=1",
        "tracker=none",
        "schedule.base_lr=0.05",
        "-q",
    )
    call(*same, "cluster.ranks_per_node=3", "train.updates=11", "run.dir=a", cwd=folder, code=0)
    call(*same, "cluster.ranks_per_node=1", "train.updates=6", "run.dir=b", cwd=folder, code=0)
    more = ("train.updates=11", "cluster.ranks_per_node=2", "-q")
    verb("resume", "b", *more, cwd=folder, code=0)
    assert result(folder / "a")["weights_sha256"] == result(folder / "b")["weights_sha256"]
    plan = json.loads((folder / "a" / "plan.json").read_text())
    assert plan["shards"] == {"lengths": list(LENGTHS), "lanes": 16}
    model = nn.Linear(1, 1)  # that of the job
    before = model.weight.clone()
    text = script("run-folder.md", "weights.py").replace("RUN", str(folder / "a"))
    exec(compile(text, "weights.py", "exec"), {"model": model})  # noqa: S102  # as a reader types it
    assert not model.weight.equal(before)


def test_windows_of_a_loop_take_the_shards():
    shards = Shards(LENGTHS, 4)
    options = WindowOptions.of({"global_batch": 10, "steps": 1, "shards": shards})
    plan = plan_of(sum(LENGTHS), options, ranks=2, reduction="fast")
    assert plan.order.shards == shards


def test_the_batch_grows_as_the_page_says(tmp_path):
    grow, branch = (
        words[words.index("launch") + 1 :]
        for kind, text in blocks(ROOT / "docs" / "how-to" / "growing-batch.md")
        for words in (typed(text, tmp_path) if kind == "bash" else ())
    )
    small = ("cluster.nodes=1", "cluster.ranks_per_node=1", "tracker=none")
    run = tmp_path / "runs" / "trunk"
    more = ("train.checkpoint_every=40", "train.keep_checkpoints=9", f"run.dir={run}")
    call(*grow, *small, *more, "-q", cwd=tmp_path, code=0)
    found = result(run)
    assert 12_000 <= found["samples"] < 12_000 + 160
    plan = json.loads((run / "plan.json").read_text())
    assert [stage["update"] for stage in plan["batch_schedule"]] == [20, 50]
    done = call(*branch, *small, cwd=tmp_path, code=0)
    assert "3 of 3 points finished" in done.stdout
    assert "4,000" in done.stdout, "the samples at which losses are compared"


SITES = dict(
    re.findall(r"```yaml\n# cluster/(\w+)\.yaml\n(.*?)```", page_text("slurm.md"), re.DOTALL)
)
FLAGS = {
    "gpu_site": {"--gpus-per-node=a100:4", "--account=my_project", "--constraint=ib", "--time=720"},
}


@pytest.mark.parametrize("site", SITES)
def test_a_site_file_makes_a_batch_script(site, tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / f"{site}.yaml").write_text(SITES[site])
    line = CommandLine(overrides=(f"+cluster={site}",), config_dir=str(tmp_path))
    config = Composer(line).compose().config()
    flags = set(
        re.findall(r"^#SBATCH (\S+)", cluster_of(config).request(tmp_path, 0).text, re.MULTILINE)
    )
    assert flags >= FLAGS[site]


def test_the_commands_of_the_page_end_with_one_digest(tmp_path):
    block = re.search(r"```bash\n(.*?)```", page_text("reproducible.md"), re.DOTALL)[1]
    lines = [line.split() for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    digests = set()
    for number, (_, _, _, _, *arguments) in enumerate(lines):
        shorter = ("job.layers=[784,32,10]", "train.updates=3")
        folder = tmp_path / str(number)
        call(*arguments, *shorter, f"run.dir={folder}", "-q", code=0)
        digests.add(result(folder)["weights_sha256"])
    assert len(digests) == 1
