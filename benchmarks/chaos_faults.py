"""The faults of `chaos`, each as one function that does it, and what a run must say of it then.

A fault happens to a run that trains on the development cluster. What follows is the same for all:
the run ends with the undisturbed weights, by itself or after `resume`; its restart has the cause
that `why` gives; no process and no job is left.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from orchestrator.rehearse.rehearsed_run import SlurmRun
from orchestrator.runs.cancel import cancel
from slurm import breaking
from slurm.dev_cluster import DevCluster

SCRIPT = r"its batch script was (killed|sent SIG\w+)"
STOPPED = r"asked to stop|stopped before it began"
ANY_END = rf"{SCRIPT}|{STOPPED}|it ended without a message"
AWAY_S = 8.0


@dataclass(kw_only=True)
class Scene:
    """The place of a fault: a cluster, a run on it, and random numbers. `why`: see `Fault`."""

    cluster: DevCluster
    run: SlurmRun
    chance: random.Random
    why: str | None = None

    @property
    def job(self) -> str:
        return self.run.job_id

    def signal_rank(self, number: signal.Signals) -> int:
        """Signal one of the run's two ranks; return which."""
        rank = self.chance.randrange(2)
        breaking.signal_rank(self.cluster, self.job, rank, number)
        return rank


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind.

    Attributes:
        do: does it; raises nothing that means "too late", which `chaos` sees by the run's end.
        why: pattern of the restart's cause; None if the attempt continues undisturbed.
        ends: the state in which it leaves a run that `resume` must finish; None: it goes on itself.
        late: it makes sense after the run's end too.
    """

    do: Callable[[Scene], object]
    why: str | None = None
    ends: str | None = None
    late: bool = False


def _kill_rank(scene: Scene) -> None:
    rank = scene.signal_rank(signal.SIGKILL)
    scene.why = rf"rank {rank} on n\d .*killed by signal 9"


def _fault_in_rank(number: signal.Signals) -> Callable[[Scene], object]:
    def do(scene: Scene) -> None:
        rank = scene.signal_rank(number)
        scene.why = rf"rank {rank} on n\d .*signal {int(number)}"

    return do


def _kill_agents(scene: Scene) -> None:
    """Kill the agents of all nodes, and with them all ranks; srun and the script live."""
    breaking.kill_agents(scene.cluster, scene.job)


def _pause_rank(scene: Scene) -> None:
    """Stop a rank, and let it continue before anything counts it as lost."""
    rank = scene.signal_rank(signal.SIGSTOP)
    time.sleep(2.0)
    breaking.signal_rank(scene.cluster, scene.job, rank, signal.SIGCONT)


def _stop_script(scene: Scene) -> None:
    """Stop the batch script's shell: what it waits for goes on, and then it has work to do."""
    psutil.Process(breaking.batch_script(scene.cluster, scene.job)).suspend()


def _clear_requeue_and_kill(scene: Scene) -> None:
    """Kill a rank of a job that an administrator has made not requeueable."""
    scene.cluster.command("scontrol", "update", f"jobid={scene.job}", "requeue=0")
    _kill_rank(scene)


def _signal_srun(number: signal.Signals) -> Callable[[Scene], object]:
    def do(scene: Scene) -> None:
        script = psutil.Process(breaking.batch_script(scene.cluster, scene.job))
        srun = [child for child in script.children() if child.name() == "srun"]
        srun[0].send_signal(number)

    return do


def _scancel(*options: str) -> Callable[[Scene], object]:
    return lambda scene: scene.cluster.command("scancel", *options, scene.job)


def _requeue(scene: Scene) -> None:
    scene.cluster.command("scontrol", "requeue", scene.job)


def _preempt(scene: Scene) -> None:
    scene.cluster.command(
        "sbatch",
        "--parsable",
        "--chdir=/tmp",
        "--output=/dev/null",
        "-p",
        "high",
        "-N4",
        "--exclusive",
        "--wrap=true",
    )


def _away(stop: Callable[[DevCluster], None]) -> Callable[[Scene], object]:
    def do(scene: Scene) -> None:
        stop(scene.cluster)
        time.sleep(AWAY_S)
        scene.cluster.up()

    return do


def _away_and_kill(scene: Scene) -> None:
    """Kill a rank while the scheduler does not answer."""
    breaking.stop_controller(scene.cluster)
    _kill_rank(scene)
    time.sleep(AWAY_S)
    scene.cluster.up()


def _cancel_and_requeue(scene: Scene) -> None:
    """Cancel and requeue: a requeue must not undo the user's cancel."""
    cancel(scene.run.run)
    _requeue(scene)


NODE = r"node n\d (failed|stopped answering)"
FAULTS: dict[str, Fault] = {
    "kill a rank": Fault(do=_kill_rank, why=r"rank \d|before the first update"),
    "SIGSEGV of a rank": Fault(
        do=_fault_in_rank(signal.SIGSEGV), why=r"rank \d|before the first update"
    ),
    "a rank pauses": Fault(do=_pause_rank),
    "kill all agents": Fault(do=_kill_agents, why=rf"{NODE}|agents?|srun"),
    "stop the batch script": Fault(do=_stop_script),
    "Requeue is cleared, and a rank killed": Fault(
        do=_clear_requeue_and_kill, why=r"rank \d|before the first update", ends="failed"
    ),
    "SIGTERM to a rank": Fault(do=lambda s: s.signal_rank(signal.SIGTERM), why=STOPPED),
    "kill the batch script": Fault(
        do=lambda s: breaking.kill_batch_script(s.cluster, s.job), why=SCRIPT, late=True
    ),
    "kill srun": Fault(do=_signal_srun(signal.SIGKILL), why=r"srun was"),
    "SIGTERM to srun": Fault(do=_signal_srun(signal.SIGTERM), why=r"srun was|stopped before"),
    "scancel --full -s TERM": Fault(do=_scancel("--full", "-s", "TERM"), why=ANY_END),
    "scancel --batch -s USR2": Fault(do=_scancel("--batch", "-s", "USR2"), why=ANY_END),
    "scancel -s USR2": Fault(do=_scancel("-s", "USR2"), why=STOPPED),
    "scontrol requeue": Fault(do=_requeue, why=rf"requeued|{ANY_END}", late=True),
    "preempt": Fault(do=_preempt, why=r"preempted|it ended without a message"),
    "node set down": Fault(
        do=lambda s: breaking.set_node_down(s.cluster, s.chance.choice(s.run.nodes())),
        why=rf"{NODE}|requeued|{ANY_END}",
    ),
    "processes of a node vanish": Fault(  # of another than the batch script's
        do=lambda s: breaking.kill_jobs(s.cluster, s.run.nodes()[-1]), why=NODE
    ),
    "kill a step daemon": Fault(
        do=lambda s: breaking.kill_step_daemon(s.cluster, s.job, s.chance.choice(s.run.nodes())),
        why=rf"{NODE}|srun was|rank \d",
    ),
    "a node goes dark": Fault(
        do=lambda s: breaking.crash_node(s.cluster, s.run.nodes()[-1]), why=rf"{NODE}|rank \d"
    ),
    "no controller": Fault(do=_away(breaking.stop_controller), late=True),
    # Meanwhile SLURM cannot ask its nodes, and may take one for failed.
    "no munge": Fault(do=_away(breaking.stop_munge), why=rf"{NODE}|requeued", late=True),
    "no accounting": Fault(do=_away(breaking.stop_accounting), late=True),
    "no controller, and a rank killed": Fault(
        do=_away_and_kill, why=r"rank \d|before the first update"
    ),
    "cancel": Fault(do=lambda s: cancel(s.run.run), ends="stopped"),
    "cancel, then requeue": Fault(do=_cancel_and_requeue, ends="stopped"),
    "cancel --now": Fault(do=lambda s: cancel(s.run.run, now=True), ends="cancelled"),
    "scancel": Fault(do=_scancel(), ends="cancelled"),
}
