"""Runs and sweeps as Python objects: `start`, `open_run`, `start_sweep`, and what they return.

Every run here is started as a user's script starts it: by a process of its own.
"""

import asyncio
import importlib
import json
import math
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import orchestrator
from orchestrator import Job
from orchestrator.errors import (
    EXIT_STOPPED,
    EXIT_TIMED_OUT,
    ClusterError,
    ConfigError,
    JobError,
    RunFailed,
    RunFolderError,
    UsageError,
)
from orchestrator.rundir.lock import is_locked
from tests import warm
from tests.helpers import LIGHT, SMALL, TINY, call, environment, run_python, verb
from tests.hold import Hold, request_stop
from tests.light_job import Light
from tests.run_folders import maker, record

pytestmark = pytest.mark.whole_runs

SHORT = ("train.updates=12", "accumulation.global_batch=24", "accumulation.steps=2", SMALL)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", warm.PATH)
    for name in [name for name in environment() if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def test_a_run_from_its_class_to_its_weights(capfd):
    evaluate = "train.evaluate_every=5"
    run = orchestrator.start(Light, job={"width": 8}, overrides=[*SHORT, evaluate])
    assert run.folder.is_relative_to(Path.cwd() / "runs")
    assert run.wait(120) == run.state == "finished"
    assert run.config["job"] == {"_target_": "tests.light_job.Light", "width": 8}
    assert [row["update"] for row in run.metrics] == list(range(12))
    losses = run.metrics["held_out.loss"]
    assert [number for number, loss in enumerate(losses) if loss is not None] == [4, 9, 11]
    best = run.best("-held_out.loss")
    assert best["held_out.loss"] == min(filter(None, losses))
    assert run.metrics[best["update"]] == best
    assert run.metrics[-2:] == [*run.metrics][-2:]
    assert run.result["updates"] == 12
    assert "update 12/12" in run.logs()
    assert run.logs(1, lines=1).count("\n") <= 1
    assert capfd.readouterr() == ("", "")  # nothing is printed unless asked for

    again = orchestrator.open_run(run.folder)
    assert again == run
    with pytest.warns(UserWarning, match="there is nothing to resume"):
        assert again.resume().wait() == "finished"
    with pytest.warns(UserWarning, match=r"the smallest: best\('-loss'\)"):
        assert run.best("loss")["loss"] == max(run.metrics["loss"])
    assert again.resume("train.updates=15").wait(120) == "finished"
    assert again.result["updates"] == 15
    assert orchestrator.list_runs() == [run]


def test_the_model_and_its_weights():
    run = orchestrator.start(TINY, "job.width=4", *SHORT)
    run.wait(120)
    state, model = run.state_dict(), run.load_model()
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in state.items()
    }
    assert all((model.state_dict()[name] == tensor).all() for name, tensor in state.items())
    file, updates = run.export()
    assert (file.suffix, updates) == (".safetensors", 12)
    for form, output, text in (
        ("safetensors", None, "exists already"),
        ("torhc", None, "did you mean 'torch'"),
        ("torch", "nowhere/model.pt", "there is no folder"),
    ):
        with pytest.raises(UsageError, match=text):
            run.export(form, output)
    assert [*file.parent.iterdir()] == [file]


def test_what_the_command_refuses_is_raised_and_leaves_nothing():
    for words, error, text in (
        ((LIGHT, "train.updates=0"), ConfigError, "train.updates"),
        (("job=nothing",), ConfigError, "there is no job called 'nothing'"),
        ((LIGHT, "job.smples=3"), JobError, "did you mean 'samples'?"),
        ((LIGHT, "cluster.nodes=0"), ConfigError, "cluster.nodes"),
        (("-m", LIGHT, "accumulation.steps=1,2"), ConfigError, "start_sweep()"),
        ((), ConfigError, "nothing says what to train: .* job=digits"),
        (("my_job.Line",), ConfigError, "job._target_=my_job.Line"),
    ):
        with pytest.raises(error, match=text.replace("(", r"\(").replace(")", r"\)")):
            orchestrator.start(*words)
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


def test_warnings_of_the_command_are_pythons_in_a_notebook_too(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a kernel does
    long = "schedule.warmup_updates=20"
    with pytest.warns(UserWarning, match="20 is more than the 12 updates") as caught:
        run = orchestrator.start(Light, overrides=[*SHORT, long])
    [warning] = caught
    assert warning.filename == __file__
    assert str(warning.message) in run.plan["warnings"]  # whole, without colours
    assert run.wait(120) == "finished"


class Here(Job):
    """A job that no module of a name that ranks know defines at its top level."""


def test_classes_that_ranks_cannot_import_are_refused():
    class Local(Job):
        pass

    with pytest.raises(ConfigError, match=r"start\(Light, job=\{…\}\)"):
        orchestrator.start(Light())
    with pytest.raises(ConfigError, match=r"overrides=\[…\]"):
        orchestrator.start(Light, [*SHORT])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"a list is needed: \['train.updates=3'\]"):
        orchestrator.start(Light, overrides="train.updates=3")
    with pytest.raises(ConfigError, match="at the top level of its module"):
        orchestrator.start(Local)
    with pytest.raises(ConfigError, match="made from"):
        orchestrator.start(Light, job={"width": object()})
    with pytest.raises(ConfigError, match="call is a function"):
        orchestrator.start(call)  # pyright: ignore[reportArgumentType]
    script = (
        "import orchestrator\nclass Line(orchestrator.Job): pass\n"
        "try: orchestrator.start(Line)\nexcept orchestrator.ConfigError as e: print(e)"
    )
    done = run_python(script)
    assert "write the class to a file" in done.stdout
    assert "from line_job import Line" in done.stdout


def test_a_run_goes_on_when_its_starter_ends_and_is_cancelled_and_resumed_by_others(tmp_path):
    hold = Hold(tmp_path / "hold").hold_before(5)
    words = [LIGHT, *SHORT, hold.override]
    script = f"import orchestrator\nprint(orchestrator.start(*{words!r}).folder)"
    run = orchestrator.open_run(run_python(script).stdout.strip())
    hold.wait_until_held(5, (0, 1))
    assert run.state == "running"
    with pytest.raises(UsageError, match=r"wait\(\) first"):
        _ = run.result
    with pytest.raises(TimeoutError):
        run.wait(0.1)
    assert verb("wait", run.folder, "--timeout", 0.1).returncode == EXIT_TIMED_OUT
    request_stop(run.folder, run.cancel)
    hold.release()
    done = verb("wait", run.folder, "--json", code=EXIT_STOPPED)
    assert [row["state"] for row in json.loads(done.stdout)] == ["stopped"]
    assert run.wait() == "stopped"
    assert run.result["updates"] < 12
    assert run.resume().wait(120) == "finished"
    with pytest.raises(ClusterError, match="nothing to cancel"):
        run.cancel()


def test_a_run_that_its_user_cancels_at_once_is_cancelled_and_resumed(tmp_path):
    hold = Hold(tmp_path / "hold").hold_before(5)
    run = orchestrator.start(LIGHT, *SHORT, hold.override)
    hold.wait_until_held(5, (0, 1))
    run.cancel(now=True)
    assert run.wait(60) == "cancelled"
    assert verb("wait", run.folder).returncode == EXIT_STOPPED
    with pytest.raises(RunFailed, match="the run was cancelled at once, by a second interrupt"):
        _ = run.result
    assert run.status.culprit is None
    hold.release()
    with pytest.warns(UserWarning, match="no checkpoint yet") as caught:
        run.resume()
    assert caught[0].filename == __file__
    assert run.wait(120) == "finished"


def test_a_resume_takes_arguments_of_the_job_that_leave_its_numbers_as_they_are():
    run = orchestrator.start(Light, job={"width": 8}, overrides=SHORT)
    run.wait(120)
    with pytest.raises(ConfigError, match=r"job\.width=9"):
        run.resume("train.updates=14", job={"width": 9})
    assert run.resume("train.updates=14", job={"width": 8}).wait(120) == "finished"


def test_python_before_a_program_is_this_python(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("import sys\nprint(sys.executable)\n")
    monkeypatch.setenv("PATH", "/nowhere")
    run = orchestrator.start(SMALL, "cluster.nodes=1", "--", "python", "train.py")
    assert run.wait(60) == "finished"
    assert run.plan["program"]["argv"] == ["train.py"]
    assert run.logs().splitlines()[-1] == sys.executable


JOB = """
import torch
from tests.tiny_job import Tiny
class Own(Tiny):
    def model(self):
        return torch.nn.Sequential(super().model(), torch.nn.{layer}())
"""


def test_edited_class_of_a_model_is_warned_of(tmp_path, monkeypatch):
    (tmp_path / "own_job.py").write_text(JOB.format(layer="Identity"))
    monkeypatch.syspath_prepend(tmp_path)
    import own_job  # pyright: ignore[reportMissingImports]

    run = orchestrator.start(own_job.Own, overrides=SHORT)
    run.wait(120)
    assert isinstance(run.load_model()[1], torch.nn.Identity)
    (tmp_path / "own_job.py").write_text(JOB.format(layer="Tanh"))
    with pytest.warns(UserWarning, match=r"own_job.py changed after .* importlib.reload"):
        assert isinstance(run.load_model()[1], torch.nn.Identity)
    older = own_job.Own
    importlib.reload(own_job)
    with pytest.raises(ConfigError, match="from own_job import Own once more"):
        orchestrator.start(older)
    assert isinstance(run.load_model()[1], torch.nn.Tanh)


def test_a_plan_and_a_comparison_are_data_and_start_nothing():
    plan = orchestrator.plan_run(TINY, *SHORT)
    assert (plan["updates"], plan["ranks"]) == (12, 2)
    with pytest.raises(ConfigError, match=r"plan_sweep\(\)"):
        orchestrator.plan_run("-m", TINY, *SHORT, "train.seed=1,2")
    plans = orchestrator.plan_sweep(TINY, *SHORT, "train.seed=1,2")
    assert [plan["point"]["action"] for plan in plans] == ["to run", "to run"]
    assert not Path("runs").exists()
    a, b = (orchestrator.start(TINY, *SHORT, f"train.seed={seed}") for seed in (1, 2))
    assert (a.wait(120), b.wait(120)) == ("finished", "finished")
    compared = orchestrator.compare(a, b.folder)
    assert compared.settings == {"train.seed": [1, 2]}
    assert not compared.weights.equal_bits
    assert compared.losses is not None
    assert compared.losses.updates == 12
    printed = json.loads(verb("compare", a.folder, b.folder, "--json", code=0).stdout)
    assert printed == json.loads(json.dumps(compared.to_json()))
    assert "Python" in [check.subject for check in orchestrator.check_machine()]


def test_a_failed_run_says_why_when_it_is_asked_for_its_result():
    fault = {"fault": "raise", "fault_rank": 1, "fault_after": 3}
    run = orchestrator.start(Light, job=fault, overrides=SHORT)
    assert run.wait(120) == "failed"
    with pytest.raises(RunFailed, match=r"rank 1(?s:.)*resume"):
        _ = run.result
    assert run.status.culprit


def test_a_figure_that_never_was_finite_has_no_best(tmp_path):
    lines = [record(update, loss=math.nan) for update in range(3)]
    run = orchestrator.open_run(maker(tmp_path)("diverged", records=lines).path)
    with pytest.raises(UsageError, match="no number as 'loss'; it never was finite"):
        run.best("-loss")


def test_what_only_a_rank_can_know_is_raised_by_wait():
    run = orchestrator.start(Light, job={"samples": 0}, overrides=SHORT)
    with pytest.raises(UsageError, match="sample"):
        run.wait(120)
    with pytest.raises(UsageError, match="sample"):
        _ = run.state


def test_folders_that_are_gone_or_other_things():
    run = orchestrator.start(Light, overrides=SHORT)
    run.wait(120)
    moved = run.folder.rename(run.folder.with_name("moved"))
    with pytest.raises(RunFolderError, match="there is no run folder"):
        _ = run.state
    assert orchestrator.open_run(moved).state == "finished"
    with pytest.raises(RunFolderError, match=r"open_run\(\)"):
        orchestrator.open_sweep(moved)
    with pytest.raises(RunFolderError):
        orchestrator.open_run("runs/other")
    with pytest.raises(RunFolderError, match=r"list_runs\(\)"):
        orchestrator.open_run("runs")
    for folder in ("runs", ".", "elsewhere"):
        with pytest.raises(RunFolderError, match=r"open_run\(\).*list_runs\(\)"):
            orchestrator.open_sweep(folder)
    with pytest.raises(RunFolderError):
        orchestrator.list_runs("elsewhere")


def test_a_folder_deleted_in_mid_run(tmp_path):
    hold = Hold(tmp_path / "hold").hold_before(5)
    run = orchestrator.start(LIGHT, *SHORT, hold.override)
    hold.wait_until_held(5, (0, 1))
    shutil.rmtree(run.folder)
    for _ in range(2):
        with pytest.raises(RunFolderError, match="removed or renamed while the run was using it"):
            run.wait(60)


def test_started_from_a_thread_and_under_an_event_loop():
    runs = []

    async def in_loop():
        runs.append(orchestrator.start(Light, overrides=SHORT))

    thread = threading.Thread(target=lambda: asyncio.run(in_loop()))
    thread.start()
    thread.join()
    assert runs[0].wait(120) == "finished"


def test_to_interrupt_wait_leaves_the_run_alone(tmp_path):
    hold = Hold(tmp_path / "hold").hold_before(5)
    run = orchestrator.start(LIGHT, *SHORT, hold.override)
    hold.wait_until_held(5, (0, 1))
    threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert is_locked(orchestrator.api.RunDir(run.folder))
    hold.release()
    assert run.follow() == "finished"


def test_a_rank_starts_nothing(tmp_path):
    (tmp_path / "starter.py").write_text(
        "import orchestrator\nfrom tests.light_job import Light\n"
        "class Again(Light):\n    pass\n"
        f"run = orchestrator.start(Again, overrides={list(SHORT)!r})\n"
    )
    done = call("job._target_=starter.Again", *SHORT, cwd=tmp_path)
    assert done.returncode == 2
    assert "would start a run of its own" in done.stdout + done.stderr


def test_modules_beside_the_script_are_found(tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "beside.py").write_text(
        "from tests.light_job import Light\nclass Beside(Light):\n    pass\n"
    )
    (scripts / "go.py").write_text(
        "import orchestrator\nfrom beside import Beside\n"
        f"run = orchestrator.start(Beside, overrides={list(SHORT)!r})\n"
        "print(run.wait(), run.resume('train.updates=13').wait(), len(run.metrics))"
    )
    done = subprocess.run(
        [sys.executable, "scripts/go.py"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["finished", "finished", "13"]
    [run] = orchestrator.list_runs()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    verb("resume", run.folder, "train.updates=14", cwd=elsewhere, code=0)  # another shell's path
    assert run.result["updates"] == 14


def test_a_sweep_and_its_table(capfd):
    sweep = orchestrator.start_sweep(LIGHT, *SHORT, "accumulation.steps=1,2", "train.seed=1,2")
    assert sweep.wait(180) == sweep.state == "finished"
    table = sweep.table
    assert [(row["accumulation.steps"], row["train.seed"]) for row in table] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
    best = sweep.best("-held_out.loss")
    assert best.result["metrics"]["loss"] == min(row["held_out.loss"] for row in table)
    assert best in sweep.runs
    assert sweep.follow() == "finished"
    printed = capfd.readouterr().out
    assert printed.startswith("0: finished, 12 updates, loss ")
    assert "4 of 4 points finished" in printed
    assert verb("attach", sweep.folder, code=0).stdout.startswith("0: finished, 12 updates")
    assert sweep.resume("train.updates=13").wait(180) == "finished"
    assert [run.result["updates"] for run in orchestrator.open_sweep(sweep.folder).runs] == [13] * 4
    with pytest.raises(RunFolderError, match="open_sweep"):
        orchestrator.open_run(sweep.folder)


def test_a_sweep_is_stopped_and_goes_on(tmp_path):
    hold = Hold(tmp_path / "hold").hold_before(5)
    sweep = orchestrator.start_sweep(
        LIGHT, *SHORT, hold.override, "train.seed=1,2", "sweep.parallel=1"
    )
    hold.wait_until_held(5, (0, 1))
    with pytest.raises(TimeoutError):
        sweep.wait(0.1)
    with pytest.raises(UsageError, match=r"'accuracy'.*the sweep is running: wait\(\) first"):
        sweep.best("accuracy")
    request_stop(sweep.runs[0].folder, sweep.cancel)
    hold.release()
    assert sweep.wait(60) == "stopped"
    assert sweep.resume().wait(120) in ("finished", "stopped")


def test_a_command_that_dies_at_its_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(orchestrator.OrchestratorError, match="exited with code 1"):
        orchestrator.start(LIGHT)


def test_an_interrupted_start_interrupts_the_command(tmp_path):
    """The command is caught where a person would wait for it: it asks a scheduler."""
    asked = tmp_path / "asked"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "sinfo"
    program.write_text(f"#!/bin/sh\ntouch {asked}\nexec sleep 60\n")
    program.chmod(0o700)
    for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "srun"):
        (program.parent / name).symlink_to(program)
    script = (
        "import os, signal, threading, time, orchestrator\n"
        "def interrupt():\n"
        f"    while not os.path.exists({str(asked)!r}): time.sleep(0.01)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        f"try: orchestrator.start({LIGHT!r}, '+cluster=slurm')\n"
        "except KeyboardInterrupt: print('interrupted')"
    )
    done = run_python(script, PATH=f"{program.parent}:/usr/bin:/bin")
    assert done.stdout == "interrupted\n"
    assert not Path("runs").exists() or not any(Path("runs").iterdir())
