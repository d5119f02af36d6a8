"""The same line again: its action for each point of a sweep, by what happened to the point."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.clusters.api import Cluster
from orchestrator.config.command_line import program_overrides, read_command_line
from orchestrator.config.composer import Composer
from orchestrator.errors import EXIT_STOPPED, ClusterError, ConfigError, RunFolderError
from orchestrator.interrupt import interrupts
from orchestrator.rundir.checkpoints import folder_of
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import locked
from orchestrator.rundir.outcome import State, write_result
from orchestrator.runs.follow import OutputOptions
from orchestrator.sweep.points import check_points
from orchestrator.sweep.sweep import _count_not_begun, _run_tasks
from orchestrator.sweep.tasks import (
    REPLACED,
    Action,
    note_count,
    prepared_task,
    refuse_replacing,
    replaced_folder,
    submit,
    tasks_of,
)

pytestmark = pytest.mark.whole_runs

QUIET = OutputOptions(console=Console(quiet=True), quiet=True)
JOB = "job._target_=points_job.Mine"
SOURCE = """
from orchestrator import Job, Loss

class Mine(Job):
    def __init__(self, data="{data}"):
        self.data = data

    def model(self): ...
    def dataset(self): ...
    def loss(self, model, batch): return Loss(0.0, weight=1)
"""


class Sweep:
    """A sweep over two seeds, in this process: what its line would do, and what it leaves."""

    def __init__(self, base):
        self.code, self.data, self.folder = base / "code", base / "data", base / "sweep"
        self.code.mkdir()
        self.data.mkdir()
        (self.data / "samples").write_text("1 2 3")
        self.edit("")

    def edit(self, more):
        (self.code / "points_job.py").write_text(SOURCE + more)

    def tasks(self, *more, over=("train.seed=1,2",), force=False):
        line = ["-m", JOB, f"job.data={self.data}", f"run.dir={self.folder}", *over, *more]
        return tasks_of(check_points(Composer(read_command_line(line))), force=force)

    def run(self, tasks, state=State.FINISHED):
        """What a launch of these points leaves, but for what the ranks would have computed."""
        for task in tasks:
            with prepared_task(task, QUIET) as ready:
                ready.run.begin_attempt()
                write_result(ready.run, state)

    def run_of(self, number):
        return RunDir(self.folder / str(number))


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    found = Sweep(tmp_path)
    monkeypatch.syspath_prepend(found.code)
    found.run(found.tasks())
    return found


def test_what_is_replaced_never_moves_to_a_folder_that_is_there(tmp_path):
    for name in ("3-0", "3-2", "13-5", "search-0"):
        (tmp_path / REPLACED / name).mkdir(parents=True)
    assert replaced_folder(tmp_path, "3").name == "3-3"
    assert replaced_folder(tmp_path, "4").name == "4-0"


def of_another_version(run):
    noted = run.read_submission()
    run.submission.unlink()
    write_json(run.submission, noted | {"inputs": noted["inputs"] | {"versions": {"torch": "0.1"}}})


def write_result_again(run, state):
    run.result.unlink()
    write_result(run, state)


def only_a_lock(run):
    shutil.rmtree(run.path)
    run.path.mkdir()
    run.lock.touch()


def ended_as(state):
    return lambda run: write_result_again(run, state)


HAPPENED = [  # event, action that follows, its reason, and whether the old folder is kept
    (lambda _: None, Action.NOTHING, "finished", False),
    (lambda run: shutil.rmtree(run.path), Action.START, "new", False),
    (lambda run: run.submission.unlink(), Action.START, "half-written", True),
    (only_a_lock, Action.START, "half-written", True),
    (lambda run: run.plan.write_text("{"), Action.START, "damaged", True),
    (of_another_version, Action.START, "torch (was 0.1)", True),
    (lambda run: run.result.unlink(), Action.RESUME, "lost", False),
    (ended_as(State.FAILED), Action.RESUME, "failed", False),
    (ended_as(State.STOPPED), Action.RESUME, "stopped", False),
]


def test_what_happened_to_a_point_decides_what_is_done_with_it_and_with_no_other(sweep):
    over = (f"train.seed=range(1,{len(HAPPENED) + 1})",)
    sweep.run([task for task in sweep.tasks(over=over) if task.action is Action.START])
    begun = sweep.tasks(over=over)
    for task, (happen, *_) in zip(begun, HAPPENED, strict=True):
        happen(task.run)
    for task, (_, do, why, _) in zip(sweep.tasks(over=over), HAPPENED, strict=True):
        assert (task.action, why in task.why) == (do, True), (task.why, why)
        if do is not Action.NOTHING:
            sweep.run([task])
    assert {task.action for task in sweep.tasks(over=over)} == {Action.NOTHING}
    kept = {f"{c.run.path.name}-0" for c, (*_, k) in zip(begun, HAPPENED, strict=True) if k}
    assert {path.name for path in (sweep.folder / REPLACED).iterdir()} == kept


def test_changed_code_and_data_run_again_if_accepted(sweep):
    (sweep.code / "another.py").write_text("import points_job\n")  # which the job does not import
    assert {task.why for task in sweep.tasks()} == {"finished"}
    (sweep.data / "samples").write_text("4")
    assert {task.why for task in sweep.tasks()} == {"changed: files of job.data have changed"}
    sweep.edit("# another line\n")
    tasks = sweep.tasks()
    for task in tasks:
        assert task.action is Action.START
        code = sweep.code / "points_job.py"
        assert task.why == f"changed: {code} has changed, files of job.data have changed"
    with pytest.raises(ConfigError, match=r"all points: finished, and changed: .*\n--changed"):
        refuse_replacing(tasks)
    refuse_replacing(sweep.tasks(force=True))
    write_result_again(sweep.run_of(0), State.FAILED)
    write_result_again(sweep.run_of(1), State.FAILED)
    refuse_replacing(sweep.tasks())
    for state in (State.FAILED, State.STOPPED):  # their updates would be lost
        write_result_again(sweep.run_of(1), state)
        folder_of(sweep.run_of(1).checkpoints, 5).mkdir(parents=True, exist_ok=True)
        assert [task.replaces for task in sweep.tasks()] == [False, True]
        with pytest.raises(ConfigError, match=r"point 1: .*checkpoint, and changed.*\n--changed"):
            refuse_replacing(sweep.tasks())
        refuse_replacing(sweep.tasks(force=True))


def test_a_program_is_made_of_the_files_that_its_words_name_but_for_what_it_wrote(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    files = [
        Path("folder", os.fsdecode(b"caf\xe9")),
        Path("train.sh"),
        Path("data.csv"),
        Path("more.txt"),
    ]
    for file in files:
        file.write_text("true\n")
    words = ("bash", "train.sh", "--data=data.csv", "--log", "log.txt", f"and/or {'x' * 300}")
    line = (
        "-m",
        "job.arguments.x=1,2",
        "job.argument_style=words",
        f"run.dir={tmp_path}/sweep",
        "job.arguments.folder=folder",
        "job.arguments.all=[data.csv,more.txt]",
        *program_overrides(words),
    )

    def tasks():
        return tasks_of(check_points(Composer(read_command_line(line))))

    Sweep.run(None, tasks())
    Path("log.txt").write_text("of the first run")
    assert {task.why for task in tasks()} == {"finished"}
    for file in files:
        file.write_text("changed\n")
    assert {task.action for task in tasks()} == {Action.START}
    runs = [task.run for task in tasks()]
    for run in runs:
        write_result_again(run, State.FAILED)
    (runs[1].checkpoints / "mine.pt").touch()  # by whatever name
    for file in files:  # what was written before a run's end may be its own
        file.write_text("changed again\n")
    assert [task.replaces for task in tasks()] == [False, True]
    [why] = {task.why for task in tasks()}
    assert why.removeprefix("changed: ").split(", ") == [
        "data.csv has changed",
        "data.csv (job.arguments.all) has changed",
        "files of job.arguments.folder have changed",
        "more.txt (job.arguments.all) has changed",
        "train.sh has changed",
    ]


def test_where_and_how_a_point_is_run_is_no_change_unless_that_is_what_is_compared(sweep):
    elsewhere = ("run.max_restarts=3", "sweep.parallel=1")
    assert [task.action for task in sweep.tasks(*elsewhere)] == [Action.NOTHING] * 2
    over = ("run.max_restarts=0,1",)
    compared = sweep.tasks(over=over)
    assert len({task.run.path for task in compared}) == 2
    assert [task.action for task in compared] == [Action.START] * 2
    sweep.run(compared)
    again = sweep.tasks(over=over)
    assert [task.action for task in again] == [Action.NOTHING] * 2
    assert [task.run.path for task in again] == [task.run.path for task in compared]


def test_values_more_leave_the_other_points_where_they_are_and_force_runs_all(sweep):
    tasks = sweep.tasks(over=("train.seed=7,2,1",))
    assert [task.action for task in tasks] == [Action.START, Action.NOTHING, Action.NOTHING]
    assert [task.run.path.name for task in tasks] == ["2", "1", "0"]
    forced = sweep.tasks(force=True)
    assert [task.action for task in forced] == [Action.START] * 2
    sweep.run(forced)
    assert {path.name for path in (sweep.folder / REPLACED).iterdir()} == {"0-0", "1-0"}


def test_a_resume_counts_points_of_a_longer_line_of_which_none_has_begun(sweep):
    assert _count_not_begun([sweep.run_of(0), sweep.run_of(1)]) == 0
    note_count(sweep.tasks(over=("train.seed=7,8,2,1",)))
    assert _count_not_begun([sweep.run_of(0), sweep.run_of(1)]) == 2
    assert [task.changed for task in sweep.tasks()] == [None, None]


def test_a_point_that_changed_while_it_is_in_progress_is_refused(sweep):
    run = sweep.run_of(1)
    run.result.unlink()
    with locked(run):
        assert [task.action for task in sweep.tasks()] == [Action.NOTHING, Action.IN_PROGRESS]
        sweep.edit("# another line\n")
        with pytest.raises(ConfigError, match="point 1: it is in progress as it was"):
            sweep.tasks()


def test_an_interrupt_counts_also_where_a_point_is_in_progress_elsewhere(sweep, capsys):
    sweep.run_of(1).result.unlink()
    with locked(sweep.run_of(1)), interrupts:
        interrupts.once()
        tasks = sweep.tasks(over=("train.seed=1,2,3,4,5",))
        code = _run_tasks(tasks, OutputOptions(console=Console(width=200)))
    printed = capsys.readouterr().out
    assert "1 point queued or running" in printed
    assert "1 of 4 points finished; 3 not begun yet" in printed
    assert code == EXIT_STOPPED


def test_a_folder_is_not_moved_away_from_a_run_that_has_begun_meanwhile(sweep):
    write_result_again(sweep.run_of(0), State.FAILED)
    sweep.edit("# another line\n")
    task, _ = sweep.tasks()
    in_progress = pytest.raises(RunFolderError, match="in progress")
    with locked(task.run), in_progress, prepared_task(task, QUIET):  # it was resumed alone
        pass
    assert task.run.result.exists()
    task.run.submission.write_text("{")
    damaged, _ = sweep.tasks()
    assert damaged.action is Action.START
    with locked(task.run), in_progress, prepared_task(damaged, QUIET):
        pass
    assert not (sweep.folder / REPLACED).exists()


def test_a_resume_that_is_given_up_leaves_a_point_as_it_ended(sweep):
    write_result_again(sweep.run_of(0), State.STOPPED)
    task, _ = sweep.tasks()
    end = task.run.result.read_bytes()

    def give_up():
        with prepared_task(task, QUIET):
            assert not task.run.result.exists()
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        give_up()
    assert task.run.result.read_bytes() == end
    with prepared_task(task, QUIET) as ready:
        pass
    ready.withdraw()  # as where another point is refused
    assert task.run.result.read_bytes() == end


def test_an_edit_while_points_wait_refuses_none_that_was_checked(sweep, monkeypatch):
    monkeypatch.setattr("orchestrator.runs.resume.newest", lambda *_, **__: (None, []))
    for number in (0, 1):
        write_result_again(sweep.run_of(number), State.STOPPED)
        folder_of(sweep.run_of(number).checkpoints, 5).mkdir(parents=True)
    waiting, accepting = sweep.tasks()
    sweep.edit("# an edit while an earlier point runs\n")
    sweep.run([waiting, replace(accepting, accepts_changes=True)], State.STOPPED)
    resumes = [sweep.run_of(number).read_resumes()[-1] for number in (0, 1)]
    assert all("has changed" in resumed["changed_inputs"][0] for resumed in resumes)
    assert [resumed["accepts_changes"] for resumed in resumes] == [False, True]


@pytest.fixture
def _refusing(monkeypatch):
    """Let the cluster refuse whatever is submitted."""

    class Refusing(Cluster):
        @classmethod
        def submit_all(cls, placed, at_once=None):
            raise ClusterError("no such partition")

    monkeypatch.setattr("orchestrator.sweep.tasks.class_of", lambda _: Refusing)


@pytest.mark.usefixtures("_refusing")
def test_points_that_were_queued_once_do_not_count_where_nothing_is_queued(sweep):
    for run in (sweep.run_of(0), sweep.run_of(1)):
        write_result_again(run, State.STOPPED)
        write_json(run.handle, {"kind": "local", "job_id": "7", "attempt": 0})
    tasks = sweep.tasks()
    with pytest.raises(ClusterError) as refused:
        submit(tasks, QUIET)
    assert str(refused.value) == "no such partition"
    assert [task.run.read_result()["state"] for task in tasks] == ["stopped", "stopped"]


def test_a_copy_of_a_points_folder_is_not_taken_for_the_point(sweep):
    shutil.copytree(sweep.run_of(0).path, sweep.folder / "0.bak")
    assert [task.run.path.name for task in sweep.tasks()] == ["0", "1"]


@pytest.mark.usefixtures("_refusing")
def test_results_that_nothing_could_replace_are_where_they_were(sweep):
    before = [task.run.read_result() for task in sweep.tasks()]
    with pytest.raises(ClusterError, match="no such partition"):
        submit(sweep.tasks(force=True), QUIET)
    with pytest.raises(OSError, match="full"), prepared_task(sweep.tasks(force=True)[1], QUIET):
        raise OSError("the disk is full")
    assert [task.run.read_result() for task in sweep.tasks()] == before
    assert {task.action for task in sweep.tasks()} == {Action.NOTHING}


def test_another_users_folder_is_never_used(sweep):
    foreign = sweep.folder / "2" / "theirs"
    foreign.parent.mkdir()
    foreign.touch()
    *_, third = sweep.tasks(over=("train.seed=1,2,3",))
    with pytest.raises((ConfigError, RunFolderError), match="is not empty"):
        sweep.run([third])
    assert foreign.exists()
