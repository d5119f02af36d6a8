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
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from slurm import breaking
from slurm.dev_cluster import DevCluster

SCRIPT = r"its batch script was (killed|sent SIG\w+)"
STOPPED = r"asked to stop|stopped before it began"
ANY_END = rf"{SCRIPT}|{STOPPED}|it ended without a message"
AWAY_S = 8.0


@dataclass(kw_only=True)
class Scene:
    """Where a fault happens: a cluster, the run's folder and job, and chance."""

    cluster: DevCluster
    run: Path
    job: str
    ranks: int
    chance: random.Random
    verb: Callable[..., object]
    notes: dict[str, str] = field(default_factory=dict[str, str])

    def any_rank(self) -> int:
        return self.chance.randrange(self.ranks)

    def nodes(self) -> list[str]:
        listed = self.cluster.command("squeue", "-h", "-j", self.job, "-o", "%N").strip()
        return self.cluster.command("scontrol", "show", "hostnames", listed).split()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind.

    Attributes:
        do: does it; raises nothing that means "too late", which `chaos` sees by the run's end.
        why: pattern of the restart's cause; None when the attempt goes on as if nothing had been.
        ends: the state in which it leaves a run that `resume` must finish; None: it goes on itself.
        alone: it breaks the cluster, so nothing else may run beside it.
        late: it makes sense after the run's end too.
    """

    do: Callable[[Scene], None]
    why: str | None = None
    ends: str | None = None
    alone: bool = False
    late: bool = False


def _kill_rank(scene: Scene) -> None:
    rank = scene.any_rank()
    breaking.signal_rank(scene.cluster, scene.job, rank, signal.SIGKILL)
    scene.notes["why"] = rf"rank {rank} on n\d .*killed by signal 9"


def _term_rank(scene: Scene) -> None:
    breaking.signal_rank(scene.cluster, scene.job, scene.any_rank(), signal.SIGTERM)


def _kill_script(scene: Scene) -> None:
    breaking.kill_batch_script(scene.cluster, scene.job)


def _signal_srun(number: signal.Signals) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        script = psutil.Process(breaking.batch_script(scene.cluster, scene.job))
        srun = [child for child in script.children() if child.name() == "srun"]
        srun[0].send_signal(number)

    return do


def _scancel(*options: str) -> Callable[[Scene], None]:
    return lambda scene: _command(scene, "scancel", *options, scene.job)


def _requeue(scene: Scene) -> None:
    _command(scene, "scontrol", "requeue", scene.job)


def _command(scene: Scene, *words: str) -> None:
    scene.cluster.command(*words)


def _preempt(scene: Scene) -> None:
    _command(
        scene, "sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", "-p", "high", "-N4",
        "--exclusive", "--wrap=true",
    )  # fmt: skip


def _node_down(scene: Scene) -> None:
    node = scene.chance.choice(scene.nodes())
    breaking.set_node_down(scene.cluster, node)


def _node_empty(scene: Scene) -> None:
    """End the tasks and step daemon of a node that is not the batch script's."""
    breaking.kill_jobs(scene.cluster, scene.nodes()[-1])


def _node_dark(scene: Scene) -> None:
    breaking.crash_node(scene.cluster, scene.nodes()[-1])


def _away(stop: Callable[[DevCluster], None]) -> Callable[[Scene], None]:
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


def _cancel(scene: Scene) -> None:
    scene.verb("cancel", scene.run)


def _cancel_and_requeue(scene: Scene) -> None:
    """Cancel and requeue: a requeue must not undo the user's cancel."""
    scene.verb("cancel", scene.run)
    _requeue(scene)


def _cancel_now(scene: Scene) -> None:
    scene.verb("cancel", scene.run, "--now")


NODE = r"node n\d (failed|stopped answering)"
FAULTS: dict[str, Fault] = {
    "kill a rank": Fault(do=_kill_rank, why=r"rank \d|before the first update"),
    "SIGTERM to a rank": Fault(do=_term_rank, why=STOPPED),
    "kill the batch script": Fault(do=_kill_script, why=SCRIPT, late=True),
    "kill srun": Fault(do=_signal_srun(signal.SIGKILL), why=r"srun was"),
    "SIGTERM to srun": Fault(do=_signal_srun(signal.SIGTERM), why=r"srun was|stopped before"),
    "scancel --full -s TERM": Fault(do=_scancel("--full", "-s", "TERM"), why=ANY_END),
    "scancel --batch -s USR2": Fault(do=_scancel("--batch", "-s", "USR2"), why=ANY_END),
    "scancel -s USR2": Fault(do=_scancel("-s", "USR2"), why=STOPPED),
    "scontrol requeue": Fault(do=_requeue, why=rf"requeued|{ANY_END}", late=True),
    "preempt": Fault(do=_preempt, why=r"preempted|it ended without a message", alone=True),
    "node set down": Fault(do=_node_down, why=rf"{NODE}|requeued|{ANY_END}", alone=True),
    "processes of a node vanish": Fault(do=_node_empty, why=NODE),
    "a node goes dark": Fault(do=_node_dark, why=rf"{NODE}|rank \d", alone=True),
    "no controller": Fault(do=_away(breaking.stop_controller), alone=True, late=True),
    # Meanwhile SLURM cannot ask its nodes, and may take one for failed.
    "no munge": Fault(
        do=_away(breaking.stop_munge), why=rf"{NODE}|requeued", alone=True, late=True
    ),
    "no accounting": Fault(do=_away(breaking.stop_accounting), alone=True, late=True),
    "no controller, and a rank killed": Fault(
        do=_away_and_kill, why=r"rank \d|before the first update", alone=True
    ),
    "cancel": Fault(do=_cancel, ends="stopped"),
    "cancel, then requeue": Fault(do=_cancel_and_requeue, ends="stopped"),
    "cancel --now": Fault(do=_cancel_now, ends="cancelled"),
    "scancel": Fault(do=_scancel(), ends="cancelled"),
}
