"""`orchestrator audit` as a person types it."""

import json
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.audit import auditing
from orchestrator.errors import ConfigError
from orchestrator.runs.follow import OutputOptions
from tests.docs.json_fields import Fields, printed
from tests.helpers import LIGHT, LIMIT_S, ROOT, TINY, begin_anew, until, verb

pytestmark = pytest.mark.long

ALONE = "cluster.ranks_per_node=1"  # where more than one would prove no more
LOOP = str(Path(__file__).with_name("loop.py"))
SCRIPT = """\
import os, torch
import torch.distributed as dist
from torch import nn
if "RANK" in os.environ and {grouped}:
    dist.init_process_group("{backend}")
torch.manual_seed(int(os.environ.get("RANK", "0")))
data = [torch.randn(4, 3) for _ in range(40)]
torch.manual_seed(0)
model = nn.Linear(3, 2){cuda}
if {grouped}:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for i, x in enumerate(data):
    y = (x[:, 0] > 0).long()
    loss = nn.functional.cross_entropy(model(x{cuda}), y{cuda}) / 2
    {body}
    loss.backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
open("written", "w").close()
"""


def audit(*arguments, cwd=None, **more):
    done = verb("audit", "--json", *arguments, cwd=cwd, **more)
    runs = json.loads(done.stdout)["runs"] if done.stdout else []
    return done, runs


def script(folder, name="train.py", **parts):
    values = {"grouped": True, "backend": "gloo", "cuda": "", "body": "pass", **parts}
    (folder / name).write_text(SCRIPT.format(**values))


def test_a_wrong_loop_is_told_with_what_would_fix_it(tmp_path):
    line = ("cluster.ranks_per_node=2", "--", LOOP, "padded-tokens")
    # In new interpreters, as a person types it; other audits' ranks are forks (warm_nodes.py).
    done = verb("audit", *line, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 1, done.stdout + done.stderr
    first, *_ = (line for line in done.stdout.splitlines() if "weights" in line)
    assert first.startswith("WRONG")
    assert "padded-tokens: a mean over tokens in each micro-step" in done.stdout
    assert "dist.all_reduce(n)" in done.stdout
    assert not list(tmp_path.iterdir())


def test_what_a_script_writes_is_gone_and_what_it_reads_is_there(tmp_path):
    script(tmp_path, body='open("data.txt").read(); open("../near.txt").read()')
    (tmp_path / "data.txt").write_text("read")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "data.txt").write_text("read")
    (tmp_path / "near.txt").write_text("read")
    done, [made] = audit("--updates", "30", "--", "../train.py", cwd=inner)
    assert done.returncode == 0, done.stderr
    assert (made["state"], made["faults"]) == ("slow", ["reduced-each-micro-step"])
    assert made["rows"]["gradient"] == "right"
    assert len(made["updates"]) == 20  # the script ended before 30
    assert [p.name for p in inner.iterdir()] == ["data.txt"]


WRITER = """\
import os, shutil, sqlite3, torch
from safetensors.torch import save_file
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with open("log.txt", "a") as log:
    log.write("more")
assert open("log.txt").read() == "keptmore"
torch.save(model.state_dict(), "saved/model.pt")
save_file(model.state_dict(), "saved/deep/model.safetensors")
open("saved/deep/new.txt", "w").close()
os.replace("saved/old.txt", "saved/older.txt")
shutil.rmtree("removed")
os.truncate("emptied.txt", 0)
base = sqlite3.connect("base.db")
base.execute("create table numbers (x)")
base.close()
try:
    open("large.bin", "ab")
except PermissionError:
    os.remove("large.bin")
with open("linked/../beside.txt", "w") as file:
    file.write("other")
assert os.listdir("saved/deep/data") == ["data.txt"] and not os.path.exists("removed")
os.chdir("entered")
open("inner.txt", "w").close()
"""


def test_a_script_that_writes_leaves_what_was_there_as_it_was(tmp_path):
    (tmp_path / "train.py").write_text(WRITER)
    names = (
        "log.txt",
        "saved/model.pt",
        "saved/old.txt",
        "saved/deep/model.safetensors",
        "saved/deep/data/data.txt",
        "removed/data.txt",
        "emptied.txt",
        "linked/data.txt",
        "beside.txt",
        "entered/inner.txt",
        "base.db",
        "train.py",
    )
    (tmp_path / "base.db").touch()
    (tmp_path / "large.bin").touch()
    os.truncate(tmp_path / "large.bin", 2**30 + 1)  # too large for a copy
    for path in map(tmp_path.joinpath, names[:-2]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept")
    done, [made] = audit(ALONE, "--", "train.py", cwd=tmp_path)
    assert (done.returncode, made["state"], made["notes"]) == (0, "right", []), done.stdout
    assert (tmp_path / "large.bin").stat().st_size == 2**30 + 1
    (tmp_path / "large.bin").unlink()
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == set(names)
    assert {(tmp_path / name).read_text() for name in names[:-2]} == {"kept"}
    assert not (tmp_path / "base.db").read_bytes()


def test_a_script_of_one_process_is_judged_as_one(tmp_path):
    script(tmp_path, grouped=False)
    done, [made] = audit("--", "train.py", cwd=tmp_path)
    assert (done.returncode, made["state"], made["ranks"]) == (0, "right", 1), done.stdout
    stated, [other] = audit("cluster.ranks_per_node=2", "--", "train.py", cwd=tmp_path)
    assert (stated.returncode, other["faults"]) == (1, ["not-reduced"])


def test_steps_audits_with_several_numbers_of_micro_steps(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "k = int(sys.argv[1].split('=')[1])\n"
        "m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters(), 0.1)\n"
        "for i in range(24):\n"
        "    torch.nn.functional.cross_entropy(m(torch.randn(4, 2)), torch.ones(4).long()"
        ").backward()\n"
        "    if i % k == k - 1: o.step(); o.zero_grad()\n"
    )
    done, runs = audit("--steps", "--k={steps}", ALONE, "--", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert [(run["steps"], run["faults"]) for run in runs] == [(1, []), (3, ["undivided"])]


def test_a_script_that_names_cuda_runs_on_cpus(tmp_path):
    script(tmp_path, backend="nccl", cuda=".cuda()")
    done, [made] = audit("--fake-cuda", "--strict", "--", "train.py", cwd=tmp_path)
    assert (made["state"], made["faults"]) == ("slow", ["reduced-each-micro-step"]), made
    assert done.returncode == 1


TERMS = {
    "l.mean() + 0.1 * z.abs().mean()": "wrong",  # undivided
    "(l.mean() + 0.1 * z.abs().mean()) / 2": "right",
    "l.mean() / 2 + 0.1 * w.square().mean()": "not judged",
    "(l.mean() + 0.1 * w.square().sum()) / 2": "right",
    "l.sum() / 8 + 0.1 * w.square().sum()": "not judged",
    "(l.mean() + z.abs().sum()) / 2": "not judged",
    "(l.mean() + l.square().mean().sqrt()) / 2": "not judged",
}


@pytest.mark.parametrize("loss", TERMS)
def test_losses_of_several_terms_are_judged_if_all_are_divided_alike(loss, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "m = torch.nn.Linear(2, 2); w = m.weight; o = torch.optim.SGD(m.parameters(), 0.1)\n"
        "for i in range(16):\n"
        "    z = m(torch.randn(4, 2))\n"
        "    l = (z - torch.randn(4, 2)).square().mean(1)\n"
        f"    ({loss}).backward()\n"
        "    if i % 2: o.step(); o.zero_grad()\n"
    )
    _, [made] = audit(ALONE, "--", "train.py", cwd=tmp_path)
    assert made["state"] == TERMS[loss], made


UNREAD = "z.square().mean().sqrt() + torch.logsumexp(z.flatten(), 0)"
APART = "m(torch.randn(4, 2)).mean()"


@pytest.mark.parametrize(
    ("line", "loss", "state"),
    [
        ("", UNREAD, "right"),
        (APART, "z.square().mean()", "right"),  # at a line of its own, without a loss
        (APART, UNREAD, "not judged"),  # whether the loss depends on it is not seen
        ("loss(m(x)).backward(retain_graph=True)", UNREAD, "not judged"),
    ],
)
def test_any_loss_of_one_micro_step_on_one_rank_is_judged(line, loss, state, tmp_path):
    (tmp_path / "train.py").write_text(
        f"import torch\n"
        f"def loss(z): return {loss}\n"
        "m = torch.nn.Linear(2, 2); o = torch.optim.AdamW(m.parameters(), 0.1)\n"
        "for i in range(8):\n"
        "    x = torch.randn(4, 2)\n"
        f"    {line}\n"
        "    loss(m(x)).backward(); o.step(); o.zero_grad()\n"
    )
    _, [made] = audit(ALONE, "--", "train.py", cwd=tmp_path)
    assert made["state"] == state, made


ACCELERATOR = """\
import os, torch
import torch.distributed as dist
from torch import nn
rank = int(os.environ["LOCAL_RANK"])
if torch.accelerator.device_count() < 2:
    print("unable to locate sufficient gpus")
    raise SystemExit
device = torch.device(f"{torch.accelerator.current_accelerator()}:{rank}")
torch.accelerator.set_device_index(rank)
backend = dist.get_default_backend_for_device(device)
dist.init_process_group(backend, device_id=device)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2).to(rank), device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters(), 0.1)  # asks whether a stream is captured
torch.manual_seed(rank)
for _ in range(8):
    x, y = torch.randn(4, 3).to(device), torch.ones(4, dtype=torch.long, device=rank)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.accelerator.synchronize()
"""


def test_a_script_for_any_accelerator_runs_on_cpus_or_says_why_not(tmp_path):
    (tmp_path / "train.py").write_text(ACCELERATOR)
    _, [made] = audit("--fake-cuda", "cluster.ranks_per_node=2", "--", "train.py", cwd=tmp_path)
    assert made["state"] == "right", made
    done = verb("audit", "cluster.ranks_per_node=2", "--", "train.py", cwd=tmp_path)
    assert done.returncode == 4
    assert "unable to locate sufficient gpus" in done.stdout
    assert "--fake-cuda lets scripts for GPUs run" in " ".join(done.stdout.split())


SPAWNED = """\
import os, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
def train(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    nn.functional.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()
    optimizer.step()  # once, as tutorials do
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2, join=True)
"""


def test_ranks_that_a_script_would_spawn_are_those_of_the_audit(tmp_path):
    (tmp_path / "train.py").write_text(SPAWNED)
    done, [made] = audit("--", "train.py", cwd=tmp_path)
    assert (done.returncode, made["state"], made["ranks"]) == (0, "right", 2), made


@pytest.mark.parametrize("mode", ["skip", "noscale"])
def test_a_script_that_leaves_out_a_step_is_right_and_one_that_clips_the_scale_is_not(
    mode, tmp_path
):
    (tmp_path / "train.py").write_text(SCALER)
    line = ("cluster.ranks_per_node=2", "--", "train.py", mode)
    _, [made] = audit(*line, cwd=tmp_path)
    assert made["faults"] == ([] if mode == "skip" else ["clipped-while-scaled"]), made
    assert made["state"] == ("right" if mode == "skip" else "wrong")


SCALER = """\
import contextlib, os, sys, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = nn.parallel.DistributedDataParallel(nn.Linear(10, 3))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
x = torch.randn(32 * size, 10)
for i, rows in enumerate(torch.arange(len(x))[rank::size].split(2)):
    last = i % 2
    with contextlib.nullcontext() if last else model.no_sync():
        scaler.scale(model(x[rows]).square().mean() / 2).backward()
    if last:
        if sys.argv[1] != "noscale":
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        if sys.argv[1] != "skip" or i // 2 % 3 != 2:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


def test_a_job_class_is_right_and_its_clipping_is_seen():
    line = ("job=digits", "accumulation.steps=3", "train.clip_norm=0.05", "cluster.nodes=2", ALONE)
    done, [made] = audit(*line)
    assert (done.returncode, made["state"], made["ranks"]) == (0, "right", 2), made
    texts = {f["text"] for f in made["findings"] if f["row"] == "clipping"}
    assert texts == {"once an update, after the reduction"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ValueError('no such data')", "ValueError: no such data"),
        ("import torch\n(torch.ones(2, requires_grad=True).sum()).backward()", "and no update"),
        (
            "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=3)",
            "audit cluster.ranks_per_node=3 -- train.py",
        ),
        (
            "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=1, join=False)",
            "starts its ranks by itself: let audit start them",
        ),
        (
            "import multiprocessing as mp\nmp.get_context('fork').Process(target=print).start()",
            "it started processes of its own (1)",
        ),
    ],
)
def test_a_script_that_cannot_be_judged_gets_a_sentence(tmp_path, text, reason):
    (tmp_path / "train.py").write_text(text)
    done, [made] = audit(ALONE, "--", "train.py", cwd=tmp_path)
    assert done.returncode == 4, done.stdout + done.stderr
    assert reason in made["reason"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "program", "more", "message"),
    [
        ([], ["torchrun", "train.py"], {}, "give the script alone"),
        ([], ["none.py"], {}, "none.py is no file"),
        ([], [LOOP], {"steps": "--k=3"}, "it needs {steps}"),
        ([], [LOOP], {"steps": "'--k={steps}"}, "a quote in it is not closed"),
        ([], [LOOP], {"updates": 0}, "at least 1"),
        (["+cluster=slurm"], [LOOP], {}, "an audit runs on simulated nodes"),
        ([LIGHT], [], {}, "an audit observes PyTorch; numpy cannot be observed"),
    ],
)
def test_what_cannot_be_audited_is_refused(monkeypatch, overrides, program, more, message):
    monkeypatch.syspath_prepend(ROOT / "tests" / "third_party" / "framework")
    options = {"steps": None, "updates": None, "output": OutputOptions(console=Console()), **more}
    with pytest.raises(ConfigError, match=message):
        auditing.audit(overrides, program, fake_cuda=False, **options)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("train.py --lr 3", "python -m orchestrator audit -- train.py --lr 3"),
        ("--step 3", "audit has no option '--step'; did you mean '--steps'?"),
    ],
)
def test_options_of_a_script_need_its_dashes(line, answer, tmp_path):
    refused = verb("audit", *line.split(), code=2, cwd=tmp_path)
    assert answer in " ".join(refused.stderr.split())


def test_an_interrupt_leaves_nothing(tmp_path):
    script(tmp_path, body="import time; open('/dev/null'); time.sleep(1)")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    line = ("audit", ALONE, "--", "train.py")
    process = begin_anew(*line, module="orchestrator", cwd=tmp_path, TMPDIR=str(temporary))
    until(lambda: list(temporary.glob("audit-*/traces/rank-*")), what="the script")
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert not list(temporary.iterdir())


FUNCTIONAL = """\
import torch
from torch import nn
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss = lambda p, x: torch.func.functional_call(model, p, (x,)).square().mean()
for _ in range(3):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    gradients = torch.func.grad(loss)(weights, torch.randn(4, 3))
    for name, p in model.named_parameters():
        p.grad = gradients[name]
    optimizer.step()
print("trained")
"""
FROZEN = """\
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
frozen = nn.Linear(3, 3).requires_grad_(False)
data = torch.randn(64, 3)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in data.split(4):
    model(frozen(x)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("text", "ranks", "reason"),
    [
        (FUNCTIONAL, 1, "an update without a backward pass"),
        (FROZEN, 2, "is not trained, and differs between ranks"),
    ],
    ids=["torch.func", "frozen weights"],
)
def test_updates_that_cannot_be_tested_are_not_judged(text, ranks, reason, tmp_path):
    (tmp_path / "train.py").write_text(text)
    done, [made] = audit(f"cluster.ranks_per_node={ranks}", "--", "train.py", cwd=tmp_path)
    assert (done.returncode, made["state"]) == (4, "not judged"), done.stderr
    assert not made["notes"]  # the script was not disturbed
    assert any(reason in f["text"] for f in made["findings"] if f["row"] == "weights")


def test_json_has_the_documented_fields(tmp_path):
    fields = Fields("audit")
    where = ("cluster.nodes=1", "cluster.ranks_per_node=1", "tracker=none")
    fields.check(printed("audit", TINY, *where, "--updates", 3, cwd=tmp_path, codes=(0, 1, 4)))
    assert fields.unseen == set()
