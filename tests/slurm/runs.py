"""Submit small runs to the development cluster and wait for what must happen.

They train without torch, whose import is most of the cost of a start. A test that concerns torch,
too, passes TINY in `more`.
"""

import json
import shutil
import time
from pathlib import Path

from slurm.dev_cluster import DevCluster
from slurm.jobs import job_processes
from tests.helpers import LIGHT, LIMIT_S, call, records, result, until
from tests.hold import Hold
from tests.refusals import mentions

SHAPE = ("cluster.nodes=2", "cluster.ranks_per_node=1")
BATCH = (LIGHT, "tracker=none", "accumulation.global_batch=32", "accumulation.steps=4")
QUIET = {"COLUMNS": "200"}
LONG = ("train.updates=600", "train.checkpoint_every=5")
"""Settings of `submit_long` and of the undisturbed run that the fixture `digest` comes from."""


def overrides(cluster: DevCluster, run: Path, *more: str) -> list[str]:
    """Return the command line; `more` wins."""
    words = ["+cluster=slurm_dev", f"cluster.slurm_conf={cluster.slurm_conf}", *BATCH, *SHAPE]
    table = {word.split("=", 1)[0]: word for word in (*words, f"run.dir={run}", *more)}
    return list(table.values())


def submit(cluster: DevCluster, run: Path, *more: str) -> str:
    """Submit a tiny run and return its job id."""
    call(*overrides(cluster, run, *more), **QUIET, code=0)
    return job_of(run)


def hold_of_long(run: Path) -> Hold:
    return Hold(run.with_name(f"{run.name}-hold")).hold_before(599)


def submit_long(cluster: DevCluster, run: Path, *more: str) -> Hold:
    """Submit a run of `LONG` that trains slowly and does not end before its hold is released."""
    hold = hold_of_long(run)
    submit(cluster, run, *LONG, "job.pause_s=0.05", hold.override, *more)
    return hold


def job_of(run: Path) -> str:
    return json.loads((run / "handle.json").read_text())["job_id"]


def release(cluster: DevCluster, run: Path) -> None:
    """Start a job now that was submitted for later."""
    cluster.command("scontrol", "update", f"jobid={job_of(run)}", "StartTime=now")


def verb(*arguments, **more):
    return call(*arguments, module="orchestrator", **QUIET, **more)


def status(run: Path) -> dict:
    done = verb("status", run, "--json", code=0)
    return json.loads(done.stdout)[0]


def queue_state(cluster: DevCluster, job: str) -> str:
    return cluster.command("squeue", "-h", "-a", "-t", "all", "-j", job, "-o", "%T").strip()


def nodes_of(cluster: DevCluster, job: str) -> list[str]:
    listed = cluster.command("squeue", "-h", "-j", job, "-o", "%N").strip()
    return cluster.command("scontrol", "show", "hostnames", listed).split() if listed else []


def over(cluster: DevCluster, job: str) -> bool:
    return queue_state(cluster, job) not in (
        "PENDING",
        "RUNNING",
        "COMPLETING",
        "SIGNALING",
        "REQUEUED",
        "CONFIGURING",
        "RESV_DEL_HOLD",  # until it starts, after `scontrol release`, too
    )


def accounted(cluster: DevCluster, job: str) -> str:
    """Return a job's final state from sacct, which is some seconds behind."""

    def ended() -> str | None:
        rows = cluster.command("sacct", "-nPX", "-j", job, "-o", "State,End").split()
        state = rows[-1].split("|")[0] if rows else ""  # a job that lost a node has two
        return state if state not in ("", "RUNNING", "PENDING", "REQUEUED") else None

    return until(ended, what=f"sacct's final state of job {job}")


def wait_for_update(run: Path, update: int, attempt: int = 0, timeout_s: float = LIMIT_S) -> float:
    """Wait until `update` or a later one of this attempt or a later one is recorded."""
    until(
        lambda: any(r["update"] >= update and r["attempt"] >= attempt for r in records(run)[-9:]),
        timeout_s,
        f"update {update} of attempt {attempt} in {run.name}",
    )
    return time.monotonic()


def wait_over(cluster: DevCluster, run: Path, timeout_s: float = LIMIT_S) -> dict:
    """Wait for the job's end and return result.json."""
    until(lambda: over(cluster, job_of(run)), timeout_s, f"the end of {run.name}")
    return result(run)


def first_records(run: Path) -> dict[int, dict]:
    """Return the first update's record of each attempt."""
    found: dict[int, dict] = {}
    for record in records(run):
        found.setdefault(record["attempt"], record)
    return found


def occupy(cluster: DevCluster, script: str, *options: str) -> str:
    """Submit another person's job."""
    return cluster.command(
        "sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", *options, f"--wrap={script}"
    ).strip()


def processes_of_job(cluster: DevCluster, job: str) -> list[int]:
    """Return the pids of a job's processes on all nodes."""
    return [p.pid for p in job_processes(cluster.layout) if str(p.job) == job]


def reference(folder: Path, *more: str) -> str:
    """Return the digest of the weights that a local run of the same plan ends with."""
    table = {word.split("=", 1)[0]: word for word in (*BATCH, *SHAPE, *more)}
    call(*table.values(), f"run.dir={folder}", "-q", code=0)
    return result(folder)["weights_sha256"]


def wrapped_sbatch(folder, steps):
    """Write an `sbatch` that runs these shell commands where a job is submitted."""
    wrapper = folder / "bin" / "sbatch"
    wrapper.parent.mkdir(parents=True)
    asked = '[ "$1" = --parsable ] || exec sbatch "$@"'  # as a dry run
    real = [step.replace("sbatch", shutil.which("sbatch")) for step in (asked, *steps)]
    wrapper.write_text("\n".join(["#!/bin/bash", *real, ""]))
    wrapper.chmod(0o755)
    return wrapper


def queued(cluster, folder):
    """Return the jobs and arrays in the queue whose script lies below a folder."""
    rows = (
        row.split("|") for row in cluster.command("squeue", "-h", "-a", "-o", "%F|%o").splitlines()
    )
    return {job for job, command in rows if command.startswith(str(folder))}


def printed(output, names):
    """Return whether one line of a command's output has these names, as in `mentions`."""
    return any(mentions(line, names) for line in output.splitlines())


def log(folder, rank):
    return (folder / "run" / "logs" / f"rank-{rank:05d}.log").read_text()
