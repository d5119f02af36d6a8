"""A search that was killed, wherever that was, ends as if nothing had been: laws in one process.

Trials end at once here, in real folders and a real journal; whole ones are in `test_whole.py`.
"""

import errno
import json
import os
import shutil
from io import StringIO
from pathlib import Path

import pytest
from optuna.storages.journal import JournalFileBackend
from rich.console import Console

from orchestrator.clusters.api import class_of
from orchestrator.errors import ConfigError, RunFolderError
from orchestrator.interrupt import interrupts
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import locked
from orchestrator.rundir.metrics import Tail
from orchestrator.runs.follow import OutputOptions
from orchestrator.search import search as searches
from orchestrator.search.search import TrialRuns, open_study
from orchestrator.sweep.local import PointResult
from tests.search.helpers import (
    ONE,
    QUIET,
    SPACE,
    AtOnce,
    line_of,
    loss_of,
    run_to_end,
    search_of,
    write_result,
)

pytestmark = pytest.mark.whole_runs

MANY = 8


class Killed(BaseException):
    """As by kill -9: nothing that follows in this start is done."""


@pytest.fixture
def killed_at(monkeypatch):
    """Kill the search while it writes the n-th record of its journal, torn in its middle."""
    write = JournalFileBackend.append_logs
    left = [None]

    def torn(self, logs):
        if left[0] == 0:
            write(self, logs)
            path = Path(self._file_path)
            content = path.read_bytes()
            begin = content.rfind(b"\n", 0, -1) + 1
            path.write_bytes(content[: (begin + len(content)) // 2])
            raise Killed
        if left[0] is not None:
            left[0] -= 1
        write(self, logs)

    monkeypatch.setattr(JournalFileBackend, "append_logs", torn)

    def after(count):
        left[0] = count

    return after


def outcomes(table):
    return [(trial["point"], trial["state"], trial["value"]) for trial in table["trials"]]


def test_a_search_killed_at_any_record_runs_no_trial_twice_and_ends_the_same(tmp_path, killed_at):
    line = line_of(tmp_path / "found", f"sweep.trials={MANY}", "sweep.seed=3")
    search = search_of(*line)
    whole = run_to_end(search)
    assert {state for _, state, _ in outcomes(whole)} == {"complete", "failed"}
    shutil.rmtree(tmp_path / "found")
    trial_runs, kills = AtOnce(), 0
    for records in (0, 1, 2, 3, 1, 0, 2, 4, 1, 3):
        killed_at(records)
        trial_runs.running.clear()
        try:
            run_to_end(search, trial_runs)
        except Killed:
            kills += 1
    killed_at(None)
    trial_runs.running.clear()
    assert outcomes(run_to_end(search, trial_runs)) == outcomes(whole)
    assert kills >= 8
    finished = [n for n, (_, state, _) in enumerate(outcomes(whole)) if state == "complete"]
    for number in finished:
        run = RunDir(tmp_path / "found" / str(number))
        assert trial_runs.began.count(run.path) in range(1, 2 + kills)
        assert run.read_result()["state"] == "finished"
    assert len(list((tmp_path / "found").glob("[0-9]*"))) == len({*trial_runs.began})


def test_more_trials_are_those_of_a_search_that_asked_for_as_many_at_once(tmp_path):
    few = search_of(*line_of(tmp_path / "found", "sweep.trials=4"))
    many = search_of(*line_of(tmp_path / "found", "sweep.trials=12"))  # two by earlier results
    run_to_end(few)
    trial_runs = AtOnce()
    grown = run_to_end(many, trial_runs)
    assert len(trial_runs.began) == 12 - 4
    shutil.rmtree(tmp_path / "found")
    assert outcomes(run_to_end(many)) == outcomes(grown)


def test_values_are_those_of_the_runs_and_the_best_is_the_smallest(tmp_path):
    for direction, best in (("minimize", min), ("maximize", max)):
        found = run_to_end(
            search_of(
                *line_of(tmp_path / direction, "sweep.trials=6", f"sweep.direction={direction}")
            )
        )
        values = {}
        for trial in found["trials"]:
            lr, k = (float(word.partition("=")[2]) for word in trial["point"])
            values[trial["number"]] = loss_of(lr, int(k))
            assert trial["value"] == values[trial["number"]]
        known = {number: value for number, value in values.items() if value is not None}
        assert known[found["best"]] == best(known.values())


def test_a_trial_whose_room_is_gone_at_the_last_moment_waits_for_it(tmp_path):
    class Shrinking(AtOnce):
        refused = 0

        def start(self, task):
            if len(self.running) == 2 and self.refused < 3:
                self.refused += 1
                return False
            return super().start(task)

    trial_runs = Shrinking(most=3)
    found = run_to_end(search_of(*line_of(tmp_path / "found", "sweep.trials=7")), trial_runs)
    assert trial_runs.refused == 3
    assert [path.name for path in trial_runs.began] == [str(number) for number in range(7)]
    assert {trial["state"] for trial in found["trials"]} <= {"complete", "failed"}


def test_a_grid_is_tried_whole_and_a_point_that_is_drawn_again_is_not_run_again(tmp_path):
    script = line_of(tmp_path / "grid")[-2:]
    space = ("job.arguments.lr=0.1,0.2", "job.arguments.k=1,3", *ONE)
    grid = run_to_end(search_of(*space, "sweep.search=grid", f"run.dir={tmp_path}/grid", *script))
    points = [tuple(trial["point"]) for trial in grid["trials"]]
    assert points == [
        (f"job.arguments.lr={lr}", f"job.arguments.k={k}") for lr in (0.1, 0.2) for k in (1, 3)
    ]
    trial_runs = AtOnce()
    drawn = ("sweep.search=random", "sweep.trials=12", f"run.dir={tmp_path}/drawn")
    again = run_to_end(search_of(*space, *drawn, *script), trial_runs)
    assert len(trial_runs.began) == len({tuple(trial["point"]) for trial in again["trials"]}) <= 4
    assert len(again["trials"]) == 12
    repeated = [trial for trial in again["trials"] if trial["state"] == "pruned"]
    assert len(repeated) == 12 - len(trial_runs.began)
    assert all(trial["why"].startswith("the same as trial") for trial in repeated)


def test_another_search_is_refused_in_the_same_folder(tmp_path):
    line = line_of(tmp_path / "found", "sweep.trials=2")
    run_to_end(search_of(*line))
    for other, why in (
        ("sweep.seed=1", "sweep.seed is not what it was"),
        ("job.arguments.pause=9", "job.arguments.pause is not what it was"),
        ("sweep.trials=1", "2 trials already"),
        ("job.arguments.lr=interval(0,2)", "job.arguments.lr is not what it was"),
        ("++job.arguments.lr=0.5", r"\(job.arguments.lr is not what it was\)"),
    ):
        key = other.partition("=")[0].lstrip("+")
        kept = [text for text in line if text.partition("=")[0] != key]
        with pytest.raises(ConfigError, match=why):
            run_to_end(search_of(*kept[:-2], other, *kept[-2:]))


def test_resume_warns_of_trials_in_progress(tmp_path):
    class Left(AtOnce):
        def follow(self, task):
            self.running.append(task)

        def wait(self):
            raise Killed

    folder = tmp_path / "found"
    search = search_of(*line_of(folder, "sweep.trials=2"))
    with pytest.raises(Killed):
        run_to_end(search, Left())
    console = Console(record=True, file=StringIO(), width=300)
    given, output = ["cluster.heartbeat_timeout_s=9"], OutputOptions(console=console)
    with locked(RunDir(folder / "0")), pytest.raises(Killed):
        run_to_end(search, Left(), given, output)
    warning = f"warning: trial 0 of {folder} cannot take {given[0]} while in progress"
    assert warning in console.export_text()


def test_a_search_anew_puts_the_old_one_aside_and_other_code_is_refused(tmp_path):
    line = line_of(tmp_path / "found", "sweep.trials=2")
    first = run_to_end(search_of(*line))
    (tmp_path / "found" / "0" / "start.py").write_text("")  # among the sources, and none of them
    assert outcomes(run_to_end(search_of(*line))) == outcomes(first)
    script = tmp_path / "program.py"
    script.write_text(script.read_text().replace("0.3", "0.4"))
    with pytest.raises(ConfigError, match=r"trials 0-1 of .*changed: .*program.py has changed"):
        run_to_end(search_of(*line))
    anew = run_to_end(search_of(*line[:-2], "sweep.force=true", *line[-2:]))
    assert outcomes(anew) == outcomes(first), "the same points"
    aside = tmp_path / "found" / ".replaced" / "search-0"
    assert {path.name for path in aside.iterdir()} == {"0", "1", "search.json", "search.journal"}


def test_a_trial_without_the_figure_is_one_that_failed_where_others_have_it(tmp_path):
    class Mute(AtOnce):
        def __init__(self):
            super().__init__()
            self.left = [True, False, True]  # whether the next that finishes has measured nothing

        def wait(self):
            [ended] = super().wait()
            run = ended.task.run
            found = run.read_result()
            if found["state"] == "finished" and self.left and self.left.pop(0):
                write_json(run.result, found | {"loss": None})
            return [ended]

    search = search_of(*line_of(tmp_path / "found", f"sweep.trials={MANY}", "sweep.seed=1"))
    trial_runs = Mute()
    with pytest.raises(ConfigError, match=r"measured no such figure; .* the same line goes on"):
        run_to_end(search, trial_runs)
    trial_runs.running.clear()
    found = run_to_end(search, trial_runs)["trials"]
    assert len([trial for trial in found if "no such figure" in (trial["why"] or "")]) == 2
    assert [trial["state"] for trial in found].count("complete") >= 2


class Judged(AtOnce):
    """Runs that are judged by their first update before they end. A stop comes too late for `late`;
    the search is killed when it has asked for one of `killed`.
    """

    def __init__(self, late, killed=()):
        super().__init__()
        self.late, self.killed, self.looked = late, killed, False

    def start(self, task):
        loss = loss_of(task.point.config.job["arguments"]["lr"], 1)
        started = super().start(task)
        task.run.metrics.write_text(json.dumps({"update": 0, "loss": loss}) + "\n")
        return started

    def wait(self):
        self.looked = not self.looked
        if self.looked:
            return []
        [ended] = super().wait()
        run = ended.task.run
        if run.path in self.stopped and run.path.name not in self.late:
            write_json(run.result, run.read_result() | {"state": "stopped"})
        if run.path in self.stopped and run.path.name in self.killed:
            raise Killed
        return [ended]


def test_a_trial_that_ends_before_it_can_be_pruned_has_its_value(tmp_path):
    script = line_of(tmp_path / "found")[-2:]
    line = (
        "job.arguments.lr=0.3,0.31,0.32,0.33,0.34,5,6,7,8",
        "job.arguments.k=1",
        *ONE,
        "sweep.search=grid",
        "sweep.prune=median",
        f"run.dir={tmp_path}/found",
        *script,
    )
    for killed in ("7", "8"):
        with pytest.raises(Killed):
            run_to_end(search_of(*line), Judged(late=("5", "8"), killed=(killed,)))
    runs = Judged(late=())
    trials = run_to_end(search_of(*line), runs)["trials"]
    states = ["complete"] * 5 + ["complete", "pruned", "pruned", "complete"]
    assert [trial["state"] for trial in trials] == states
    assert [trial["value"] for trial in trials][5::3] == [loss_of(5, 1), loss_of(8, 1)]
    assert [trial["why"] is None for trial in trials] == [state == "complete" for state in states]
    assert not runs.began


def test_a_trial_whose_folder_cannot_be_written_for_a_moment_is_pruned_later(tmp_path, monkeypatch):
    class Watched(Judged):
        """Runs that are judged in two turns before they end."""

        turns = 0

        def wait(self):
            self.turns += 1
            self.looked = self.turns % 3 == 0
            return super().wait() if self.looked else []

    stale = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))]

    def write(path, value):
        if stale and path == RunDir(path.parent).pruned:
            raise stale.pop()
        write_json(path, value)

    monkeypatch.setattr("orchestrator.search.search.write_json", write)
    script = line_of(tmp_path / "found")[len(SPACE) :]
    line = [word for word in script if not word.startswith("sweep.search")]
    grid = ("job.arguments.lr=0.3,0.31,0.32,0.33,0.34,5", "job.arguments.k=1", "sweep.search=grid")
    runs = Watched(late=())
    trials = run_to_end(search_of(*grid, "sweep.prune=median", *line), runs)["trials"]
    assert [trial["state"] for trial in trials] == [*["complete"] * 5, "pruned"]
    assert (stale, runs.stopped) == ([], [tmp_path / "found" / "5"])


def test_a_trial_that_cannot_be_read_for_a_moment_is_followed_on(tmp_path, monkeypatch):
    class Caught(AtOnce):
        def wait(self):
            raise Killed

    line = line_of(tmp_path / "found", "sweep.trials=1")
    caught = Caught()
    with pytest.raises(Killed):
        run_to_end(search_of(*line), caught)
    [task] = caught.running
    write_result(task.run, task.point.config.job["arguments"])
    runs = TrialRuns(search_of(*line), QUIET)
    runs.follow(task)
    monkeypatch.setattr(class_of("local"), "status_interval_s", 0.0)
    aside = task.run.plan.rename(tmp_path / "plan")
    task.run.plan.symlink_to(aside)
    assert runs.wait() == []
    task.run.plan.unlink()
    aside.rename(task.run.plan)
    [ended] = runs.wait()
    assert ended.task is task
    task.run.plan.unlink()
    task.run.plan.symlink_to(aside)
    runs.follow(task)
    assert runs.wait() == []
    monkeypatch.setattr("orchestrator.search.search.READ_PATIENCE_S", 0.0)
    assert [ended.task for ended in runs.wait()] == [task]


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_records_that_cannot_be_read_for_a_moment_are_read_later(tmp_path, kind):
    class Unreadable(AtOnce):
        """Runs whose metrics cannot be read in the first of three turns."""

        turns = 0

        def wait(self):
            [run] = [task.run for task in self.running]
            aside = tmp_path / "metrics.jsonl"
            self.turns += 1
            if self.turns == 1:
                aside.write_text(json.dumps({"update": 0, "loss": 0.25}) + "\n")
                if kind == "link":
                    run.metrics.symlink_to(aside)
                else:
                    run.metrics.mkdir()
                return []
            if self.turns == 2:
                run.metrics.unlink() if kind == "link" else run.metrics.rmdir()
                aside.rename(run.metrics)
                return []
            return super().wait()

    line = line_of(tmp_path / "found", "sweep.trials=1", "sweep.prune=median")
    search = search_of(*line)
    [trial] = run_to_end(search, Unreadable())["trials"]
    assert trial["state"] == "complete"
    study, _ = open_study(search)
    assert study.trials[0].intermediate_values == {0: 0.25}


def test_last_records_of_a_trial_are_awaited(tmp_path, monkeypatch):
    failures, really, states = [], os.open, searches.statuses

    class Recording(AtOnce):
        def wait(self):
            [run] = [task.run for task in self.running]
            run.metrics.write_text(json.dumps({"update": 0, "loss": 0.25}) + "\n")
            return super().wait()

    def begin_outage(runs):
        known = states(runs)
        failures[:] = [1, 1]
        return known

    def fail(path, *flags, **more):
        if Path(os.fsdecode(path)).name == "metrics.jsonl" and failures and failures.pop():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return really(path, *flags, **more)

    search = search_of(*line_of(tmp_path / "found", "sweep.trials=1", "sweep.prune=median"))
    monkeypatch.setattr(searches, "statuses", begin_outage)
    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr("orchestrator.rundir.files.READ_POLL_S", 0.01)
    [trial] = run_to_end(search, Recording())["trials"]
    assert trial["state"] == "complete"
    assert not failures
    study, _ = open_study(search)
    assert study.trials[0].intermediate_values == {0: 0.25}


def test_an_interrupt_ends_the_wait_for_last_records(tmp_path, monkeypatch):
    """It is forwarded to running trials by the loop that waits here."""
    tries = []

    class Unanswered(Tail):
        def lines(self):
            tries.append(self)
            if len(tries) == 2:
                monkeypatch.setattr(interrupts, "count", 1)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    search = search_of(*line_of(tmp_path / "found", "sweep.trials=1", "sweep.prune=median"))
    monkeypatch.setattr(searches, "Tail", Unanswered)
    monkeypatch.setattr("orchestrator.rundir.files.READ_POLL_S", 0.01)
    monkeypatch.setattr("orchestrator.rundir.files.READ_PATIENCE_S", 1.0)
    [trial] = run_to_end(search, AtOnce())["trials"]
    assert trial["state"] == "complete"
    assert len(tries) == 2


@pytest.mark.parametrize("killed", [False, True])
def test_trials_that_end_together_are_one_query_of_the_scheduler(tmp_path, monkeypatch, killed):
    """In its outage each query may take a minute."""
    queries, really = [], searches.statuses

    class Together(AtOnce):
        def wait(self):
            ended = [result for _ in range(3) for result in super(Together, self).wait()]
            if killed:
                raise Killed
            return ended

    def count(runs):
        queries.append(list(runs))
        return really(queries[-1])

    line = line_of(tmp_path / "found", "sweep.trials=3")
    monkeypatch.setattr(searches, "statuses", count)
    if killed:
        with pytest.raises(Killed):
            run_to_end(search_of(*line), Together(most=3))
        assert not queries
    runs = AtOnce() if killed else Together(most=3)
    trials = run_to_end(search_of(*line), runs)["trials"]
    assert "open" not in {trial["state"] for trial in trials}
    assert [len(query) for query in queries] == [3]


def test_an_outage_that_lasts_is_awaited_for_one_trial(tmp_path, monkeypatch):
    tries = {}

    class Unanswered(Tail):
        def lines(self):
            tries[self] = tries.get(self, 0) + 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    line = ("job.arguments.lr=0.3,0.31,0.32", "job.arguments.k=1", "sweep.search=grid")
    script = line_of(tmp_path / "found")[len(SPACE) :]
    words = [word for word in script if not word.startswith("sweep.search")]
    monkeypatch.setattr(searches, "Tail", Unanswered)
    monkeypatch.setattr("orchestrator.rundir.files.READ_POLL_S", 0.01)
    monkeypatch.setattr("orchestrator.rundir.files.READ_PATIENCE_S", 0.1)
    trials = run_to_end(search_of(*line, *words), AtOnce())["trials"]
    assert [trial["state"] for trial in trials] == ["complete"] * 3
    first, *others = tries.values()
    assert first > 1
    assert others == [1, 1]


def test_a_trial_that_is_in_progress_all_the_same_has_no_result_yet(tmp_path):
    class Held(AtOnce):
        """Runs that are said to have ended once before they do."""

        followed = 0

        def wait(self):
            task = self.running[0]
            if self.followed:
                return super().wait()
            self.held = locked(task.run)
            self.held.__enter__()
            return [PointResult(task=self.running.pop(0), exit_code=0)]

        def follow(self, task):
            self.held.__exit__(None, None, None)
            self.followed += 1
            self.running.append(task)

    runs = Held()
    line = ("job.arguments.lr=0.3,0.4", "job.arguments.k=1", "sweep.search=grid")
    script = line_of(tmp_path / "found")[len(SPACE) :]
    words = [word for word in script if not word.startswith("sweep.search")]
    trials = run_to_end(search_of(*line, *words), runs)["trials"]
    assert [trial["state"] for trial in trials] == ["complete"] * 2
    assert runs.followed == 1


def test_a_damaged_journal_and_a_folder_of_other_runs_are_refused(tmp_path):
    line = line_of(tmp_path / "found", "sweep.trials=2")
    run_to_end(search_of(*line))
    journal = tmp_path / "found" / "search.journal"
    first, *rest = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([first[:-9] + "\n", *rest]))
    with pytest.raises(RunFolderError, match=r"search\.journal is damaged"):
        run_to_end(search_of(*line))
    journal.unlink()
    with pytest.raises(ConfigError, match="no trials of a search"):
        run_to_end(search_of(*line))
