"""Submitting small runs to the development cluster, and watching for what must happen.

They train without torch, whose import is most of what a start costs the processors; TINY, in
`more`, is what tests say that are about torch as well.
"""

import json
import time
from pathlib import Path

from slurm.dev_cluster import DevCluster
from tests.helpers import LIGHT, call, records, until

SHAPE = ("cluster.nodes=2", "cluster.ranks_per_node=1")
BATCH = (LIGHT, "tracker=none", "accumulation.global_batch=32", "accumulation.steps=4")
QUIET = {"COLUMNS": "200"}


def overrides(cluster: DevCluster, run: Path, *more: str) -> list[str]:
    """The command line; what comes in `more` wins."""
    words = ["+cluster=slurm_dev", f"cluster.slurm_conf={cluster.slurm_conf}", *BATCH, *SHAPE]
    table = {word.split("=", 1)[0]: word for word in (*words, f"run.dir={run}", *more)}
    return list(table.values())


def submit(cluster: DevCluster, run: Path, *more: str) -> str:
    """Submit a tiny run; give its job id."""
    done = call(*overrides(cluster, run, *more), **QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    return job_of(run)


def job_of(run: Path) -> str:
    return json.loads((run / "handle.json").read_text())["job_id"]


def release(cluster: DevCluster, run: Path) -> None:
    """Let a job begin that was submitted for later."""
    cluster.command("scontrol", "update", f"jobid={job_of(run)}", "StartTime=now")


def verb(*arguments, **more):
    return call(*arguments, module="orchestrator", **QUIET, **more)


def status(run: Path) -> dict:
    done = verb("status", run, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)[0]


def queue_state(cluster: DevCluster, job: str) -> str:
    return cluster.command("squeue", "-h", "-a", "-t", "all", "-j", job, "-o", "%T").strip()


def nodes_of(cluster: DevCluster, job: str) -> list[str]:
    listed = cluster.command("squeue", "-h", "-j", job, "-o", "%N").strip()
    return cluster.command("scontrol", "show", "hostnames", listed).split() if listed else []


def over(cluster: DevCluster, job: str) -> bool:
    return queue_state(cluster, job) not in ("PENDING", "RUNNING", "COMPLETING", "SIGNALING",
                                             "REQUEUED", "CONFIGURING")  # fmt: skip


def accounted(cluster: DevCluster, job: str) -> str:
    """sacct's final word on a job; it is some seconds behind."""

    def ended() -> str | None:
        rows = cluster.command("sacct", "-nPX", "-j", job, "-o", "State,End").split()
        state = rows[-1].split("|")[0] if rows else ""  # a job that lost a node has two
        return state if state not in ("", "RUNNING", "PENDING", "REQUEUED") else None

    return until(ended, 20, f"sacct's last word on job {job}")


def wait_for_update(run: Path, update: int, attempt: int = 0, timeout_s: float = 90) -> float:
    """Wait until an update of this attempt, or a later one, is recorded; when that was seen."""
    until(
        lambda: any(r["update"] >= update and r["attempt"] >= attempt for r in records(run)[-9:]),
        timeout_s, f"update {update} of attempt {attempt} in {run.name}",
    )  # fmt: skip
    return time.monotonic()


def wait_over(cluster: DevCluster, run: Path, timeout_s: float = 120) -> dict:
    """Wait for the job's end; give result.json."""
    until(lambda: over(cluster, job_of(run)), timeout_s, f"the end of {run.name}")
    return json.loads((run / "result.json").read_text())


def first_records(run: Path) -> dict[int, dict]:
    """The first update's record of each attempt."""
    found: dict[int, dict] = {}
    for record in records(run):
        found.setdefault(record["attempt"], record)
    return found


def occupy(cluster: DevCluster, script: str, *options: str) -> str:
    """A job of somebody else's."""
    return cluster.command(
        "sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", *options, f"--wrap={script}"
    ).strip()


def processes_of_job(cluster: DevCluster, job: str) -> list[int]:
    """What is left of a job on any node."""
    return [
        p.pid
        for node in cluster.node_names
        for found in [cluster.node_pids(node)]
        for p in (*found.step_daemons, *found.tasks)
        if str(p.job) == job
    ]


def reference(folder: Path, *more: str) -> str:
    """The digest of the same plan's weights by a local run."""
    table = {word.split("=", 1)[0]: word for word in (*BATCH, *SHAPE, *more)}
    done = call(*table.values(), f"run.dir={folder}", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "result.json").read_text())["weights_sha256"]
