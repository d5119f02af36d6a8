"""Inputs of a run: the files that it imports, and the data that its arguments name."""

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from orchestrator.api import weights_file
from orchestrator.config.composer import compose
from orchestrator.config.program import ProgramConfig
from orchestrator.rundir.environments import NOT_RECORDED
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.runs import inputs
from orchestrator.runs.inputs import inputs_of
from orchestrator.snapshot import code_files
from tests import helpers

FILES = {
    "train.py": "import helper\nfrom package import one, CONSTANT\n",
    "helper.py": "import numpy, orchestrator, json\ndef later():\n    import inner.deep\n",
    "package/__init__.py": "CONSTANT = 1\n",
    "package/one.py": "from . import two\nfrom .two import name\n",
    "package/two.py": "name = 2\n",
    "package/unused.py": "",
    "inner/deep.py": "",
    "unused.py": "import train\n",
    "broken.py": "def (",
    "plugins.py": "import importlib\nimportlib.import_module(input())\n",
    "run.sh": "python train.py\n",
}
IMPORTED = ["helper.py", "inner/deep.py", "package/__init__.py", "package/one.py", "package/two.py"]
PYTHON = sorted(name for name in FILES if name.endswith(".py"))


@pytest.fixture
def source(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (ProgramConfig(command=("train.py",)), [*IMPORTED, "train.py"]),
        (ProgramConfig(command=("-m", "train")), [*IMPORTED, "train.py"]),
        ("package.one.Job", IMPORTED[2:]),
        ("package.Job", ["package/__init__.py"]),
        (ProgramConfig(command=("plugins.py",)), PYTHON),
        (ProgramConfig(command=("run.sh",)), [*PYTHON, "run.sh"]),
        (ProgramConfig(command=("ls",)), []),
    ],
)
def test_the_code_is_what_is_imported_or_everything_where_that_is_unknown(
    source, monkeypatch, target, expected
):
    if target != ProgramConfig(command=("train.py",)):  # whose own folder Python searches anyway
        monkeypatch.syspath_prepend(source)
    found = [str(path.relative_to(source)) for path in code_files(target)]
    assert found == sorted(expected)


JOB = """
import numpy as np
from tests.light_job import Light
from scale import SCALE

class Mine(Light):
    def __init__(self, data="numbers.txt", width=4):
        super().__init__(width=width)
        self.scale = float(np.loadtxt(data)) * SCALE
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a job of a user's own."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "mine.py").write_text(JOB)
    (folder / "scale.py").write_text("SCALE = 1\n")
    (folder / "numbers.txt").write_text("1")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


REWRITTEN = "files of job.data that the run began with were written while it ran, perhaps by itself"


def test_what_has_changed_is_named(own):
    config = compose(["job._target_=mine.Mine"])
    before = json.loads(json.dumps(inputs_of(config)))
    run = RunDir(own / "run")
    run.create()
    write_json(run.submission, {"time": time.time()})

    def differences():
        return inputs.differences(run, before, config)

    assert differences() == []
    (own / "unrelated.py").write_text("import mine\n")
    assert differences() == []
    (own / "mine.py").write_text(JOB.replace("width=4", "width=5"))
    (own / "numbers.txt").write_text("22")
    (own / "scale.py").unlink()
    assert differences() == [
        "mine.py has changed",
        "scale.py is gone",
        "files of job.data have changed",
    ]
    assert inputs.rewritten_data(run, before, config) == []
    run.result.touch()  # during the run: it may have written the data itself
    assert differences() == ["mine.py has changed", "scale.py is gone"]
    assert inputs.rewritten_data(run, before, config) == [REWRITTEN]
    os.utime(own / "numbers.txt", (1, 1))  # replaced by an older file
    assert differences() == [
        "mine.py has changed",
        "scale.py is gone",
        "files of job.data have changed",
    ]
    assert inputs.rewritten_data(run, before, config) == []
    given = compose(["job._target_=mine.Mine", "job.data=other.txt"])
    assert "job.data" not in inputs_of(given)["data"], "it does not exist yet"


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda data: (data / "cache.bin").write_text("new"), False),
        (lambda data: (data / "a.csv").write_text("2\n"), True),
        (lambda data: (data / "a.csv").write_text("0123456789") and (data / "c").touch(), True),
        (lambda data: (data / "b.csv").unlink() or (data / "cache.bin").touch(), True),
    ],
)
def test_files_of_a_job_that_were_rewritten_while_it_ran_are_named(
    own, tmp_path, change, differs, program
):
    """A program's source does not tell what it writes, so all of its data may be its own."""
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a.csv", "b.csv"):
        (data / name).write_text("1\n")
        os.utime(data / name, (1e9, 1e9))
    job, key = ["job._target_=mine.Mine"], "job.data"
    if program:
        (own / "train.py").write_text("import numpy\n")
        job, key = ["job.command=[train.py]", "job.style=plain"], "job.arguments.data"
    config = compose([*job, f"{key}={data}"])
    before = json.loads(json.dumps(inputs_of(config)))
    run = RunDir(tmp_path / "run")
    run.create()
    write_json(run.submission, {"time": before["times"][key] - 1.0})
    change(data)
    run.result.touch()
    now = before["times"][key] + 10.0
    for path in data.iterdir():  # the clock of files is coarse
        if path.stat().st_mtime > 1.1e9:
            os.utime(path, (now, now))
    os.utime(run.result, (time.time() + 1.0,) * 2)
    assert inputs.differences(run, before, config) == [], "a library may have written a lock"
    expected = [REWRITTEN] if differs and not program else []
    assert inputs.rewritten_data(run, before, config) == expected


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda data: None, False),
        (lambda data: (data / "inner" / "b.csv").unlink(), True),
        (lambda data: shutil.copy2(data / "inner" / "b.csv", data / "a.csv"), True),
        (lambda data: (data / "run" / "later").touch(), False),
    ],
)
def test_data_that_is_replaced_or_removed_after_a_run_has_changed(own, tmp_path, change, differs):
    """The newest time of a file is that of the cache, which the run wrote."""
    data = tmp_path / "data"
    (data / "inner").mkdir(parents=True)
    for name in ("a.csv", "inner/b.csv"):
        (data / name).write_text("1\n" + name)
        os.utime(data / name, (1e9, 1e9))
    config = compose(["job._target_=mine.Mine", f"job.data={data}"])
    before = json.loads(json.dumps(inputs_of(config)))
    run = RunDir(data / "run")
    run.create()
    write_json(run.submission, {"time": before["times"]["job.data"]})
    (data / "cache.bin").touch()
    time.sleep(0.02)  # the clock of files is coarse
    run.result.touch()
    time.sleep(0.02)
    change(data)
    expected = ["files of job.data have changed"] if differs else []
    assert inputs.differences(run, before, config) == expected


@pytest.mark.parametrize("ahead_s", [-60.0, 0.0, 60.0])
def test_clock_of_a_file_server_may_differ(own, tmp_path, ahead_s):
    data, run = tmp_path / "data", RunDir(tmp_path / "run")
    data.mkdir()
    run.create()
    start = time.time()
    for name, saved_s in (("a.csv", -2.0), ("cache.bin", 600.0)):
        if name == "cache.bin":
            config = compose(["job._target_=mine.Mine", f"job.data={data}"])
            before = json.loads(json.dumps(inputs_of(config)))
            write_json(run.submission, {"time": start})
        (data / name).write_text("1\n")
        os.utime(data / name, (start + saved_s + ahead_s,) * 2)
    run.result.touch()
    os.utime(run.result, (start + 900.0 + ahead_s,) * 2)
    assert inputs.differences(run, before, config) == []
    assert inputs.rewritten_data(run, before, config) == []


def test_data_that_cannot_be_read_for_a_moment_ends_no_launcher(own, monkeypatch):
    """`rewritten_data` is asked again at a restart, and its paths may come and go."""
    config = compose(["job._target_=mine.Mine"])
    before = json.loads(json.dumps(inputs_of(config)))
    run = RunDir(own / "run")
    run.create()
    write_json(run.submission, {"time": before["times"]["job.data"]})
    (own / "numbers.txt").write_text("22")
    run.result.touch()
    failures, really = [1], Path.stat

    def stat(path, **more):
        if path.name == "numbers.txt" and failures and failures.pop():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return really(path, **more)

    monkeypatch.setattr(Path, "stat", stat)
    assert inputs.rewritten_data(run, before, config) == []
    assert inputs.rewritten_data(run, before, config) == [REWRITTEN]


def test_data_that_was_accepted_is_what_later_runs_begin_with(own, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    config = compose(["job._target_=mine.Mine", f"job.data={data}"])
    run = RunDir(tmp_path / "run")
    run.create()
    write_json(run.submission, {"time": 1e9})
    (data / "a.csv").write_text("2\n")  # while the run was stopped
    before = inputs.accepted({"data": {"job.data": "another"}}, config)
    later = before["times"]["job.data"] + 10.0
    (data / "cache.bin").touch()
    os.utime(data / "cache.bin", (later, later))
    run.result.touch()
    os.utime(run.result, (later, later))
    assert inputs.differences(run, before, config) == []
    assert inputs.rewritten_data(run, before, config) == []


def launch(folder, *more):
    return helpers.call(
        "job._target_=mine.Mine",
        "train.updates=2",
        "cluster.ranks_per_node=1",
        f"run.dir={folder}",
        "tracker=none",
        *more,
        cwd=Path.cwd(),
    )


def test_a_resume_refuses_what_has_changed_unless_that_is_accepted(own):
    launch("first")
    longer = ("resume", "first", "train.updates=4")
    (own / "mine.py").write_text(JOB.replace("width=4", "width=5"))
    (own / "numbers.txt").write_text("22")
    refused = helpers.verb(*longer, cwd=own, code=2)
    assert "mine.py has changed, files of job.data have changed since" in refused.stderr
    assert "--changed" in refused.stderr
    assert "going on after" not in refused.stdout, "which it does not"
    (own / "mine.py").write_text(JOB + "# more\n")
    done = helpers.verb(*longer, "--changed", cwd=own, code=0)
    assert "mine.py has changed since the run began; going on all the same" in done.stdout
    assert RunDir(own / "first").read_resumes()[-1]["changed_inputs"]
    last = helpers.verb("resume", "first", "train.updates=6", cwd=own)
    assert last.returncode == 0, "what was accepted is no change any more"
    (own / "scale.py").write_text("SCALE = 2\n")
    launch("second", "train.updates=6")
    output = helpers.verb("compare", "first", "second", cwd=own).stdout
    assert "scale.py differs" in output
    assert "mine.py" not in output
    assert NOT_RECORDED not in output
    for folder in ("first", "second"):  # one without, then none with
        (own / folder / "environment.json").unlink()
        assert NOT_RECORDED in helpers.verb("compare", "first", "second", cwd=own, code=0).stdout
    weights = weights_file(own / "first")
    assert NOT_RECORDED not in helpers.verb("compare", weights, "second", cwd=own, code=0).stdout


def test_resume_warns_of_data_that_was_written_while_the_run_ran(own):
    (own / "mine.py").write_text(
        JOB + "        open(data, 'a').write(' ')\n"  # as a library does with a lock
    )
    os.utime(own / "numbers.txt", (1e9, 1e9))
    launch("first")
    done = helpers.verb("resume", "first", "train.updates=4", cwd=own, code=0)
    assert REWRITTEN in " ".join(done.stdout.split())
    helpers.verb("resume", "first", "train.updates=6", "--changed", cwd=own, code=0)
    assert RunDir(own / "first").read_resumes()[-1]["changed_inputs"] == [REWRITTEN]


def test_rewritten_data_with_other_samples_is_accepted_by_changed(own):
    """The ranks alone know how many there are, and would refuse them again."""
    (own / "mine.py").write_text(
        JOB.replace("__init__(width=width)", "__init__(int(open(data).read()), width)")
    )
    (own / "numbers.txt").write_text("200")
    launch("first")
    (own / "numbers.txt").write_text("240")
    later = time.time() + 10.0
    os.utime(own / "first" / "result.json", (later, later))  # so it was written while the run ran
    longer = ("resume", "first", "train.updates=4")
    refused = helpers.verb(*longer, cwd=own)
    assert refused.returncode
    output = " ".join((refused.stdout + refused.stderr).split())
    assert "has 240 samples, but had 200" in output
    assert "--changed" in output
    assert REWRITTEN in output
    helpers.verb(*longer, "--changed", cwd=own, code=0)
    last = helpers.verb("resume", "first", "train.updates=6", cwd=own, code=0)
    assert REWRITTEN not in " ".join(last.stdout.split()), "it was accepted"


def test_a_sweep_replaces_finished_points_only_if_what_has_changed_is_accepted(own):
    sweep = ("-m", "train.seed=1,2")
    launch("sweep", *sweep)
    before = {path: path.stat().st_mtime_ns for path in own.glob("sweep/*/result.json")}
    assert len(before) == 2
    (own / "scale.py").write_text("SCALE = 2\n")
    refused = launch("sweep", *sweep)
    assert refused.returncode == 2
    assert "all points: finished, and changed: scale.py has changed\n--changed" in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before
    launch("sweep", *sweep, "--changed")
    assert all(path.stat().st_mtime_ns != then for path, then in before.items())


def test_a_sweep_warns_of_finished_points_whose_data_was_rewritten(own):
    sweep = ("-m", "train.seed=1,2")
    launch("sweep", *sweep)
    (own / "numbers.txt").write_text("22")
    later = time.time() + 10.0
    for number in "01":  # so it was written while they ran
        os.utime(own / "sweep" / number / "result.json", (later, later))
    for again in (launch("sweep", *sweep), helpers.verb("resume", "sweep", cwd=own, code=0)):
        assert f"warning: points 0-1: {REWRITTEN}" in " ".join(again.stdout.split())


REPORTING = "from orchestrator import current_run as run\n{}run.report(0, loss=1.0, samples=1)\n"


@pytest.mark.whole_runs
def test_a_program_that_crashed_before_its_first_update_is_resumed_with_its_new_code(own):
    program = own / "train.py"
    program.write_text(REPORTING.format("1 / 0\n"))
    words = ("run", "run.dir=crashed", "cluster.ranks_per_node=1", "--", "train.py")
    assert helpers.verb(*words, cwd=own).returncode == 1
    program.write_text(REPORTING.format(""))
    resumed = helpers.verb("resume", "crashed", cwd=own, code=0)
    assert "no update and no checkpoint yet" in " ".join(resumed.stdout.split())
    program.write_text(REPORTING.format("# another\n"))
    (own / "crashed" / "result.json").unlink()  # now an update is done
    assert "train.py has changed" in helpers.verb("resume", "crashed", cwd=own, code=2).stderr


@pytest.mark.parametrize(
    ("source", "seconds", "nothing"),
    [
        (REPORTING.format("1 / 0\n"), 3600.0, True),
        ("from orchestrator import current_run as r\nr.windows(8)\n", 99.0, True),
        ("import numpy\n", 5.0, True),
        ("import numpy\n", 3600.0, False),
        ("import numpy\nnumpy.windows()\n", 3600.0, False),
        ("import numpy\n", None, False),
    ],
)
def test_a_program_has_done_nothing_if_it_reports_or_was_short(own, source, seconds, nothing):
    (own / "train.py").write_text(source)
    run = RunDir(own / "run")
    run.create()
    config = compose(["job=program", "job.command=[train.py]"])
    write_json(run.submission, {"inputs": inputs_of(config)})
    run.begin_attempt()
    if seconds is not None:
        write_json(run.program_end(0), {"seconds": seconds})
    assert inputs.has_done_nothing(run, config) is nothing
    for words in ("{run.dir}/out", f"--save={run.path}"):  # where else it saves, nobody can tell
        other = compose(["job=program", f"job.command=[train.py,'{words}']"])
        assert not inputs.has_done_nothing(run, other)
    (run.checkpoints / "mine.pt").touch()
    assert not inputs.has_done_nothing(run, config)
