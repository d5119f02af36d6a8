"""Lightning, Accelerate and the Trainer: unmodified in a run, and with our callbacks."""

import json
import re

import pytest

from tests import helpers
from tests.callbacks.scripts import IN_A_RUN, PLAIN
from tests.programs import script


def log(run, rank):
    return (run / "logs" / f"rank-{rank:05d}.log").read_text()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The three as they are, on two nodes of two ranks: the run that ends with rank 1's error, and
    what four of torchrun's printed.
    """
    folder = tmp_path_factory.mktemp("plain")
    script(folder, PLAIN)
    failed = helpers.call(
        "run", f"run.dir={folder / 'run'}", "--", "train.py", "--die",
        module="orchestrator", cwd=folder, timeout=170,
    )  # fmt: skip
    assert failed.returncode == 1, failed.stdout + failed.stderr
    peer = helpers.call(
        "--standalone", "--nproc-per-node=4", "train.py",
        module="torch.distributed.run", cwd=folder, timeout=170, GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    return folder / "run", peer


@pytest.mark.timeout(400)
def test_unmodified_they_end_with_the_losses_that_they_have_under_torchrun(plain):
    run, peer = plain
    told = re.compile(r"final (\w+) (\d+\.\d+(?:e-\d+)?)")
    theirs = sorted(told.findall(peer.stdout))
    assert {name for name, _ in theirs} == {"accelerate", "lightning", "trainer"}, peer.stderr
    ours = sorted(ending for rank in range(4) for ending in told.findall(log(run, rank)))
    assert len(ours) == 12
    assert ours == theirs


def test_a_rank_that_fails_in_a_framework_is_named_with_its_exception(plain):
    run, _ = plain
    found = helpers.result(run)["culprit"]
    assert found["rank"] == 1
    assert found["cause"].startswith("ValueError: the trainer's rank 1 has no such word")


@pytest.mark.timeout(400)
def test_with_callbacks_each_stops_together_and_goes_on_from_its_own_checkpoint(tmp_path):
    """Accelerate is stopped in the first start, the Trainer in the second, Lightning in the third;
    the fourth ends.
    """
    text, run = script(tmp_path, IN_A_RUN), tmp_path / "run"
    stopped = []
    for attempt, name in enumerate(("accelerate", "trainer", "lightning", None)):
        asked = (
            ("run", "cluster.ranks_per_node=1", f"run.dir={run}", "--", text)
            if attempt == 0
            else ("resume", run)
        )
        process = helpers.begin(*asked, module="orchestrator", cwd=tmp_path)
        if name is not None:
            there = f"here-{name}-*"
            helpers.until(lambda t=there: len(list(tmp_path.glob(t))) == 2, 150, what=there)
            victim = [
                p for p in helpers.processes_of(text) if p.environ().get("RANK") == f"{attempt % 2}"
            ]
            victim[0].terminate()
        output, _ = process.communicate(timeout=150)
        assert process.returncode == (0 if name is None else 3), output + log(run, 0) + log(run, 1)
        stopped.append(sum(record["attempt"] <= attempt for record in helpers.records(run)))
    assert stopped[-1] == 90
    records = helpers.records(run)
    assert [record["update"] for record in records] == [*range(30)] * 3, "no gap, none twice"
    assert all(3 < at - 30 * number < 30 for number, at in enumerate(stopped[:3]))
    saved = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {record["update"] for record in saved if "saved" in record} >= {
        at - 30 * number - 1 for number, at in enumerate(stopped[:3])
    }
