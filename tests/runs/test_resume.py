"""Changes that a resume accepts, and the folder that it runs in."""

import contextlib
import errno
import functools
import json
import os
import re
import shlex
import sys
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import yaml

from orchestrator.config.changes import Change, Kind, changes, flat
from orchestrator.config.command_line import CommandLine
from orchestrator.config.composer import Composer, compose
from orchestrator.config.reading import read_config, to_yaml
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, RunFolderError
from orchestrator.plan.parts import JobFacts
from orchestrator.plan.plan import Plan
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import is_locked, locked
from orchestrator.runs import start
from orchestrator.runs.follow import OutputOptions
from orchestrator.runs.inputs import INPUTS
from orchestrator.runs.recorded import submission_directory
from orchestrator.runs.resume import (
    advise_new_run,
    prepared_resume,
    record,
    refuse_other_numbers,
    resumption,
)
from orchestrator.runs.start import wrap_disk_errors
from tests.clusters.slurm.queue_lines import queue_line
from tests.programs import script
from tests.run_folders import Screen


def resumption_of(run, overrides):
    return resumption(run, read_config(run.read_config()), overrides)


@functools.cache
def composed(*overrides):
    return compose(["job._target_=a.B", "accumulation.global_batch=48", *overrides])


@pytest.fixture
def make_run(tmp_path):
    """Makes the folder of a run that was stopped after `done` updates of 240 samples' data."""

    def make(*overrides, done=4):
        run = RunDir(tmp_path / "run")
        run.create()
        config = composed(*overrides)
        run.write_config(to_yaml(config))
        write_json(run.submission, {"cluster": "local", "time": 1.0})
        write_json(
            run.plan, Plan.of(config, JobFacts(dataset_samples=240, parameters=10)).to_json()
        )
        run.begin_attempt()
        saved = run.checkpoints / f"update-{done:09d}"
        saved.mkdir()
        (saved / "state.json").write_text("{}")
        return run

    return make


def test_every_key_has_a_kind():
    for key in flat(asdict(Config(job={"x": 1}, optimizer={"name": "sgd"}))):
        [change] = changes({key: 1}, {key: 2})
        assert isinstance(change.kind, Kind), key


@pytest.mark.parametrize(
    ("begun", "asked"),
    [
        (["train.updates=8"], ["train.updates=20"]),
        (["train.epochs=1"], ["train.epochs=3"]),
        (["train.updates=8"], ["train.epochs=3"]),
        (["train.updates=8"], ["train.updates=4"]),
        (["train.updates=8"], ["train.samples=2000"]),
        (["train.samples=400"], ["train.updates=20"]),
        (["train.samples=400"], ["train.epochs=3"]),
        (["train.updates=8"], ["train.updates=20", "accumulation.batch_schedule=[[8,60]]"]),
        ([], ["train.checkpoint_every=2", "train.evaluate_every=0", "run.max_restarts=3"]),
        ([], ["tracker=none"]),
        ([], ["cluster=slurm", "cluster.time_min=5", "cluster.partition=a,b"]),
        ([], ["cluster=slurm_ascend", "transport=auto"]),
        (["cluster.nodes=3", "schedule.scaling=linear"], ["cluster.nodes=1"]),
        (["+job.data_dir=/a/mnist"], ["job.data_dir=/b/mnist"]),
        (
            ["accumulation.reduction=reproducible", "accumulation.micro_batch=8"],
            ["cluster.nodes=1", "cluster.ranks_per_node=3"],
        ),
        (["schedule.decay=cosine", "train.updates=8"], ["train.updates=8", "cluster.nodes=1"]),
    ],
)
def test_what_leaves_the_numbers_alone_is_taken(make_run, begun, asked):
    run = make_run(*begun)
    found = resumption_of(run, asked)
    assert found.changes or asked == ["train.updates=8"]
    assert found.plan.batch.global_batch == 48
    assert "going on after update 4" in found.message


@pytest.mark.parametrize(
    ("begun", "asked", "said"),
    [
        ([], "train.seed=1", "train.seed=1: it was 0"),
        ([], "optimizer.betas=[0.8,0.9]", "optimizer.betas"),
        (
            ["optimizer=null"],
            "+optimizer.name=adam",
            "a run cannot go on with optimizer.name=adam: this run has the optimizer that its job",
        ),
        ([], "optimizer=sgd", "resume cannot take optimizer=sgd"),
        ([], "job=digits", "resume cannot take job=digits"),
        ([], "experiment=jepa_240", "resume cannot take experiment"),
        ([], "job._target_=a.C", "it was a.B"),
        (["+job.width=3"], "job.width=4", "job.width=4: it was 3"),
        ([], "job.width=4", "job.width=4: it was not set"),
        (["+job.width=null"], "job.width=4", "job.width=4: it was null"),
        ([], "train.precision=float64", "train.precision=float64"),
        ([], "train.clip_norm=1", "train.clip_norm"),
        ([], "schedule.base_lr=0.1", "learning rate of update 1 would be 0.1"),
        ([], "schedule.warmup_updates=3", "learning rate of update 1"),
        (["schedule.decay=cosine", "train.updates=8"], "train.updates=9", "schedule.decay"),
        ([], "accumulation.global_batch=64", "of 64 samples, but was of 48"),
        (
            ["train.updates=9"],
            "accumulation.batch_schedule=[[8,60]]",
            "can change after update 9 only",
        ),
        (
            ["accumulation.batch_schedule=[[2,60]]"],
            "accumulation.batch_schedule=[]",
            "after update 2 an update would be of 48 samples, but was to be of 60",
        ),
        (
            [
                "accumulation.global_batch=null",
                "accumulation.steps=2",
                "accumulation.micro_batch=6",
            ],
            "cluster.nodes=1",
            "add accumulation.global_batch=48",
        ),
        (
            ["accumulation.reduction=reproducible", "accumulation.micro_batch=8"],
            "accumulation.micro_batch=4",
            "the size of a leaf, which was 8",
        ),
        (
            ["accumulation.ragged=carry", "train.epochs=2", "accumulation.global_batch=100"],
            "train.epochs=0.5",
            "4 updates are done already",
        ),
        ([], "train.updates=2", "4 updates are done already"),
        ([], "train.updats=20", "did you mean 'updates'"),
        ([], "train.updates", "train.updates"),
        ([], "~train.seed", "KEY=VALUE"),
        ([], "src/win.py", "'src/win.py' is not KEY=VALUE: resume starts the same program"),
        ([], "train.updates=20,30", "KEY=VALUE"),
        ([], "run.dir=/tmp/other", "the run is its folder"),
    ],
)
def test_changes_of_the_numbers_are_refused(make_run, begun, asked, said):
    run = make_run(*begun)
    before = run.config.read_text()
    with pytest.raises(ConfigError, match=re.escape(said)):
        resumption_of(run, [asked])
    assert run.config.read_text() == before
    assert not run.resumes.exists()


def test_before_the_first_checkpoint_the_advice_is_to_launch_again(make_run):
    run = make_run("+job.samples=4", done=0)
    with pytest.raises(ConfigError) as refused:
        resumption_of(run, ["job.samples=400", "train.seed=1"])
    assert str(refused.value) == (
        "a run cannot go on with job.samples=400: it was 4\n"
        "a run cannot go on with train.seed=1: it was 0\n"
        "no checkpoint was written yet, so a new run loses nothing: launch again with "
        "job.samples=400 train.seed=1"
    )
    with pytest.raises(
        ConfigError, match=r"was of 48 so far.*\n.*launch again with these settings"
    ):
        resumption_of(run, ["accumulation.global_batch=64"])


def test_paths_in_advice_can_be_copied_to_a_shell(tmp_path):
    run = RunDir(tmp_path / "my run" / "it's")
    run.create()
    run.write_config("")
    with pytest.raises(RunFolderError) as refused:
        run.create()
    [line] = re.findall(r"orchestrator (resume .*); for a new", str(refused.value))
    assert shlex.split(line) == ["resume", str(run.path)]

    def written(advice):
        [word] = shlex.split(advice)
        line = CommandLine(overrides=("job=digits", "+job.path=x", word))
        values = Composer(line).compose().values
        return values["train"]["initial_weights"] or values["job"]["path"]

    advice = advise_new_run(str(run.path), 4).partition("new run: ")[2].partition(", or ")[0]
    assert written(advice) == str(run.path)
    for path in ("/a b/(1)", "/a/b", "null", "it's ${x}"):
        change = Change(key="job.path", before=None, after=path)
        with pytest.raises(ConfigError) as refused:
            refuse_other_numbers([change], "run", 0, program=False, own_optimizer=False)
        assert written(str(refused.value).partition("launch again with ")[2]) == path


def test_another_order_of_additions_is_said_and_reproducible_mode_has_none(make_run, tmp_path):
    run = make_run()
    assert "up to rounding" in resumption_of(run, ["cluster.nodes=1"]).warning
    assert "transport=gloo" in resumption_of(run, ["transport=gloo"]).warning
    assert resumption_of(run, ["train.updates=20"]).warning is None
    leaves = ["accumulation.reduction=reproducible", "accumulation.micro_batch=8"]
    config = composed(*leaves)
    run.write_config(to_yaml(config))
    assert resumption_of(run, ["cluster.nodes=1"]).warning is None


def test_another_cluster_keeps_the_ranks_and_the_run_forgets_its_job(make_run):
    run = make_run("cluster.nodes=3", "cluster.ranks_per_node=1")
    there = resumption_of(run, ["cluster=slurm"])
    assert (there.config.cluster.nodes, there.config.cluster.ranks_per_node) == (3, 1)
    assert there.config.cluster.time_min == 60
    record(run, there, 1, ())
    write_json(run.handle, {"kind": "slurm", "job_id": "7", "slurm_conf": None})
    run.begin_attempt()
    back = resumption_of(run, ["cluster=local"])
    assert back.config.cluster.time_min is None
    record(run, back, 2, ())
    assert not run.handle.exists()
    assert (run.attempt(1) / "handle.json").exists()
    assert json.loads(run.submission.read_text())["cluster"] == "local"


def test_what_refers_to_other_keys_has_their_values_in_this_run(make_run):
    run = make_run("cluster.ranks_per_node=4", "+job.data_dir=/a/mnist")
    for asked, gres in (([], "npu:4"), (["cluster.ranks_per_node=2"], "npu:2")):
        there = resumption_of(run, ["cluster=slurm_ascend", *asked]).config.cluster
        assert there.slurm_flags["gres"] == gres
    for asked, meant in (("~/mnist", f"{Path.home()}/mnist"), ("./${run.dir}/x", "./{run.dir}/x")):
        found = resumption_of(run, [f"job.data_dir='{asked}'"])
        assert found.config.job["data_dir"] == meant
    with pytest.raises(ConfigError, match=r"run\.name is null"):
        resumption_of(run, ["tracker.options.x='${run.name}/x'"])


def test_a_configuration_that_asks_for_fewer_updates_than_are_done_is_refused(make_run):
    run = make_run("train.updates=8", done=9)
    with pytest.raises(RunFolderError, match="it asks for 8 updates, but the newest checkpoint"):
        resumption_of(run, [])


def test_each_resume_is_recorded_and_the_configurations_before_stay_readable(make_run):
    run = make_run("train.updates=8")
    for number, updates in enumerate((20, 30)):
        record(run, resumption_of(run, [f"train.updates={updates}"]), number + 1, ())
        run.begin_attempt()
    kept = [*sorted(run.attempts.glob("*/config.yaml")), run.config]
    found = [read_config(yaml.safe_load(path.read_text())).train.updates for path in kept]
    assert found == [8, 20, 30]
    notes = run.read_resumes()
    assert [note["attempt"] for note in notes] == [1, 2]
    assert notes[1]["overrides"] == ["train.updates=30"]
    assert notes[1]["changes"] == {"train.updates": [20, 30]}
    assert run.read_plan()["updates"] == 30


@pytest.fixture
def run(run, tmp_path):
    write_json(run.submission, {"folder": str(tmp_path / "project")})
    return run


def test_a_resume_stands_where_the_run_was_submitted(run, tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [str(elsewhere), "/usr/lib/python"])
    with submission_directory(run):
        assert Path.cwd() == tmp_path / "project"
        assert sys.path == [str(tmp_path / "project"), "/usr/lib/python"]
    assert Path.cwd() == elsewhere
    assert sys.path == [str(elsewhere), "/usr/lib/python"]


def test_a_folder_of_submission_that_is_gone_is_named(run, tmp_path):
    with (
        pytest.raises(RunFolderError, match=r"was submitted in .*project, .* entered"),
        submission_directory(run),
    ):
        raise AssertionError


def test_only_the_runs_own_files_make_it_one_that_cannot_be_written(run):
    (run.path / "file").touch()
    unwritable = pytest.raises(RunFolderError, match="run cannot be written: Not a directory")
    with unwritable, wrap_disk_errors(run):
        (run.path / "file" / "config.yaml").write_text("")
    with pytest.raises(FileNotFoundError, match="my-data"), wrap_disk_errors(run):
        Path("/my-data/train.bin").read_bytes()
    full = pytest.raises(RunFolderError, match="run cannot be written: No space left")
    with full, wrap_disk_errors(run), Path("/dev/full").open("w") as file:
        file.write("a line")


def test_a_name_that_another_start_takes_at_the_last_moment_is_left_to_it(tmp_path, monkeypatch):
    class Another(OutputOptions):
        def note(self, text, style="", *, prose=False):
            """Start, as other shells do, under the names that this start may have chosen."""
            for second in range(-2, 3):
                moment = datetime.now().astimezone() + timedelta(seconds=second)
                run = RunDir(Path(f"runs/{moment:%Y-%m-%d_%H-%M-%S}_digits").absolute())
                with contextlib.suppress(RunFolderError):
                    run.create()

    monkeypatch.chdir(tmp_path)
    config = compose(["train.updates=1", "schedule.warmup_updates=2"])  # which it warns of
    with start.prepared_run(config, Another(console=Screen(), quiet=True)) as ready:
        assert ready.run.path.name.endswith("_digits_2")
        assert ready.request.run == ready.run.path


def test_a_new_run_is_held_before_its_configuration_can_be_seen(tmp_path, monkeypatch):
    """Else `status` calls it lost, and a `resume` would hold it in the place of its launcher."""
    run, held = RunDir(tmp_path / "run"), []
    monkeypatch.setattr(start, "inputs_of", lambda _: held.append(is_locked(run)) or {})
    with start.prepared_run(
        compose([f"run.dir={run.path}"]), OutputOptions(console=Screen(), quiet=True)
    ):
        assert run.config.exists()
    assert held == [True]


def test_a_local_run_in_progress_is_refused_as_that_before_keys(make_run):
    run, output = make_run(), OutputOptions(console=Screen(), quiet=True)
    keys = ["train.seed=1"]
    with (
        locked(run),
        pytest.raises(RunFolderError, match=rf"is in progress \(process {os.getpid()} on"),
        prepared_resume(run.path, output, keys),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"train\.seed=1"),
        prepared_resume(run.path, output, keys),
    ):
        pass


@pytest.mark.parametrize("keys", [[], ["train.seed=1"]])
def test_a_queued_run_in_progress_is_refused_as_that_before_keys_and_changed_code(
    make_run, tmp_path, monkeypatch, keys
):
    run, code, calls = make_run(), tmp_path / "edited.py", tmp_path / "calls"
    code.write_text("")
    inputs = {"code": {str(code): "0" * 64}}
    write_json(run.submission, {"cluster": "slurm", "time": 1.0, INPUTS: inputs})
    write_json(run.handle, {"kind": "slurm", "job_id": "7", "attempt": 0, "slurm_conf": None})
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    output = OutputOptions(console=Screen(), quiet=True)
    for line, error, why in (
        (queue_line(), RunFolderError, r"is in progress \(job 7, running\)"),
        ("", ConfigError, r"train\.seed=1" if keys else r"edited\.py has changed .*\n.*--changed"),
    ):
        calls.write_text("")
        answer = f"#!/bin/sh\necho asked >>{calls}\necho '{line}'\n"
        script(tmp_path / "bin", answer, "squeue", run=True)
        with pytest.raises(error, match=why), prepared_resume(run.path, output, keys):
            pass
        assert calls.read_text() == "asked\n"


@pytest.mark.parametrize("full_disk", [False, True])
@pytest.mark.parametrize("line", ["", queue_line(State="COMPLETED")], ids=["forgotten", "ended"])
def test_finished_program_without_a_result_is_not_started_again(
    tmp_path, monkeypatch, line, full_disk
):
    """The scheduler has lost the job, or has killed its script, before that wrote the result."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.write_config(
        to_yaml(
            compose(
                ["job=program", "job.command=[train.py]", "cluster=slurm", f"run.dir={run.path}"]
            )
        )
    )
    write_json(run.submission, {"cluster": "slurm", "folder": str(tmp_path), "time": 1.0})
    write_json(run.plan, {"program": {"argv": ["train.py"]}, "ranks": 1, "updates": None})
    write_json(run.handle, {"kind": "slurm", "job_id": "7", "attempt": 0, "slurm_conf": None})
    run.begin_attempt()
    write_json(run.outcome(0), {"state": "finished", "culprit": None, "lost": None})
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    script(tmp_path / "bin", f"#!/bin/sh\necho '{line}'\n", "squeue", run=True)
    script(tmp_path / "bin", "#!/bin/sh\n", "sacct", run=True)
    if full_disk:

        def fail(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("orchestrator.clusters.slurm.finalize.write_result", fail)
    screen = Screen(width=200)
    with prepared_resume(run.path, OutputOptions(console=screen)) as ready:
        assert ready is None
    assert "has finished already" in screen.text
    assert full_disk or run.read_result()["state"] == "finished"
