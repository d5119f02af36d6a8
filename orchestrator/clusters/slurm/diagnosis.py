"""Root cause of an attempt on SLURM, from the records of scheduler, agents, srun and script.

The finding of the agents' coordinator (`agent/root_cause.py`) is kept. It may be missing: srun
could not start the agents, they were killed with the node or the job, or the batch script ended
before. Then the workers' failure records remain, and the logs of srun and the script.
"""

from __future__ import annotations

import os
import re
import signal
import socket

from orchestrator.agent.root_cause import RAISED, TAIL_LINES, from_failure, tail
from orchestrator.clusters.slurm.scheduler import ScheduledJob
from orchestrator.config.program import is_program
from orchestrator.errors import describe_status
from orchestrator.rundir.files import is_full
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import NO_RESULT, Culprit, State, read_outcome
from orchestrator.rundir.restarts import read_departure
from orchestrator.rundir.srun_log import node_failure, task_exits

KILLED = 128 + signal.SIGKILL
SRUN_KILLED, SRUN_ENDED = "srun was killed", "srun was asked to end the ranks"
SRUN_FAILED = "srun could not start the agents in this allocation again"
AGENTS_KILLED = "its agents were killed"
SRUN_LOG_LINES = 400
EXCEPTION_LINES = 3
CANNOT_START = re.compile(
    rf"{RAISED.pattern}|.*(No such file or directory|[Pp]ermission denied|command not found)"
)
"""A line of batch.log with which a script ends that could not start something."""
PREFIX = "error: "  # the batch script's prefix for the reason it gives up
CAUSES = {
    "CANCELLED": "cancelled through the scheduler (scancel)",
    "TIMEOUT": "the time limit was reached; resume goes on from what was saved",
    "NODE_FAIL": "a node failed, and the job was not requeued",
    "OUT_OF_MEMORY": "out of memory, killed by the kernel",
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "the job's deadline passed",
    "PREEMPTED": "preempted, and not requeued",
    "GONE": "the scheduler has forgotten the job, and it left no result",
}


def describe_code(code: int | None) -> str:
    """Describe a shell's exit code.

    >>> describe_code(137), describe_code(1), describe_code(None)
    ('was killed by signal 9 (SIGKILL)', 'ended with code 1', 'ended')
    """
    if code is None:
        return "ended"
    return f"was {describe_status(128 - code)}" if code > 128 else f"ended with code {code}"


def describe_srun_end(run: RunDir, attempt: int) -> str | None:
    """Describe how srun was ended by a signal, which is no worker's fault; None if it was not."""
    log = "\n".join(tail(run.srun_log(attempt), SRUN_LOG_LINES))
    if "srun: Job step aborted" in log or "srun: forcing job termination" in log:
        return SRUN_ENDED
    return None if task_exits(log) else SRUN_KILLED


def describe_agents_end(run: RunDir, attempt: int) -> str | None:
    """Return a phrase if SIGKILL ended all agents at once, which is no worker's fault; else None.

    An agent that remained would have written the outcome.
    """
    exits = task_exits("\n".join(tail(run.srun_log(attempt), SRUN_LOG_LINES)))
    killed = {task_exit.rank for task_exit in exits if task_exit.killed}
    began = {int(path.stem.rpartition("-")[2]) for path in run.attempt(attempt).glob("node-*.json")}
    return AGENTS_KILLED if began and began <= killed else None


def culprit_of(
    run: RunDir, attempt: int, code: int | None = None, job: ScheduledJob | None = None
) -> Culprit:
    """Return the culprit of a failed attempt: by the first that names one, of scheduler, agents,
    workers, and srun or the batch script.

    Args:
        code: srun's exit code, as a shell gives it; None if it is not known.
        job: the ended job, where the batch script could not finalize the attempt.
    """
    if job is not None and (culprit := _of_job(run, attempt, job)):
        return culprit
    outcome = read_outcome(run, attempt)
    if outcome is not None and outcome.culprit is not None:
        return outcome.culprit
    failures = sorted(run.failures(attempt), key=lambda f: (f["secondary"], f["time"]))
    ended = node_failure(run, attempt) or describe_srun_end(run, attempt)
    if ended not in (None, SRUN_KILLED) and all(failure["secondary"] for failure in failures):
        log = tail(run.srun_log(attempt))
        return Culprit(rank=None, node="batch", cause=ended, log_tail=log)
    if failures:
        return from_failure(run, failures[0])
    if job is not None:
        return _of_script(run, job)
    if outcome is None:
        return _of_srun(run, attempt, code)
    return Culprit(rank=None, node="batch", cause=NO_RESULT)


def _of_job(run: RunDir, attempt: int, job: ScheduledJob) -> Culprit | None:
    """Return the cause that the job's state or its script's last lines name, if they do."""
    log = tail(run.batch_log)
    reported = next((s.removeprefix(PREFIX) for s in log[-1:] if s.startswith(PREFIX)), None)
    if cause := CAUSES.get(job.state) or reported:
        return Culprit(rank=None, node=job.nodes or "scheduler", cause=cause, log_tail=log)
    if (departure := read_departure(run, attempt)) is None:
        return None
    # Only ranks that stop write departure.json; a decision may follow a loss or a failure as well.
    left_in_order = run.departure(attempt).exists() and not departure.get("lost")
    end = "its ranks left in order" if left_in_order else "its attempt ended early"
    cause = (
        f"{end} ({departure['why']}), but the batch script {_how(job)} before it could hand the "
        "job back to the queue; resume goes on"
    )
    return Culprit(rank=None, node=departure.get("node") or "batch", cause=cause)


def _of_srun(run: RunDir, attempt: int, code: int | None) -> Culprit:
    """Blame the agent that srun names, else srun, else the script before it."""
    srun_log = tuple(line for line in tail(run.srun_log(attempt), SRUN_LOG_LINES) if line.strip())
    if not srun_log and not any(run.attempt(attempt).glob("node-*")):
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        how = f"{describe_code(code)} before srun began (cluster.preamble)"
        cause = f"the batch script on node {node} {how}"
        return Culprit(rank=None, node=node, cause=cause, log_tail=tail(run.batch_log))
    first = next(iter(task_exits("\n".join(srun_log))), None)
    if first is not None and (log := tail(run.node_log(f"node{first.rank}"))):
        written = [line.strip() for line in log if line.strip()]
        raised = [index for index, line in enumerate(written) if RAISED.match(line)]
        # an agent that could not begin: its last message, with an exception's lines
        lines = written[raised[-1] :][:EXCEPTION_LINES] if raised else written[-1:]
        error = " ".join(lines).removeprefix(PREFIX)
        reason = "" if first.killed else f": {error}"
        cause = f"the agent of node {first.node} {first.description}{reason}"
        return Culprit(rank=None, node=first.node, cause=cause, log_tail=log)
    own = [line for line in srun_log if not line.startswith("srun: error: ") or first is None]
    cause = f"srun {describe_code(code)}" + (f": {own[-1]}" if own else "")
    return Culprit(rank=None, node="batch", cause=cause, log_tail=srun_log[-TAIL_LINES:])


def _of_script(run: RunDir, job: ScheduledJob) -> Culprit:
    """Explain the end of a job of which nothing is known but how its script ended."""
    node, log = job.nodes or "scheduler", tail(run.batch_log)
    last = next((line.strip() for line in reversed(log) if line.strip()), "")
    quote = f" ({last})" if job.exit_code and CANNOT_START.match(last) else ""
    # exit signal 53 is slurmd's own: it could not open the output file
    if job.exit_signal == 53 or not (run.attempts_made() or quote):
        cause = (
            f"the job ended ({job.state}) before it could write anything: the run folder "
            f"{run.path} is probably not visible on {node}; keep runs on a shared file system"
        )
    else:
        script = (
            f": its batch script {_how(job)}{quote}" if job.exit_signal or job.exit_code else ""
        )
        full = "; the disk of the run folder is full" if is_full(run.path) else ""
        cause = f"the job ended ({job.state}) without a result{script}{full}"
    return Culprit(rank=None, node=node, cause=cause, log_tail=log)


def _how(job: ScheduledJob) -> str:
    if job.exit_signal:
        return f"was {describe_status(-job.exit_signal)}"
    return "ended" if job.exit_code is None else f"ended with code {job.exit_code}"


def recorded_end(run: RunDir) -> State | None:
    """Return the state in which the records of the latest attempt end the run, however its job
    ended; None if they leave that open.

    The batch script writes a program's result. The scheduler may have lost the job before that
    (`slurmctld -c`), or have killed the script.
    """
    attempt = run.latest_attempt
    handle = run.read_handle() or {}
    if attempt < int(handle.get("attempt", 0)):
        return None  # the job's own attempt never began
    outcome = read_outcome(run, attempt)
    if outcome is None or outcome.state is State.FAILED or outcome.lost is not None:
        return None
    if read_departure(run, attempt) is not None:
        return None
    if outcome.state is State.FINISHED and not is_program(run.read_config()["job"]):
        return None  # its rank 0 would have written the result
    return State.STOPPED if run.cancel.exists() else outcome.state


def diagnose(run: RunDir, job: ScheduledJob) -> tuple[State, Culprit | None]:
    """Return the state of a job that ended without a result, and the culprit of one that did not
    finish. Reads only.
    """
    if recorded_end(run) is State.FINISHED:
        return State.FINISHED, None
    state = State.STOPPED if job.state == "CANCELLED" else State.FAILED
    return state, culprit_of(run, run.latest_attempt, job=job)
