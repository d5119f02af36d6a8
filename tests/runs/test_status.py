"""`status` of folders that are damaged or another user's: a row each, and none hides another."""

import errno
import json
import os
import random
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.clusters.api import State
from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.report.run_tables import print_closing
from orchestrator.report.status_tables import print_run, print_status
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics
from orchestrator.rundir.outcome import result_from_records
from orchestrator.rundir.status import from_folder
from orchestrator.runs.cancel import cancel_sweep
from orchestrator.runs.follow import OutputOptions, resolve_submissions
from orchestrator.runs.logs import read_log
from orchestrator.runs.status import expand, statuses
from orchestrator.sweep.sweep import resume_sweep
from tests.run_folders import Screen, maker, record, result

NOBODY = 65534
WRONG = (None, True, -1, 2.5, "text", [], {}, [1], {"a": 1}, "x" * 5000)


def make_run(path, **more):
    """A finished run of two attempts and a warning."""
    note = {
        "attempt": 1,
        "why": "a node was lost",
        "resumed_from": 4,
        "lost_updates": 2,
        "lost_micro_steps": 1,
        "restarts": 0,
    }
    ended = result(updates=12, restarts=[note])
    lines = [record(n, attempt=1) for n in range(12)]
    run = maker(path.parent)(path.name, "train.updates=12", records=lines, ended=ended, **more)
    run.begin_attempt()
    write_json(run.restart(1), note)
    warned = {"sentence": "slow", "kind": "slow", "rank": 1, "time": 1.0}
    run.warnings(1, 0).write_text(json.dumps(warned) + "\n")
    return run


def shown(found):
    screen = Screen(width=100)
    print_status(found, screen, Path("/"))
    for status in found:
        print_run(status, screen)
    return screen.text


def test_a_sound_run_is_told_in_full(tmp_path):
    [status], _ = statuses([make_run(tmp_path / "a")])
    assert (status.state, status.updates, status.total) == ("finished", 12, 12)
    assert (status.loss, status.learning_rate) == (1 / 12, 0.001)
    assert (status.attempts, status.restarts, status.lost_updates) == (2, 1, 2)
    assert status.warnings == ["rank 1: slow"]
    text = shown([status])
    assert "warning: rank 1: slow" in text
    assert "a node was lost" in text


def test_what_is_left_takes_as_long_as_updates_took_with_all_that_is_between_them(tmp_path):
    run = make_run(tmp_path / "run")
    run.result.unlink()
    write_json(run.plan, run.read_plan() | {"updates": 20})
    assert from_folder(run).seconds_left == 8.0, "an update a second, of which it is busy for half"


@pytest.mark.parametrize("follow", [False, True])
def test_a_rank_without_a_log_is_refused_and_what_the_batch_script_wrote_is_shown(tmp_path, follow):
    run = make_run(tmp_path / "run")
    with pytest.raises(RunFolderError, match="no log of rank 7; no rank began"):
        list(read_log(run, 7, follow=follow))
    run.batch_log.write_text("no such partition\n")
    assert "".join(read_log(run, None, follow=follow)) == "no such partition\n"
    run.rank_log(0).symlink_to("/etc/passwd")
    with pytest.raises(RunFolderError, match="is a link"):
        list(read_log(run, None, follow=follow))


def test_a_point_that_ends_while_its_sweep_is_cancelled_hides_nothing(tmp_path, monkeypatch):
    run = make_run(tmp_path / "sweep" / "0")
    running = replace(from_folder(run), state="running")
    monkeypatch.setattr("orchestrator.runs.cancel.statuses", lambda _: ([running], []))
    with pytest.raises(ClusterError, match=r"none of the 1 point in .* is queued or running"):
        cancel_sweep(tmp_path / "sweep", now=False)


def test_a_lost_run_that_a_person_resumed_was_resumed_not_restarted(tmp_path):
    run = make_run(tmp_path / "run")
    assert from_folder(run).restarts == 1
    write_json(run.resumes, {"resumes": [{"attempt": 1}]})
    assert from_folder(run).restarts == 0
    screen = Screen(width=100)
    ended = result_from_records(run, State.FINISHED)
    print_closing(ended, read_metrics(run.metrics), run.path, screen)
    assert re.search(r"resumed +1 time; 2 updates done again", screen.text)
    assert "restarts" not in screen.text


def test_of_a_cause_of_many_lines_a_list_has_the_first(tmp_path):
    run = make_run(tmp_path / "a")
    culprit = {"rank": 1, "node": "n", "cause": "one\ntwo", "log_tail": []}
    write_json(run.result, {**run.read_result(), "state": "failed", "culprit": culprit})
    screen = Screen(width=100)
    print_status(statuses([run])[0], screen, tmp_path)
    assert screen.text.endswith("a: rank 1 on n: one\n")


def files_of(run):
    return [
        run.plan,
        run.result,
        run.submission,
        run.metrics,
        run.restart(1),
        run.warnings(1, 0),
        run.handle,
        run.attempts,
        run.attempt(1),
        run.config,
    ]


def damage(path, dice):
    """Put something else in a file's place."""
    content = path.read_bytes() if path.is_file() else b"{}"
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    match dice.randrange(9):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(path)
        case 2:
            path.write_bytes(content[: dice.randrange(len(content) + 1)])
        case 3:
            path.write_bytes(dice.randbytes(200))
        case 4:
            path.write_text("[" * 100_000)
        case 5:
            path.write_text(json.dumps(dice.choice(WRONG)))
        case 6:
            path.write_bytes(content.decode("utf-8").encode("utf-16"))
        case _:
            lines = content.split(b"\n") if path.suffix == ".jsonl" else [content]
            path.write_bytes(b"\n".join(retyped(line, dice) for line in lines))


def retyped(line, dice):
    """One value of a JSON table replaced by one of another type."""
    try:
        value = json.loads(line)
    except ValueError:
        return line
    if isinstance(value, dict) and value:
        value[dice.choice(sorted(value))] = dice.choice(WRONG)
    return json.dumps(value).encode()


@pytest.mark.parametrize("seed", range(4))
def test_no_damage_hides_a_run_or_ends_status(tmp_path, seed):
    dice = random.Random(seed)
    sound = make_run(tmp_path / "sound")
    expected, _ = statuses([sound])
    for number in range(25):
        hurt = RunDir(tmp_path / f"hurt-{number}")
        shutil.copytree(sound.path, hurt.path)
        for path in dice.sample(files_of(hurt), dice.choice([1, 1, 2])):
            if path.parent.is_dir():
                damage(path, dice)
        found, _ = statuses([hurt, sound])
        assert len(found) == 2
        assert found[1:] == expected
        assert str(hurt.path) in shown(found).replace("\n", "")
        json.dumps([status.to_json() for status in found])
        shutil.rmtree(hurt.path)


def test_a_damaged_run_says_which_file_and_why(tmp_path):
    run = make_run(tmp_path / "a")
    run.result.write_text('{"state": ')
    [status], _ = statuses([run])
    assert status.state == "damaged"
    assert "result.json is damaged" in status.reason
    assert "damaged" in shown([status])


@pytest.mark.parametrize(
    ("number", "failures", "state", "reads"),
    [
        (errno.ESTALE, 1, "finished", 2),
        (errno.EIO, 2, "finished", 3),
        (errno.EIO, 1000, "damaged", None),
        (errno.EACCES, 1000, "private", 1),
    ],
)
def test_a_file_that_cannot_be_read_for_a_moment_is_read_again(
    tmp_path, monkeypatch, number, failures, state, reads
):
    run, count, really = make_run(tmp_path / "a"), [0], os.open

    def fail(path, *flags, **more):
        if str(path) == str(run.plan):
            count[0] += 1
            if count[0] <= failures:
                raise OSError(number, os.strerror(number), str(path))
        return really(path, *flags, **more)

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr("orchestrator.rundir.files.GLANCE_S", 60.0 if failures < 1000 else 0.2)
    [status], _ = statuses([run])
    assert status.state == state
    assert count[0] == reads if reads else count[0] > 1


@pytest.mark.parametrize("content", ["", "{", '{"kind": "slurm"}', '{"elements": {"..": "1"}}'])
def test_status_of_a_damaged_submission_file(tmp_path, content):
    run = make_run(tmp_path / "sweep" / "3", cluster="slurm")
    RunDir(tmp_path / "sweep").submitting.write_text(content)
    said, unknown = resolve_submissions([run])
    assert said == []
    assert "submitting.json is damaged" in unknown[run.path]
    assert unknown[run.path].endswith("then remove the file")


@pytest.fixture
def foreign_runs(tmp_path):
    """A folder of runs in which one is private to another user than this process then is."""
    below = Path(tempfile.mkdtemp(prefix="runs-"))
    below.chmod(0o755)
    for name in ("mine", "theirs"):
        make_run(below / name)
    if os.geteuid() == 0:
        shutil.chown(below / "mine", NOBODY)
        for path in (below / "mine").rglob("*"):
            shutil.chown(path, NOBODY)
        os.seteuid(NOBODY)
    else:
        (below / "theirs").chmod(0)
    yield below
    if os.getuid() == 0:
        os.seteuid(0)
    (below / "theirs").chmod(0o700)
    shutil.rmtree(below)


def test_another_users_run_is_a_private_row_among_the_others(foreign_runs):
    found, _ = statuses(expand([foreign_runs]))
    assert [(s.folder.name, s.state) for s in found] == [
        ("mine", "finished"),
        ("theirs", "private"),
    ]
    text = shown(found)
    assert "private" in text
    assert "its owner" in text
    [alone], _ = statuses(expand([foreign_runs / "theirs"]))
    assert alone.state == "private"


def test_an_unreadable_slurm_conf_is_a_sentence(foreign_runs, monkeypatch):
    run = RunDir(foreign_runs / "mine")
    conf = foreign_runs / "theirs" / "slurm.conf"
    monkeypatch.setenv("SLURM_CONF", str(conf))
    run.result.unlink()
    write_json(run.handle, {"kind": "slurm", "job_id": "7", "slurm_conf": str(conf)})
    [status], sentences = statuses([run])
    assert status.state == "unknown"
    assert sentences == [f"cluster.slurm_conf={conf}: it cannot be read: Permission denied"]


def test_a_point_that_lost_its_configuration_is_not_hidden(tmp_path):
    runs = [make_run(tmp_path / "sweep" / name) for name in "01"]
    runs[0].config.unlink()
    found, _ = statuses(expand([tmp_path / "sweep"]))
    assert [status.folder for status in found] == [run.path for run in runs]
    assert (found[0].state, "no config.yaml" in found[0].reason) == ("damaged", True)
    with pytest.raises(RunFolderError, match=r"nothing was started: .*no config\.yaml"):
        resume_sweep(tmp_path / "sweep", runs, OutputOptions(console=Screen()))


def test_the_points_of_a_sweep_come_in_the_order_of_their_numbers(tmp_path):
    for name in ("10", "2", "0", "other"):
        make_run(tmp_path / "sweep" / name)
    found, _ = statuses(expand([tmp_path / "sweep"]))
    assert [status.folder.name for status in found] == ["0", "2", "10", "other"]
