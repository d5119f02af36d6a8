"""`run.max_restarts`: a failed run restarts by itself and ends with the undisturbed bits."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader
from typer.testing import CliRunner

from orchestrator.__main__ import app
from tests import helpers
from tests.helpers import SMALL, TINY
from tests.hold import begin_held
from tests.tiny_job import Tiny

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

FEW = (
    TINY,
    SMALL,
    "tracker=none",
    "accumulation.global_batch=40",
    "train.checkpoint_every=5",
    "run.survive=false",
)


def notes(run):
    return [r["restart"] for r in helpers.records(run) if "restart" in r]


def test_killed_ranks_cost_a_restart_each_and_no_bit(tmp_path):
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    more = (*FEW[1:], "job._target_=tests.tiny_job.OwnRate", "train.updates=40", "job.dropout=0.5")
    process, hold = begin_held(run, 7, *more, "run.max_restarts=2")
    for update, rank in ((7, 1), (14, 0)):
        hold.hold_before(update)
        hold.wait_until_held(update, (0, 1))
        os.kill(helpers.rank_pid(run, rank), signal.SIGKILL)
    hold.release()
    output = helpers.await_exit(process, 0)
    assert not helpers.processes_of(run)
    assert "attempt 1 begins from the newest checkpoint (restart 1 of 2" in output
    found = helpers.result(run)
    assert [note["attempt"] for note in found["restarts"]] == [1, 2]
    assert found["restarts"] == [{**note, "asked": False} for note in notes(run)]
    assert found["seconds"] > helpers.records(run)[-1]["update_s"] + sum(
        record["update_s"] for record in helpers.records(run) if record["attempt"] < 2
    )
    for record in helpers.records(run):
        assert record["learning_rate"] == 0.01 / (1 + record["update"])
    assert json.loads((run / "plan.json").read_text())["learning_rate_first"] is None
    for note, who in zip(notes(run), ("rank 1 on node1", "rank 0 on node0"), strict=True):
        assert f"{who} failed first: killed by signal 9 (SIGKILL)" in note["why"]
    # The rank that was left saved the last boundary.
    back = [(note["resumed_from"], note["lost_updates"]) for note in notes(run)]
    assert back == [(7, 0), (14, 0)]
    helpers.call(*more, f"run.dir={undisturbed}", code=0)
    assert found["weights_sha256"] == helpers.result(undisturbed)["weights_sha256"]


@pytest.mark.parametrize("survive", ["true", "false"])
def test_no_update_is_lost_when_a_rank_crashes(run, survive):
    more = (
        TINY,
        "tracker=none",
        "accumulation.global_batch=40",
        "train.updates=12",
        "cluster.ranks_per_node=2",
        "train.checkpoint_every=0",
        "run.max_restarts=3",
    )
    process, hold = begin_held(run, 3, *more, f"run.survive={survive}", ranks=range(4))
    for update, rank in ((3, 2), (5, 0), (7, 3)):
        hold.hold_before(update)
        hold.wait_until_held(update, range(4))
        os.kill(helpers.rank_pid(run, rank), signal.SIGSEGV)
    hold.release()
    helpers.await_exit(process, 0)
    back = [(note["resumed_from"], note["lost_updates"]) for note in notes(run)]
    assert back == [(3, 0), (5, 0), (7, 0)]
    assert [record["update"] for record in helpers.records(run)] == list(range(12))
    for note, rank in zip(notes(run), (2, 0, 3), strict=True):
        assert f"rank {rank} on node{rank // 2} failed first: killed by signal 11" in note["why"]


@pytest.mark.parametrize(("ranks", "survive"), [(1, "false"), (2, "false"), (2, "true")])
def test_an_error_on_all_ranks_loses_no_update(run, tmp_path, ranks, survive):
    more = (
        TINY,
        SMALL,
        "tracker=none",
        "accumulation.global_batch=40",
        "train.updates=6",
        "train.checkpoint_every=0",
        "job.dropout=0.5",
        f"cluster.nodes={ranks}",
        f"run.survive={survive}",
    )
    fault = ("job.fault=raise", "job.fault_rank=null", "job.fault_after=11", "run.max_restarts=6")
    helpers.call(*more, *fault, f"run.dir={run}", code=0)
    assert notes(run)
    assert all(note["lost_updates"] == 0 for note in notes(run))
    assert all("the tiny job was told to fail [here]" in note["why"] for note in notes(run))
    assert [record["update"] for record in helpers.records(run)] == list(range(6))
    helpers.call(*more, f"run.dir={tmp_path / 'undisturbed'}", code=0)
    expected = helpers.result(tmp_path / "undisturbed")["weights_sha256"]
    assert helpers.result(run)["weights_sha256"] == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_model_in_shards_trains_as_a_whole_one_and_goes_on_with_other_ranks(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    more = (
        TINY,
        "tracker=none",
        "accumulation.global_batch=22",
        "accumulation.micro_batch=4",
        "train.precision=float64",
        "train.clip_norm=0.5",
        "train.checkpoint_every=2",
    )
    alone = ("cluster.nodes=1", "cluster.ranks_per_node=1", "train.updates=6", f"run.dir={whole}")
    fault = ("job.fault=kill", "job.fault_rank=3", "job.fault_after=4", "run.max_restarts=1")
    shards = ("engine.shard_model=node", "train.updates=4", "run.survive=false", f"run.dir={run}")
    for words in ((*more, *alone), (*more, *shards, *fault)):
        helpers.call(*words, code=0)
    assert [note["resumed_from"] for note in helpers.result(run)["restarts"]] == [2]
    assert helpers.result(run)["memory"]["optimizer"] < helpers.result(whole)["memory"]["optimizer"]
    others = (
        "engine.shard_model=all",
        "cluster.nodes=1",
        "cluster.ranks_per_node=3",
        "train.checkpoint_in_background=true",
    )
    helpers.verb("resume", run, "train.updates=6", *others, code=0)
    assert helpers.compare(run, whole)["max_relative_difference"] <= 1e-10
    assert helpers.result(run)["metrics"]["loss"] == pytest.approx(
        helpers.result(whole)["metrics"]["loss"], rel=1e-10
    )
    _check_exports(run)


def _check_exports(run):
    for form in ("safetensors", "torch", "dcp"):
        done = CliRunner().invoke(app, ["export", str(run), f"--{form}"])
        assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, ["export", str(run)]).exit_code == 2, "it is there already"
    plain = run.parent / "name"  # without a suffix
    assert CliRunner().invoke(app, ["export", str(run), "--torch", "-o", plain]).exit_code == 0
    assert CliRunner().invoke(app, ["export", str(run), "--dcp", "--torch"]).exit_code == 2
    names = sorted(path.name for path in (run / "export").iterdir())
    assert names == [f"update-000000006.{suffix}" for suffix in ("dcp", "pt", "safetensors")]
    dcp, torch_file, safetensors = (run / "export" / name for name in names)
    weights = load_file(safetensors)
    found = torch.load(torch_file, weights_only=True)
    model = Tiny().model().double()
    model.load_state_dict(found["model"])
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(found["optimizer"])
    assert all(state["step"] == 6 for state in optimizer.state.values())
    read = {"model": {name: torch.empty_like(weight) for name, weight in weights.items()}}
    state_dict_loader.load(read, checkpoint_id=dcp, no_dist=True)
    for name, weight in model.state_dict().items():
        assert weight.equal(weights[name])
        assert weight.equal(read["model"][name])


def test_an_interrupted_run_does_not_start_again(tmp_path, run):
    process, hold = begin_held(run, 3, *FEW, "train.updates=40", "run.max_restarts=5")
    process.send_signal(signal.SIGINT)
    os.kill(helpers.rank_pid(run, 1), signal.SIGKILL)
    hold.release()
    helpers.await_exit(process, 1)
    assert len(list((run / "attempts").glob("0*"))) == 1


def test_a_run_without_further_updates_is_evaluated_and_keeps_its_loss(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    process, hold = begin_held(run, 5, *FEW, "train.updates=40")
    hold.wait_until_held(5, (0, 1))
    os.kill(helpers.rank_pid(run, 1), signal.SIGKILL)
    hold.release()
    helpers.await_exit(process, 1)
    helpers.call(*FEW, f"run.dir={whole}", "train.updates=5", code=0)
    wanted = helpers.result(whole)
    for asked in ("train.updates=5", "train.keep_checkpoints=3"):
        helpers.verb("resume", run, asked, code=0)
        found = helpers.result(run)
        assert [found[key] for key in ("loss", "metrics")] == [wanted["loss"], wanted["metrics"]]
        (run / "result.json").unlink()  # as if all had been killed just before
    assert (run / "metrics.jsonl").read_text().count('"evaluation"') == 1


def test_code_that_was_edited_before_a_restart_is_named(tmp_path):
    (tmp_path / "part.py").write_text("x = 1\n")
    (tmp_path / "train.py").write_text(
        "import os, pathlib, part\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    if os.environ['RANK'] == '0':\n"
        "        pathlib.Path('part.py').write_text('x = 2\\n')\n"
        "    raise SystemExit(1)\n"
    )
    flags = ("cluster.nodes=1", "cluster.ranks_per_node=1", "run.max_restarts=1", "run.dir=run")
    done = helpers.verb("run", *flags, "--", "train.py", cwd=tmp_path, code=0)
    assert "part.py has changed since the run began; attempt 1 has it as it is" in " ".join(
        done.stdout.split()
    )
