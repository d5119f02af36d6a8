"""Programs under a scheduler: the code that was submitted, preemptions, the culprit."""

import json
import os
import random
import re
import signal
import sys
import time

import pytest

from tests.helpers import call, records, until
from tests.programs import ENDS, LOOP, QUICK, TORCH, WAITS, script
from tests.slurm import runs
from tests.slurm.runs import QUIET, SHAPE, job_of, release, status, verb, wait_over


def submit(slurm, folder, *more, program=("train.py",)):
    done = call(
        "run", "+cluster=slurm_dev", f"cluster.slurm_conf={slurm.slurm_conf}", *SHAPE,
        f"run.dir={folder / 'run'}", *more, "--", *program,
        module="orchestrator", cwd=folder, **QUIET,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def take_away(slurm, run, way):
    """By a requeue, or for a job that may have its nodes: each with KillWait or GraceTime to go."""
    if way == "requeue":
        slurm.command("scontrol", "requeue", job_of(run))
    else:
        other = runs.occupy(slurm, "true", "-p", "high", "-N", "4", "--exclusive")
        until(lambda: runs.over(slurm, other), 60, "the preempting job's end")


def log(folder, rank):
    return (folder / "run" / "logs" / f"rank-{rank:05d}.log").read_text()


PREEMPTED = f"""{QUICK}
import helper
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
frameworks_see = {{k: v for k, v in os.environ.items() if k.startswith(("SLURM_NT", "SLURM_PROC"))}}
print(json.dumps([attempt, helper.VERSION, frameworks_see, os.environ["SLURM_JOB_NAME"]]))
sys.stdout.flush()
def stop(number, frame):
    print("got", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
if attempt == "0":
{WAITS.replace(chr(10), chr(10) + "    ")}
"""


def test_a_preempted_program_gets_its_signal_and_the_code_that_was_submitted_runs_again(
    slurm, tmp_path
):
    script(tmp_path, PREEMPTED)
    helper = script(tmp_path, "VERSION = 'submitted'\n", "helper.py")
    submit(slurm, tmp_path, "+cluster.slurm_flags.begin=now+1hour")
    helper.write_text("VERSION = 'edited'\n")
    script(tmp_path, "raise SystemExit('edited')\n")
    release(slurm, tmp_path / "run")
    until(lambda: len(list(tmp_path.glob("here-*"))) == 2, what="the program")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "here-0").stat().st_mode & 0o777 == 0o666 & ~mask, "as the person has it"
    assert status(tmp_path / "run")["state"] == "running"
    slurm.command("scontrol", "requeue", job_of(tmp_path / "run"))
    result = wait_over(slurm, tmp_path / "run")
    assert (result["state"], len(result["restarts"])) == ("finished", 1)
    for rank in range(2):
        said = [json.loads(x) for x in log(tmp_path, rank).splitlines() if x.startswith("[")]
        assert said == [[a, "submitted", {}, "interactive"] for a in ("0", "1")]
        assert f"got {signal.SIGTERM.value}" in log(tmp_path, rank)
        assert "left running" not in log(tmp_path, rank), "the node's watcher is ours"


def test_a_torch_script_runs_and_a_killed_rank_of_it_is_named(slurm, tmp_path):
    """The second start: the first, by a shell script, trains to its end."""
    fails = "\nif '--die' in sys.argv and rank == 1:\n    os.kill(os.getpid(), 9)\ndist.barrier()\n"
    script(tmp_path, TORCH + fails + ENDS)
    script(tmp_path, f'#!/bin/sh\n{sys.executable} train.py "$@"\n', "train.sh", run=True)
    submit(slurm, tmp_path, program=("./train.sh",))
    assert wait_over(slurm, tmp_path / "run")["state"] == "finished"
    assert "final" in log(tmp_path, 1)
    (tmp_path / "run").rename(tmp_path / "first")
    submit(slurm, tmp_path, program=("train.py", "--die"))
    result = wait_over(slurm, tmp_path / "run")
    assert result["state"] == "failed"
    assert result["culprit"]["rank"] == 1
    assert "SIGKILL" in result["culprit"]["cause"]
    assert verb("status", tmp_path / "run").returncode == 0


TIMES = int(
    os.environ.get("PREEMPTIONS", "2")
)  # ten, by hand, take 137 s; each costs SLURM 13 s and us little


@pytest.mark.timeout(60 + 20 * TIMES)
def test_taken_away_at_random_moments_it_goes_on_from_its_own_checkpoint_to_the_same_end(
    slurm, tmp_path
):
    chance, updates, run = random.Random(TIMES), 100 + 150 * TIMES, tmp_path / "run"
    script(tmp_path, LOOP)
    submit(slurm, tmp_path, "cluster.partition=low", program=("train.py", str(updates)))
    ways = chance.choices(("requeue", "preempt"), k=TIMES)
    for attempt, way in enumerate(ways):
        runs.wait_for_update(run, 0, attempt)
        time.sleep(chance.uniform(0.0, 0.5))  # the moment is what is random here
        take_away(slurm, run, way)
    local = script(tmp_path, LOOP, "alone.py")
    alone = call(
        "run", *SHAPE, f"run.dir={tmp_path / 'local'}", "--", local, str(updates),
        module="orchestrator", cwd=tmp_path,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stdout + alone.stderr
    result = wait_over(slurm, run)
    assert (result["state"], len(result["restarts"])) == ("finished", TIMES)

    for rank in range(2):
        said = log(tmp_path, rank)
        began = [
            tuple(map(int, at)) for at in re.findall(r"attempt (\d+) goes on with (\d+)", said)
        ]
        assert [attempt for attempt, _ in began] == [*range(TIMES + 1)]
        starts = [first for _, first in began]
        assert starts == sorted(set(starts)), "each went on from what the one before it had saved"
        final = re.findall("^last .*", said, re.MULTILINE)[-1]
        assert final in (tmp_path / "local" / "logs" / f"rank-{rank:05d}.log").read_text()
    assert [record["update"] for record in records(run)] == [*range(updates)], "no gap, none twice"
    found = status(run)
    assert (found["restarts"], found["updates"]) == (TIMES, updates)
