"""The end of an attempt: requeue the job, or record the end of the run.

| function | caller |
|---|---|
| `finalize_in_job` | the batch script on the first node, outside any container, after srun |
| `finalize_without_script` | the coordinator, if the batch script was killed or lost |
| `finalize_ended_job` | its owner's `status`, or a `resume`, once the job ended without |

The agents' coordinator has written the outcome to `outcome.json`. The scheduler is queried first: a
job that was already requeued or cancelled must not be touched, and a script that outlived its
slurmd must not act for a restarted job. Then all three decide by `restart_or_end`.

A full disk may interrupt each of them at any write, after which it is repeated. So a restart is
recorded in `decision.json` by one write, and a repetition carries out what is recorded there.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.agent.links import Peer, Port, probe_ports
from orchestrator.agent.node_spec import published_agents, secret_of
from orchestrator.agent.topology import node_names, own_job_id
from orchestrator.clusters.api import Culprit
from orchestrator.clusters.slurm.decision import AttemptEnd, Decision, decide
from orchestrator.clusters.slurm.diagnosis import (
    CAUSES,
    KILLED,
    SRUN_ENDED,
    SRUN_FAILED,
    culprit_of,
    describe_agents_end,
    describe_srun_end,
    recorded_end,
)
from orchestrator.clusters.slurm.handle import is_of_another
from orchestrator.clusters.slurm.scheduler import (
    TIMEOUT_S,
    ScheduledJob,
    SchedulerDown,
    SlurmClient,
    UnreadableAnswer,
    queued,
    retry_unanswered,
)
from orchestrator.clusters.slurm.trust import client_of, read_handle
from orchestrator.config.program import is_program
from orchestrator.config.schema import notice_s
from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.notify import Notifier
from orchestrator.rundir.checkpoints import Fence, read_newest_attempt
from orchestrator.rundir.files import (
    await_disk_space,
    await_readable,
    is_own,
    read_json,
    read_text,
    write_atomically,
)
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.lock import locked
from orchestrator.rundir.outcome import (
    State,
    departure_note,
    read_outcome,
    write_result,
)
from orchestrator.rundir.restarts import (
    FRUITLESS,
    PROGRAM_LEAST_S,
    RestartKind,
    count_fruitless,
    describe_pause,
    grant_restart,
    left_of_pause_s,
    pause_before,
    record_restart,
)
from orchestrator.rundir.srun_log import REQUEUED_BY_OTHERS, STOP_CODES, failed_node, node_failure

log = logging.getLogger(__name__)

REQUEUED = frozenset({"COMPLETING", "PENDING"})
"""States of a job after its requeue: it ends first, and waits then."""
NOT_REQUEUED = "SLURM may not requeue the job (the site has cleared Requeue); resume goes on"
MARGIN_S = 90.0
"""SLURM sends its notice of a time limit up to a minute early, and checks limits twice a minute."""
REQUEUE_PATIENCE_S = 600.0
"""For a requeue that gets no answer, and for answers that cannot be read."""
POLL_S = 0.5
PAUSE_POLL_S = 1.0
REACH_S = 1.0
SILENT_PROBES = 3
"""In a row without an answer, after which agents have gone with their nodes."""
IN_PLACE = 3
"""Fruitless starts in one allocation, before the next is tried on other nodes."""


class Next(Enum):
    """Next step after an attempt: end of the run, requeue, or a new srun in this allocation; or
    nothing, since the job has ended or was started again meanwhile.
    """

    END = "end"
    NOTHING = "nothing"
    REQUEUE = "requeue"
    NEW_SRUN = "new srun"


def finalize_in_job(
    path: Path,
    attempt: int,
    code: int | None,
    stop_signal: str,
    is_stopped: Callable[[], object] = lambda: False,
    *,
    script_gone: str = "",
) -> Next:
    """Requeue the job, write the run's end, or request a new srun; return which.

    Args:
        code: srun's exit code; None if it is not known, since it died with the script.
        stop_signal: the first signal that the batch script got, or "".
        is_stopped: returns whether the batch script has got a stop signal since then.
        script_gone: why the batch script ended, if the coordinator acts for it.
    """
    run = RunDir(path)
    if Fence(run.newest_attempt, attempt).is_stale:
        return Next.NOTHING
    _await_agents(run, attempt)
    if run.read_result() is not None:
        return Next.END
    job_id = own_job_id(os.environ)
    client = SlurmClient()
    job = _await_answer(client, job_id)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    recorded = read_json(run.decision(attempt))
    departure = read_json(run.departure(attempt))
    if departure and not recorded and job and job.restarts == restarts + 1:
        # Something else has requeued the job already: only the reason is refined, then nothing
        # follows.
        refined = _refine(run, attempt, departure, job, restarts)
        record_restart(run, attempt, refined, RestartKind.REQUEUE)
    if job is None:  # lost by the controller (`slurmctld -c`), which starts it no more
        return Next.END if _write_recorded_end(run) else Next.NOTHING
    if job.restarts != restarts:
        return Next.NOTHING
    if not job.at_work and job.state not in ("COMPLETING", "CANCELLED"):
        return Next.NOTHING
    if recorded is not None:  # an earlier try was interrupted
        can_run_srun = job.state == "RUNNING" and not script_gone
        in_place = recorded["kind"] == RestartKind.NEW_SRUN.value and can_run_srun
    else:
        orderly = departure is not None
        departure = departure or _cut_short(run, attempt, code, stop_signal, job.nodes)
        outcome = read_outcome(run, attempt)
        cut_off = outcome is not None and outcome.state is not State.FINISHED
        # A killed script takes its ranks along, so its death is the reason unless ranks recorded
        # failures of their own.
        if script_gone and cut_off and (departure is not None or not run.failures(attempt)):
            departure = {**(departure or departure_note(script_gone)), "why": script_gone}
        daemons_listen = partial(_daemons_listen, client, job.nodes)
        in_place = not (orderly or script_gone or stop_signal) and _is_usable(
            run, attempt, job, code, daemons_listen
        )
    again = restart_or_end(
        run,
        attempt,
        job,
        departure=departure,
        culprit=lambda: culprit_of(run, attempt, code),
        restart=partial(_count_new_srun, run, is_stopped=is_stopped)
        if in_place
        else partial(_requeue, client, job, patience_s=REQUEUE_PATIENCE_S, tell=print_note),
        in_place=in_place,
        tell=print_note,
    )
    if not again:
        return Next.END
    return Next.NEW_SRUN if in_place else Next.REQUEUE


def _await_answer(client: SlurmClient, job_id: str) -> ScheduledJob | None:
    """Return the job. Raises `ClusterError` if the answer cannot be read.

    A scheduler that is down is asked without end: these nodes are no use to others meanwhile, and
    to exit would lose what is known. One whose answer cannot be read could give them to others.
    """
    unreadable_since: float | None = None

    def query() -> ScheduledJob | None:
        nonlocal unreadable_since
        try:
            return queued(client, [job_id]).get(job_id)
        except UnreadableAnswer as error:
            unreadable_since = unreadable_since or time.monotonic()
            if time.monotonic() - unreadable_since > REQUEUE_PATIENCE_S:
                raise ClusterError(str(error)) from error
            raise

    return retry_unanswered(query, patience_s=math.inf, tell=print_note)


def print_note(message: str) -> None:
    """Print to batch.log, or to the node's log if the coordinator acts for the script."""
    with contextlib.suppress(OSError):  # a full disk must not keep a job from its requeue
        print(message, flush=True)  # noqa: T201


def _requeue(
    client: SlurmClient,
    job: ScheduledJob,
    *,
    pause_s: float = 0.0,
    tell: Callable[[str], None],
    patience_s: float,
) -> None:
    """Return a job to the queue. Raises `ClusterError` if it is refused, or there is no answer.

    Args:
        pause_s: for which it waits there. SLURM keeps a start time that is in the future.
    """
    answer_lost = False

    def requeue() -> None:
        nonlocal answer_lost
        now = queued(client, [job.id]).get(job.id) if answer_lost else None
        if now and (now.restarts > job.restarts or now.state in REQUEUED - {job.state}):
            return  # it was accepted, though the answer did not come
        try:
            client.check_output("scontrol", "requeue", job.id)
        except SchedulerDown:
            answer_lost = True
            raise

    undone = f"it is not known whether job {job.id} is requeued"
    retry_unanswered(requeue, undone=undone, patience_s=patience_s, tell=tell)
    if pause_s:
        try:
            begins = f"StartTime=now+{math.ceil(pause_s)}"
            client.check_output("scontrol", "update", f"JobId={job.id}", begins)
        except ClusterError as error:
            tell(f"the next start does not wait: {error}")


def _await_agents(run: RunDir, attempt: int) -> None:
    """Wait for the end of agents that outlive a killed srun.

    The kernel may give the port of one that has ended to another process: an agent has to answer.
    """
    if run.outcome(attempt).exists():
        return
    peers = {peer.node: peer for peer in published_agents(run, attempt)}
    reported, silent, unanswered = False, 0, 0
    while not run.outcome(attempt).exists():
        ports = probe_ports(peers, REACH_S)
        accepting = {node: peers[node] for node, port in ports.items() if port is Port.OPEN}
        answers = probe_ports(accepting, REACH_S, secret_of(run, attempt)) if accepting else {}
        if Port.OPEN in answers.values():
            silent = unanswered = 0
            if not reported:
                print_note("srun has ended, but agents continue; waiting for them")
                reported = True
        elif Port.SILENT in answers.values():
            # An agent may be stopped, or wait for its disk, and then continue its ranks.
            silent, unanswered = 0, unanswered + 1
            limit_s = float(run.read_config()["cluster"]["hang_timeout_s"])
            # Probes are counted, since this process may have been suspended together with them.
            if unanswered * (REACH_S + POLL_S) >= limit_s:
                why = f"accepts connections, but has not answered for {limit_s:g} s"
                _note_ports(accepting, f"{why} (cluster.hang_timeout_s)")
                return
        else:
            silent += 1
            # Closed ports are certain; an answer may be lost on its way.
            if silent == SILENT_PROBES or {*ports.values()} <= {Port.CLOSED}:
                _note_ports(accepting, "is held by another process now")
                return
        time.sleep(POLL_S)


def _note_ports(peers: Mapping[int, Peer], why: str) -> None:
    """Note the agents that are no longer waited for, though their ports accept connections."""
    if peers:
        ports = ", ".join(f"{p.port} of node {node} ({p.address})" for node, p in peers.items())
        print_note(
            f"the agent's port {ports} {why}; the attempt is taken to have ended there "
            "(`ss -ltnp` on the node shows the process)"
        )


def _srun_restarts(run: RunDir, job_id: str) -> int:
    path = run.srun_restarts(job_id)
    return int(path.read_text("ascii")) if path.exists() else 0


def _count_new_srun(
    run: RunDir, *, pause_s: float = 0.0, is_stopped: Callable[[], object] = lambda: False
) -> None:
    """Count one more attempt of this job, for the script and `finalize_ended_job`. That is the last
    write of a finalization, so a repetition counts no attempt twice.

    Args:
        pause_s: for which it waits first; not once the run is cancelled.
        is_stopped: returns whether the job was asked to stop, which ends the wait, too.
    """
    waited_s = 0.0
    while waited_s < pause_s and not run.cancel.exists() and not is_stopped():
        time.sleep(PAUSE_POLL_S)
        waited_s += PAUSE_POLL_S
    job_id = own_job_id(os.environ)
    write_atomically(run.srun_restarts(job_id), f"{_srun_restarts(run, job_id) + 1}\n")


def _is_usable(
    run: RunDir,
    attempt: int,
    job: ScheduledJob,
    code: int | None,
    daemons_listen: Callable[[], bool] = lambda: False,
) -> bool:
    """Return whether the next attempt can begin in this allocation, by another srun.

    Not if the scheduler wants the nodes, one of them is suspect, or that was in vain before.
    """
    if job.state != "RUNNING" or _reason_to_stop(run, job, job.restarts):
        return False
    program = is_program(run.read_config()["job"])
    if job.requeue and count_fruitless(run, attempt, program=program) >= IN_PLACE:
        return False
    # The file is empty if srun ended by itself; text means that the script signalled it, so a node
    # may be stuck.
    finalizing = run.finalizing(attempt)
    ended_by_script = finalizing.exists() and read_text(finalizing)
    if (node_failure(run, attempt) or ended_by_script) and not daemons_listen():
        return False  # else only a process of the step, slurmstepd, say, has failed there
    outcome, peers = read_outcome(run, attempt), published_agents(run, attempt)
    if outcome is not None:
        blamed = outcome.culprit
        # A rank that was stopped, or sleeps in the kernel, may be its node's fault.
        if outcome.lost is not None and blamed is not None and blamed.rank is not None:
            return False
    elif not peers and code != KILLED:  # srun itself could not start the agents
        return False
    # Where nothing listens, the node's kernel answers.
    known = {peer.node: peer for peer in peers}
    return all(port is Port.CLOSED for port in probe_ports(known, REACH_S).values())


def _daemons_listen(client: SlurmClient, nodes: str) -> bool:
    """Return whether SLURM's daemon of each of these nodes accepts connections."""
    try:
        shown = client.check_output("scontrol", "--oneliner", "show", "nodes", nodes)
        usual = client.settings()["SlurmdPort"]  # shown for nodes with another one only
    except ClusterError as error:
        log.info("whether the daemons of %s listen is not known: %s", nodes, error)
        return False
    addresses = re.findall(r"\bNodeAddr=(\S+)", shown)
    ports = [
        re.search(r"\bPort=(\d+)", line) or re.fullmatch(r"(\d+)", usual)
        for line in shown.splitlines()
        if "NodeName=" in line  # a wrapper may print more
    ]
    if not addresses or len(addresses) != len(ports) or not all(ports):
        return False
    daemons = {
        index: Peer(address, int(port[1]), index)
        for index, (address, port) in enumerate(zip(addresses, ports, strict=True))
        if port is not None
    }
    return all(state is Port.OPEN for state in probe_ports(daemons, REACH_S).values())


def _cut_short(
    run: RunDir, attempt: int, code: int | None, stop_signal: str, nodes: str = ""
) -> dict[str, Any] | None:
    """Return the departure note of an attempt that stopped without a failure or an orderly end;
    else None.

    Args:
        code: srun's exit code; None if it is not known.
        nodes: of the job, in SLURM's notation.
    """
    names = node_names({"SLURM_JOB_NODELIST": nodes})
    outcome = read_outcome(run, attempt)
    if outcome is not None:
        missed, culprit = node_failure(run, attempt, names), outcome.culprit
        why = outcome.lost
        if why and missed and culprit is not None and culprit.rank is None:
            # Where srun misses a node's part of the step, it ends the others, whom agents miss.
            ended_others = describe_srun_end(run, attempt) == SRUN_ENDED
            if ended_others and culprit.node != failed_node(run, attempt, names):
                why = missed
        return departure_note(why, lost=True) if why else None
    if not all(failure["secondary"] for failure in run.failures(attempt)):
        return None
    if failed := node_failure(run, attempt, names):
        return departure_note(failed, lost=True)
    if code not in {*STOP_CODES, KILLED}:
        job_id = str((run.read_handle() or {}).get("job_id", "0"))
        began = any(run.attempt(attempt).glob("node-*.json"))
        # The allocation may have lost nodes since its first srun.
        in_vain = code and not began and _srun_restarts(run, job_id)
        return departure_note(SRUN_FAILED, lost=True) if in_vain else None
    if stop_signal:
        return departure_note(f"its batch script was sent SIG{stop_signal}")
    if code in STOP_CODES:
        return departure_note("stopped before it began")
    why = describe_srun_end(run, attempt) or describe_agents_end(run, attempt)
    return departure_note(why, lost=True) if why else None


def finalize_patiently(finalize: Callable[[], Next]) -> Next:
    """Finalize once the disk has room, and the file system lets the run's files be read.

    Raises:
        RunFolderError: one is damaged, or cannot be read for longer.
    """
    return await_readable(partial(await_disk_space, finalize, print_note), print_note)


def finalize_without_script(run: RunDir, attempt: int, why: str) -> None:
    """Do the batch script's work after it was killed or lost; end a job that would not end.

    Args:
        why: how the script ended, for people.
    """
    print_note("the batch script is gone; its part is done from here")
    try:
        finalize = partial(finalize_in_job, run.path, attempt, None, "", script_gone=why)
        if finalize_patiently(finalize) is Next.END:
            SlurmClient().check_output("scancel", own_job_id(os.environ))
    # No commands in a container, say: `status` does it.
    except (ClusterError, RunFolderError) as error:
        print_note(f"error: {error}")


def restart_or_end(
    run: RunDir,
    attempt: int,
    job: ScheduledJob,
    *,
    departure: dict[str, Any] | None,
    culprit: Callable[[], Culprit],
    restart: Callable[..., None],
    in_place: bool = False,
    tell: Callable[[str], None] = log.info,
) -> bool:
    """Restart the run, or write its end, by the attempt's records. A restart that is recorded
    already is carried out, unless the run was cancelled since, or the job cannot restart any more.

    Args:
        departure: the note of an attempt that left in order, that got a stop signal before it
            could, or whose node became silent; of no effect where a restart is recorded.
        culprit: returns who is to blame for a failure.
        restart: requeues the job, or counts a new srun in it; takes `pause_s`, if the start is to
            wait.
        in_place: the latter, which needs no requeue.
        tell: gets a line on each restart after a failure.

    Returns:
        Whether the run restarts.
    """
    if job.cancelled:
        cause = CAUSES["CANCELLED"]
        write_result(run, State.STOPPED, Culprit(rank=None, node="scheduler", cause=cause))
        return False
    outcome = read_outcome(run, attempt)
    program = is_program(run.read_config()["job"])
    recorded = read_json(run.decision(attempt))
    departure = recorded or departure
    kind = RestartKind.NEW_SRUN if in_place else RestartKind.REQUEUE
    end = AttemptEnd(
        state=None if outcome is None else outcome.state,
        began=any(run.attempt(attempt).glob("node-*.json")),
        departed=departure is not None,
        # Ranks that left in order may have done so for a loss, by the outcome.
        lost=departure is not None and bool(departure.get("lost") or (outcome and outcome.lost)),
        granted=recorded is not None,
        cancelled=run.cancel.exists(),
        may_restart=job.requeue or in_place,
        program=program,
    )
    decision = decide(end, partial(count_fruitless, run, attempt, program=program))
    why = "" if departure is None else str(departure["why"])
    if decision is Decision.STOP:
        write_result(run, State.STOPPED)
    elif decision is Decision.STOP_IN_QUEUE:
        write_result(run, State.STOPPED, why=f"{why}; {NOT_REQUEUED}")
    elif decision is Decision.END:
        assert end.state is not None  # noqa: S101  # `decide` ends an attempt by its state
        write_result(run, end.state)
    elif decision is Decision.GIVE_UP:
        cause = _describe_no_progress(run, attempt, why, lost=end.lost, program=program)
        write_result(run, State.FAILED, Culprit(rank=None, node="batch", cause=cause))
    elif decision is Decision.RESTART:
        assert departure is not None  # noqa: S101  # `decide` restarts only after a departure
        if recorded is None:
            recorded = _refine(run, attempt, departure, job, job.restarts)
        if recorded.get("kind") != kind.value:  # also if an ended job cannot start srun any more
            recorded = record_restart(run, attempt, recorded, kind)
        restart(pause_s=left_of_pause_s(recorded))
        return True
    else:
        return _judge_failure(run, attempt, culprit(), restart, tell, kind, end)
    return False


def _judge_failure(
    run: RunDir,
    attempt: int,
    culprit: Culprit,
    restart: Callable[..., None],
    tell: Callable[[str], None],
    kind: RestartKind,
    end: AttemptEnd,
) -> bool:
    """Restart a failed run if `run.max_restarts` allows that, else write its end; return which."""
    allowed = int(run.read_config()["run"].get("max_restarts", 0))
    first = int((run.read_handle() or {}).get("attempt", 0))
    most = allowed if end.may_restart else 0
    decision = grant_restart(run, attempt, culprit, first=first, most=most)
    if decision.restarts:
        pause = pause_before(run, attempt, decision.number)
        note = {**decision.note, **({"pause": pause} if pause else {})}
        record = record_restart(run, attempt, note, kind)
        tell("; ".join(filter(None, [decision.message, describe_pause(run)])))
        restart(pause_s=left_of_pause_s(record))
    else:
        remark = NOT_REQUEUED if end.departed else decision.message
        write_result(run, State.FAILED, culprit, remark=remark)
    return decision.restarts


def _refine(
    run: RunDir, attempt: int, departure: dict[str, Any], job: ScheduledJob, restarts: int
) -> dict[str, Any]:
    """Return the departure note, with the scheduler's reason if that is more precise."""
    why = departure.get("why")
    outcome = read_outcome(run, attempt)
    if outcome is None or outcome.lost is None:  # a loss needs no other reason
        why = _reason_to_stop(run, job, restarts) or why
    return {**departure, "why": why}


def _reason_to_stop(run: RunDir, job: ScheduledJob, restarts: int) -> str | None:
    configured_s = int(run.read_config()["cluster"]["signal_ahead_s"])
    ahead_s = notice_s(configured_s, run.read_submission().get("time_limit_s"))
    return stop_reason(job, time.time(), ahead_s, restarts)


def _describe_no_progress(run: RunDir, attempt: int, why: str, *, lost: bool, program: bool) -> str:
    """Describe that repeated starts made no progress: restarts would never end.

    Args:
        why: how this attempt was cut short.
        lost: by a loss, and by no stop.
    """
    began = f"{FRUITLESS} starts in a row were stopped before "
    began += f"they had run for {PROGRAM_LEAST_S:.0f} s" if program else "one update was done"
    if lost:
        return (
            f"{began}, the last because {why}; {run.srun_log(attempt)} may have more, and the "
            "site's administrators may know by whom"
        )
    return (
        f"{began}; give the job more time (cluster.time_min), less notice "
        f"(cluster.signal_ahead_s), or shorter updates (accumulation.steps)"
    )


def finalize_ended_job(run: RunDir, job: ScheduledJob) -> str | None:
    """Requeue an ended job if its ranks left in order, else write the run's end. Of a job that the
    scheduler does not know any more, write the end that the records of its attempt are sure of.

    Does nothing while the job lives, while another process holds the run, when its end is written,
    or if it is not ours to write.

    Args:
        job: the scheduler's latest answer, or the forgotten job; it is queried once more.

    Returns:
        A sentence if it was requeued.

    Raises:
        ClusterError: the scheduler does not answer.
        RunFolderError: the folder is damaged.
    """
    # An administrator's `status` must not leave files of theirs, or requeue another user's job.
    if not is_own(run.path) or not os.access(run.path, os.W_OK | os.X_OK):
        return None
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(run))
        except RunFolderError:  # its holder sees to it
            return None
        sentence = _finalize_locked(run, job)
        Notifier(run).send()
    return sentence


def _finalize_locked(run: RunDir, seen: ScheduledJob) -> str | None:
    handle = read_handle(run)
    client = client_of(run, handle.get("slurm_conf"))
    if str(handle["job_id"]) != seen.id:
        return None
    job = queued(client, [seen.id]).get(seen.id)
    list(run.path.iterdir())  # a network file system then looks for a result once more
    if run.read_result() is not None:
        return None
    if job is None or is_of_another(client, run, job):
        _write_recorded_end(run)
        return None
    if job.alive:
        return None
    attempt = int(handle["attempt"]) + job.restarts + _srun_restarts(run, seen.id)
    if read_newest_attempt(run.newest_attempt) > attempt:
        return None
    departure = read_json(run.departure(attempt))
    if departure is None:
        departure = _cut_short(run, attempt, None, "", job.nodes)
        killed = job.exit_signal and job.state == "FAILED" and not run.failures(attempt)
        if departure is None and killed:
            # SLURM ends the ranks of a script that a signal has killed; they may have had no time.
            departure = departure_note("its batch script was killed")
    again = restart_or_end(
        run,
        attempt,
        job,
        departure=departure,
        culprit=lambda: culprit_of(run, attempt, job=job),
        restart=partial(_requeue, client, job, patience_s=2 * TIMEOUT_S, tell=log.warning),
    )
    return (
        f"{run.path}: the batch script of job {seen.id} was gone before it could hand the job back "
        f"to the queue; that is done now"
        if again
        else None
    )


def _write_recorded_end(run: RunDir) -> bool:
    """Write the end that the latest attempt's records are sure of, if they are; return that."""
    end = recorded_end(run)
    if end is not None:
        write_result(run, end)
    return end is not None


def stop_reason(job: ScheduledJob, now: float, ahead_s: float, restarts: int = 0) -> str | None:
    """Return why the scheduler wants the job to stop; None if it does not show.

    Args:
        ahead_s: how long before a time limit the job is signalled.
        restarts: how often the job had been restarted when this start began.
    """
    if job.preempted_at is not None:
        return "preempted"
    if job.restarts > restarts:
        return REQUEUED_BY_OTHERS
    # The end time of an ended or ending job is no limit.
    left_s = job.ends_at - now if job.ends_at and job.at_work else None
    if job.reason == "TimeLimit" or (left_s is not None and left_s < ahead_s + MARGIN_S):
        return "near its time limit"
    return None
