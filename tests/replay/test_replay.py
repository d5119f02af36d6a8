"""Any recorded update is computed again in one process, and nothing of the run is touched."""

import json
import os
import shutil
import signal
import subprocess

import pytest

from orchestrator.plan.order import DataOrder
from tests.docs.json_fields import Fields
from tests.helpers import (
    LIMIT_S,
    TINY,
    await_exit,
    begin,
    call,
    command,
    environment,
    processes_of,
    rank_pid,
    records,
    run_python,
    until,
    verb,
)
from tests.hold import begin_held, request_stop

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

COMMON = (
    "train.evaluate_every=4",
    "train.checkpoint_every=3",
    "train.keep_checkpoints=20",
    "tracker=none",
    "accumulation.global_batch=24",
    "accumulation.steps=null",
)
EXACT = (*COMMON, "accumulation.micro_batch=4", "accumulation.reduction=reproducible")
UPDATES = 12


def replay(run, *words, code=0, **more):
    report = json.loads(verb("replay", run, *words, "--json", code=code, **more).stdout)
    if isinstance(report, dict):
        Fields("replay").check(report)
    return report


def contents(folder):
    """Return the content of each file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A run of three ranks, of which one is killed; the rest is stopped and goes on with one."""
    run = tmp_path_factory.mktemp("changed") / "run"
    shape = ("cluster.nodes=3", "cluster.ranks_per_node=1", "run.max_replacements=0")
    words = (TINY, *EXACT, *shape, "job.dropout=0.2", f"train.updates={UPDATES}")
    process, hold = begin_held(run, 4, *words, ranks=range(3))
    hold.hold_before(7)
    os.kill(rank_pid(run, 2), signal.SIGKILL)
    hold.wait_until_held(7, range(2))
    request_stop(run, lambda: process.send_signal(signal.SIGINT))
    hold.release()
    await_exit(process, 3)
    verb("resume", run, "cluster.nodes=1", code=0)
    assert len(records(run)) >= UPDATES
    return run


def test_updates_of_a_run_that_changed_its_ranks_have_the_same_bits_in_one_process(changed):
    before = contents(changed)
    done = len(records(changed))
    for update in (1, 10):
        found = replay(changed, "--update", update)
        assert found["agreement"]["agrees"]
        assert found["agreement"]["weights_difference"] == 0.0
        first = found["first"]
        assert first <= update <= found["last"]
        assert found["agreement"]["weights"] == found["last"] + 1
        assert found["agreement"]["updates"] == found["last"] + 1 - first
        order = DataOrder(dataset_samples=240, global_batch=24).indices(update).tolist()
        leaves = sorted(found["leaves"], key=lambda leaf: leaf["leaf"])
        assert [number for leaf in leaves for number in leaf["samples"]] == order
        mean = sum(leaf["total"] for leaf in leaves) / sum(leaf["weight"] for leaf in leaves)
        [line] = [line for line in records(changed) if line["update"] == update][-1:]
        assert mean == pytest.approx(line["loss"], rel=1e-12)
        norm = sum(value**2 for value in found["norms"].values()) ** 0.5
        assert norm == pytest.approx(line["gradient_norm"], rel=1e-6)
        losses = [leaf["total"] / leaf["weight"] for leaf in found["leaves"]]
        assert losses == sorted(losses, reverse=True)
    assert contents(changed) == before
    assert len(records(changed)) == done
    assert [path.name for path in changed.parent.iterdir() if "replay" in path.name] == []
    assert not processes_of(changed)


def test_without_a_valid_checkpoint_it_begins_with_the_initial_weights(changed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(changed, run)
    damaged = [path for path in (run / "checkpoints").iterdir() if path.name < "update-000000008"]
    for folder in damaged:
        (folder / "weights.safetensors").write_bytes(b"torn")
    found = replay(run, "--update", 7)
    assert (found["first"], found["checkpoint"]) == (0, None)
    assert found["agreement"]["agrees"]
    assert found["agreement"]["updates"] == found["last"] + 1 > 7
    assert sum("damaged" in note for note in found["notes"]) == len(damaged) > 1


def test_a_record_that_was_edited_is_told_from_another_computation(changed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(changed, run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    place = max(
        n
        for n, line in enumerate(lines)
        if json.loads(line).get("update") == 5 and "loss" in json.loads(line)
    )
    line = json.loads(lines[place])
    lines[place] = json.dumps(line | {"loss": line["loss"] * (1 + 1e-15)})
    (run / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    found = replay(run, "--update", 5, code=1)
    assert found["agreement"]["differing"] == 5
    assert found["agreement"]["weights_difference"] == 0.0
    assert "the same bits both times" in found["why"][0]
    assert "update 5 in metrics.jsonl is not what the run computed" in found["why"][1]
    text = verb("replay", run, "--update", 5, "--short", code=1).stdout
    assert "update 5 is the first to differ" in text
    assert "rounding units of float32" in text


def test_random_numbers_that_the_engine_does_not_know_are_found(tmp_path):
    run = tmp_path / "run"
    job = "job._target_=tests.tiny_job.Unrepeatable"
    call(job, *EXACT, "cluster.nodes=1", "train.updates=3", f"run.dir={run}", code=0)
    found = replay(run, "--update", 1, code=1)
    assert found["agreement"]["differing"] == 0
    [why] = found["why"]
    assert why.startswith("two replays here differ, first in micro-step 0 of update 0")
    assert "draws random numbers from another generator" in why


def test_other_processor_is_reported_first(tmp_path):
    run = tmp_path / "run"
    older = {"PYTHONPATH": "", "ATEN_CPU_CAPABILITY": "default"}  # a new interpreter reads it
    call(TINY, *EXACT, "cluster.nodes=1", "train.updates=2", f"run.dir={run}", code=0, **older)
    report = replay(run, "--update", 1, code=1)
    [note] = [text for text in report["notes"] if "cpu_capability" in text]
    assert note.startswith("computed with another cpu_capability: ")
    assert note.endswith(" against DEFAULT")
    assert report["why"][-1].startswith("what differs from the run (the notes) may be the reason")


def test_a_fast_run_agrees_up_to_rounding_and_on_its_own_ranks_to_the_bit(tmp_path):
    run = tmp_path / "run"
    shape = ("cluster.nodes=1", "cluster.ranks_per_node=2", "accumulation.micro_batch=6")
    words = (TINY, *COMMON, *shape, "job.dropout=0.2", "train.updates=6")
    call(*words, f"run.dir={run}", code=0)
    found = replay(run, "--update", 4)
    agreed = found["agreement"]
    assert agreed["agrees"]
    assert not agreed["exact"]
    units = {figure["name"]: figure["units"] for figure in agreed["figures"]}
    assert 0 < units["gradient_norm"] < 1000
    assert agreed["weights_difference"] < 1e-5
    assert len(found["leaves"]) == 4
    same = replay(run, "--update", 4, "cluster.ranks_per_node=2")["agreement"]
    assert [figure["units"] for figure in same["figures"]] == [0.0] * len(same["figures"])
    assert same["weights_difference"] == 0.0


def test_a_fast_run_whose_ranks_had_other_micro_batches_is_not_called_equal(tmp_path):
    run = tmp_path / "run"
    shape = ("cluster.nodes=1", "cluster.ranks_per_node=2", "accumulation.steps=2")
    words = (TINY, *COMMON, *shape, "accumulation.global_batch=64", "job.dropout=0.2")
    call(*words, "train.updates=8", f"run.dir={run}", code=0)
    found = replay(run, "--update", 3, code=1)  # of 48 samples: 12 each, and here 16
    assert not found["agreement"]["agrees"]
    assert "cluster.nodes=1 cluster.ranks_per_node=2" in found["why"][0]
    assert "NOT equal" in verb("replay", run, "--update", 3, code=1).stdout
    assert replay(run, "--update", 3, "cluster.ranks_per_node=2")["agreement"]["agrees"]


def test_three_poisoned_samples_of_ten_thousand_are_listed_first(tmp_path):
    run, update = tmp_path / "run", 25
    order = DataOrder(dataset_samples=10_000, global_batch=60).indices(update).tolist()
    poisoned = [order[5], order[31], order[59]]
    words = (
        "job._target_=tests.replay.jobs.Poisoned",
        "+job.samples=10000",
        *COMMON[:-2],
        f"job.poisoned={poisoned}",
        "accumulation.reduction=reproducible",
        "accumulation.global_batch=60",
        "accumulation.steps=null",
        "accumulation.micro_batch=10",
        "train.updates=31",
        "cluster.nodes=1",
        f"run.dir={run}",
    )
    call(*(word.replace("job.poisoned", "+job.poisoned") for word in words), code=0)
    found = replay(run, "--around-spike", "--short")
    fields = Fields("replay")
    fields.check(found)
    assert fields.unseen == set()
    assert found["update"] == update
    first = [leaf["samples"] for leaf in found["samples"][:3]]
    assert sorted(first) == sorted([sample] for sample in poisoned)
    assert found["samples"][3]["total"] < found["samples"][2]["total"] / 10
    text = verb("replay", run, "--around-spike", "--short", "--rows", 3, code=0).stdout
    shown = [line.split()[-1] for line in text.splitlines() if "%" in line]
    assert sorted(shown) == sorted(map(str, poisoned))


def test_the_update_in_which_a_run_failed_names_the_sample(tmp_path):
    run = tmp_path / "run"
    sample = int(DataOrder(dataset_samples=240, global_batch=24).indices(4)[7])
    words = (
        "job._target_=tests.replay.jobs.Poisoned",
        f"+job.poisoned=[{sample}]",
        "+job.value=nan",
        *EXACT,
        "train.updates=8",
        "cluster.nodes=1",
    )
    call(*words, f"run.dir={run}", code=1)
    assert [line["update"] for line in records(run)] == [0, 1, 2, 3]
    found = replay(run, "--around-spike")
    assert (found["update"], found["agreement"]) == (4, None)
    assert found["samples"][0]["samples"] == [sample]
    assert sample in found["leaves"][0]["samples"]


def test_samples_and_uses_are_those_that_a_loader_read(tmp_path):
    run = tmp_path / "run"
    job = ("job._target_=tests.replay.jobs.Traced", "cluster.nodes=1", "cluster.ranks_per_node=2")
    call(*job, *EXACT, "train.updates=4", f"run.dir={run}", code=0)
    verb("resume", run, "cluster.ranks_per_node=3", "train.updates=8", code=0)
    verb("resume", run, "cluster.ranks_per_node=1", "train.updates=14", code=0)
    read = {}
    for path in run.glob("read-*.jsonl"):
        for line in path.read_text().splitlines():
            update, numbers = json.loads(line)
            read.setdefault(update, set()).update(numbers)
    for update in (0, 3, 5, 9, 13):
        pieces = json.loads(verb("replay", run, "--update", update, "--samples", "--json").stdout)
        assert {number for piece in pieces for number in piece["samples"]} == read[update]
    used = json.loads(verb("replay", run, "--sample", 17, "--json", code=0).stdout)
    assert [use["update"] for use in used] == sorted(u for u, found in read.items() if 17 in found)
    assert "sample 17 was used 1 time in 14 updates" in verb("replay", run, "--sample", 17).stdout


def debugged(*words, typed):
    """Replay in the debugger with this input; return the output."""
    return subprocess.run(
        command("replay", *words, "--debug", module="orchestrator"),
        input=typed,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    ).stdout


def test_pdb_stops_in_the_jobs_own_loss_with_the_batch(changed, tmp_path):
    typed = "p 'shape', tuple(batch[0].shape)\nq\n"
    shown = debugged(changed, "--update", 5, "--leaf", 2, typed=typed)
    assert "tiny_job.py" in shown
    assert "loss()" in shown
    assert "('shape', (4, 8))" in shown


MINE = """
from orchestrator import Loss
from tests.tiny_job import Tiny
SCALE = 1.0
class Mine(Tiny):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return Loss(loss.total * SCALE, weight=loss.weight, metrics=loss.metrics)
"""


def test_changed_code_is_named_and_a_runs_own_copy_is_replayed(tmp_path):
    run, file = tmp_path / "run", tmp_path / "mine.py"
    file.write_text(MINE)
    shape = ("cluster.nodes=1", "cluster.ranks_per_node=2", "accumulation.balance=measured")
    words = ("job._target_=mine.Mine", *EXACT, *shape, "train.updates=6", f"run.dir={run}")
    call(*words, "accumulation.batch_schedule=[[3,12]]", cwd=tmp_path, code=0)
    copy = "from pathlib import Path; from orchestrator.snapshot import copy_code;"
    copy += "copy_code('mine.Mine', Path('run').absolute(), Path('run/code/000').absolute())"
    run_python(copy, cwd=tmp_path)
    file.write_text(MINE.replace("1.0", "1.5"))
    (run / "code").rename(tmp_path / "code")
    found = replay(run, "--update", 4, "--short", cwd=tmp_path, code=1)
    assert "mine.py has changed since the run began" in found["notes"]
    assert found["agreement"]["differing"] == 3
    assert "what differs from the run (the notes) may be the reason" in found["why"][1]
    (tmp_path / "code").rename(run / "code")
    found = replay(run, "--update", 4, cwd=tmp_path)
    assert found["agreement"]["agrees"]
    assert f"the code is the run's own copy: {run / 'code' / '000'}" in found["notes"]


def test_a_model_in_shards_is_replayed_whole_up_to_rounding(tmp_path):
    run = tmp_path / "run"
    shape = ("cluster.nodes=1", "cluster.ranks_per_node=2", "accumulation.micro_batch=6")
    words = (TINY, *COMMON, *shape, "engine.shard_model=all", "train.updates=6")
    call(*words, f"run.dir={run}", code=0)
    agreed = replay(run, "--update", 4)["agreement"]
    assert agreed["agrees"]
    assert agreed["weights_difference"] < 1e-5


PROGRAM = """
import torch
import torch.distributed as dist
from orchestrator import Accumulator, Loss, current_run as run
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.2), torch.nn.Linear(3, 1))
ours = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), reduction="reproducible")
for window in run.windows(len(x), ours, global_batch=8, micro_batch=2, updates=9,
                          checkpoint_every=3, keep_checkpoints=10):
    for piece in window:
        total = ((model(x[piece]) - 1) ** 2).sum()
        ours.backward(Loss(total, weight=len(piece)))
    ours.boundary()
"""


def test_a_loop_over_windows_is_replayed_on_fewer_ranks(tmp_path):
    run = tmp_path / "run"
    (tmp_path / "train.py").write_text(PROGRAM)
    words = ("cluster.nodes=1", "cluster.ranks_per_node=3", f"run.dir={run}", "--", "train.py")
    call(*words, cwd=tmp_path, code=0)
    found = replay(run, "--update", 4)
    assert found["agreement"]["agrees"]
    assert found["agreement"]["exact"]
    assert (found["first"], found["last"], found["agreement"]["weights"]) == (3, 5, 6)
    order = DataOrder(dataset_samples=40, global_batch=8).indices(4).tolist()
    leaves = sorted(found["leaves"], key=lambda leaf: leaf["leaf"])
    assert [number for leaf in leaves for number in leaf["samples"]] == order
    pieces = json.loads(verb("replay", run, "--update", 4, "--samples", "--json").stdout)
    assert [piece["samples"] for piece in pieces] == [leaf["samples"] for leaf in leaves]
    shown = debugged(run, "--update", 4, typed="p 'piece', piece\nq\n")
    assert f"('piece', {found['leaves'][0]['samples']})" in shown
    refused = verb("replay", run, "--update", 4, "--by-sample", code=2).stderr
    assert "a loop of its own, which decides the size of its micro-batches" in refused


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--update", 99], "the nearest is --update 11"),
        ([], "replay needs one of --update N, --around-spike and --sample I"),
        (["--update", 1, "--around-spike"], "replay needs one of"),
        (["--sample", 240], "the data set has samples 0 to 239; the nearest is --sample 239"),
        (["--sample", 1, "--update", 2], "takes no update"),
        (["--update", 1, "--debug", "cluster.nodes=2"], "--debug stops a process of this machine"),
        (["--update", 1, "schedule.base_lr=0.5"], "the learning rate of update 1 would be 0.5"),
    ],
)
def test_what_cannot_be_replayed_is_refused(changed, words, sentence):
    assert sentence in " ".join(verb("replay", changed, *words, code=2).stderr.split())


def test_a_run_of_another_framework_or_without_windows_is_refused(tmp_path):
    light = tmp_path / "light"
    shape = ("cluster.nodes=1", "cluster.ranks_per_node=1")
    job = "job._target_=tests.light_job.Light"
    call(job, *COMMON, *shape, "train.updates=2", f"run.dir={light}", code=0)
    assert (
        "was trained with numpy; a replay needs torch"
        in verb("replay", light, "--update", 1, code=2).stderr
    )
    own = tmp_path / "own"
    (tmp_path / "plain.py").write_text(
        "from orchestrator import current_run as run\nrun.report(0, loss=1.0)\n"
    )
    call(*shape, f"run.dir={own}", "--", "plain.py", cwd=tmp_path, code=0)
    refused = " ".join(verb("replay", own, "--update", 0, code=2).stderr.split())
    assert "is of a program with a loop of its own" in refused


def test_an_interrupt_leaves_no_process_and_no_folder(changed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(changed, run)
    for folder in (run / "checkpoints").iterdir():
        shutil.rmtree(folder)
    process = begin("replay", run, "--update", 11, module="orchestrator")
    until(lambda: list(tmp_path.glob(".run.replay-*/*/attempts/000")))
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert process.returncode == 130
    assert not list(tmp_path.glob(".run.replay-*"))
    assert not processes_of(tmp_path)
