"""`run.windows` in a run: after a stop it ends with the same bits and a record without gap."""

import json
import re

import pytest

from tests import helpers, warm
from tests.programs import script

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

LOOP = """\
import hashlib, os, time, torch, torch.distributed as dist
from torch import nn
from orchestrator import Accumulator, Loss, current_run as run
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Dropout(0.3), nn.Linear(50, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
ours = Accumulator(model, optimizer, reduction="reproducible", metric_names=["right"])
x = torch.randn(700, 20, generator=torch.Generator().manual_seed(1))
y = x[:, :3].argmax(1)
for window in run.windows(
    len(x), global_batch=140, micro_batch=16, updates=12, state={"rate": rate}
):
    for piece in window:
        scores = model(x[piece])
        right = {"right": (scores.argmax(1) == y[piece]).sum()}
        total = nn.functional.cross_entropy(scores, y[piece], reduction="sum")
        ours.backward(Loss(total, len(piece), right))
    ours.boundary()
    rate.step()
    if run and not run.attempt:
        if window.update == 3:
            open("here-" + os.environ["RANK"], "w").close()
        while window.update > 3 and not os.path.exists("go"):
            time.sleep(0.01)  # until the stop has been sent
whole = b"".join(weights.detach().numpy().tobytes() for weights in model.parameters())
print("stopping" if run.stopping else "final", hashlib.sha256(whole).hexdigest(), flush=True)
"""


def test_stopped_by_one_rank_and_resumed_it_has_the_bits_of_plain_python(tmp_path):
    text = script(tmp_path, LOOP)
    run = tmp_path / "run"
    process = helpers.begin(
        "run",
        "cluster.ranks_per_node=1",
        f"run.dir={run}",
        "--",
        text,
        module="orchestrator",
        cwd=tmp_path,
    )
    helpers.until(lambda: len(list(tmp_path.glob("here-*"))) == 2, what="both ranks")
    programs = [p for p in helpers.processes_of(text) if p.is_running()]
    next(p for p in programs if p.environ().get("RANK") == "1").terminate()
    (tmp_path / "go").touch()
    helpers.await_exit(process, 3)
    stopped = len(helpers.records(run))
    assert 3 < stopped < 12
    assert f"update-{stopped:09d}" in [folder.name for folder in (run / "checkpoints").iterdir()]
    helpers.verb("resume", run, code=0)

    logs = [(run / "logs" / f"rank-{rank:05d}.log").read_text() for rank in range(2)]
    said = [re.findall(r"^(stopping|final) (\w+)", log, re.MULTILINE) for log in logs]
    assert said[0] == said[1]
    assert [word for word, _ in said[0]] == ["stopping", "final"]
    alone = warm.call(
        "train", [], cwd=tmp_path, env=helpers.environment(), timeout=helpers.LIMIT_S, kind="runs"
    )
    assert alone.stdout.split() == list(said[0][1]), alone.stderr

    records = helpers.records(run)
    assert [record["update"] for record in records] == [*range(12)]
    assert [record["attempt"] for record in records] == [0] * stopped + [1] * (12 - stopped)
    assert all(0 < record["metrics"]["right"] <= 1 for record in records)
    rate = records[-1]["learning_rate"] / (0.01 * 0.95**11)
    assert abs(rate - 1) < 1e-9, "of the update, before the scheduler steps"
    status = json.loads(helpers.verb("status", run, "--json").stdout)[0]
    assert (status["state"], status["updates"]) == ("finished", 12)


NORMS = """\
import torch
from torch import nn
from orchestrator import Accumulator, Loss, current_run as run, with_norms
model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
ours = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
for window in run.windows(8, updates=1, global_batch=8, steps=2):
    for piece in window:
        ours.backward(Loss(model(torch.ones(len(piece), 2)).sum(), len(piece)))
    ours.boundary()
plain, _ = with_norms(model, "group")
assert not any(isinstance(layer, nn.BatchNorm1d) for layer in plain.modules())
"""


def test_batch_norms_in_a_loop_are_warned_of(tmp_path):
    script(tmp_path, NORMS)
    words = ("run", "cluster.ranks_per_node=1", "cluster.nodes=1", "run.dir=run", "--", "train.py")
    done = helpers.verb(*words, cwd=tmp_path, code=0)
    assert "warning: batch norm in 1 sees one micro-batch" in done.stdout
    status = json.loads(helpers.verb("status", tmp_path / "run", "--json").stdout)[0]
    [warning] = status["warnings"]
    assert "with_norms(model, 'group')" in str(warning)
    assert "engine.norm" not in str(warning), "a program has no such key"
