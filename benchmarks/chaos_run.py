"""One disturbed run of `chaos`: submit, break at the moment drawn, wait for the end, look at it."""

from __future__ import annotations

import random
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos_faults import FAULTS, Fault, Scene
from benchmarks.chaos_page import EVERY
from benchmarks.measure import TINY_PLAN, wait_for
from orchestrator.config.composer import compose
from orchestrator.errors import ClusterError, RunFailed
from orchestrator.rehearse.rehearsal import compare, until
from orchestrator.rehearse.rehearsed_run import RehearsalSpec, RehearsedRun, SlurmRun
from orchestrator.rundir.metrics import updates_of
from orchestrator.runs.status import statuses
from slurm.dev_cluster import DevCluster
from slurm.errors import DevClusterError
from slurm.jobs import job_processes

MOMENTS = ("start", "window", "checkpoint", "last", "after")
UPDATES, PAUSE_S = 40, 0.04
PLAN = (
    *TINY_PLAN,
    "cluster.ranks_per_node=1",
    f"train.updates={UPDATES}",
    "run.survive=false",
)
ON_SLURM = (
    "+cluster=slurm_dev",
    f"train.checkpoint_every={EVERY}",
    f"job.pause_s={PAUSE_S}",
    "cluster.heartbeat_timeout_s=5",
    "run.max_restarts=3",
)


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A run of the harness: faults one after another, each with its moment and its own chance."""

    faults: tuple[tuple[str, str], ...]
    seed: int

    def __str__(self) -> str:
        return ", then ".join(f"{kind} ({moment})" for kind, moment in self.faults)


@dataclass(kw_only=True)
class Outcome:
    """Outcome of one fault; `wrong` is empty if everything is right. Times in seconds."""

    draw: Draw
    wrong: list[str] = field(default_factory=list[str])
    noticed_s: list[float] = field(default_factory=list[float])
    resumed_s: list[float] = field(default_factory=list[float])
    scheduler_s: list[float] = field(default_factory=list[float])
    redone: int = 0


def spec_of(*overrides: str) -> RehearsalSpec:
    """Return the spec of runs of the plan, with more overrides."""
    given = (*PLAN, *overrides)
    return RehearsalSpec(config=compose(given), overrides=given, flags=(), kinds=(), notes=())


class Disturbed:
    """One run under its faults. `undisturbed`: the same plan, run locally."""

    def __init__(
        self, cluster: DevCluster, folder: Path, draw: Draw, undisturbed: RehearsedRun
    ) -> None:
        partition = "low" if any(kind == "preempt" for kind, _ in draw.faults) else "main"
        conf = f"cluster.slurm_conf={cluster.slurm_conf}"
        self._spec = spec_of(*ON_SLURM, conf, f"cluster.partition={partition}")
        self._run = SlurmRun(folder, self._spec)
        self._cluster, self._draw, self._undisturbed = cluster, draw, undisturbed
        self._chance = random.Random(draw.seed)  # noqa: S311  # it has to repeat
        self.outcome = Outcome(draw=draw)
        self._causes: list[str] = []  # patterns of what the faults so far may be called

    def play(self) -> Outcome:
        """Submit, disturb, wait for the end, look at everything."""
        try:
            self._run.launch()
            for kind, moment in self._draw.faults:
                self._disturb(FAULTS[kind], kind, moment)
            until(lambda: self._run.ended, self._run)
            self._look_at_the_end()
        except (TimeoutError, ClusterError, RunFailed, DevClusterError) as error:
            self.outcome.wrong.append(str(error))
            with suppress(ClusterError):
                self._run.end()
        return self.outcome

    def _attempt(self) -> int:
        return max((r["attempt"] for r in updates_of(self._run.records)), default=-1)

    def _await(self, moment: str) -> None:
        run = self._run
        if moment == "start":
            until(lambda: run.run.attempts_made() > 0 or run.ended, run)
            time.sleep(self._chance.uniform(0.0, 3.0))
            return
        if moment == "after":
            until(run.run.result.exists, run)
            return
        least = {
            "window": self._chance.randrange(3, UPDATES // 2),
            "checkpoint": EVERY * self._chance.randrange(1, 4) - 1,
            "last": UPDATES - 3,
        }[moment]
        if moment != "last" and self._attempt() > 0:
            least = max(least, run.current_update + 1)
        until(lambda: run.current_update > least or run.ended, run)
        time.sleep(self._chance.uniform(0.0, 4 * PAUSE_S) if moment == "window" else 0.0)

    def _disturb(self, fault: Fault, kind: str, moment: str) -> None:
        run = self._run
        self._await(moment)
        run.read_new()
        before, seen, at = self._attempt(), len(run.records), time.time()
        ended_before = run.run.result.exists()
        scene = Scene(cluster=self._cluster, run=run, chance=self._chance)
        try:
            fault.do(scene)
        except (DevClusterError, ClusterError, IndexError):
            if not run.ended and not run.run.result.exists() and moment != "start":
                raise
            return  # it ended before the fault could reach it
        finally:
            self._cluster.up()
        if fault.ends is not None:
            self._resume(fault.ends)
            return
        until(lambda: self._attempt() > before or run.ended, run)
        restarts = [r["restart"] for r in run.records[seen:] if "restart" in r]
        if not restarts:
            return
        self._measure(at, before)
        # An earlier fault of the run may be what ended this attempt.
        self._causes += filter(None, (scene.why, fault.why))
        why = str(restarts[0]["why"])
        if not any(re.search(cause, why) for cause in self._causes) and not ended_before:
            self.outcome.wrong.append(f"after {kind} the cause is {why!r}")

    def _resume(self, expected: str) -> None:
        until(lambda: self._run.ended, self._run)
        [found], _ = statuses([self._run.run])
        if found.state not in (expected, "finished"):
            self.outcome.wrong.append(f"it should be {expected}, but is {found.state}")
        if found.state != "finished":
            self._run.resume()

    def _measure(self, at: float, before: int) -> None:
        run = self._run.run
        left = run.attempt(max(0, before))
        names = ("departure.json", "decision.json", "failure-*")
        signs = [path.stat().st_mtime for name in names for path in left.glob(name)]
        seen = [sign for sign in signs if sign >= at - 0.5]
        begun = run.node_ranks(max(0, before) + 1, 0)
        if seen and begun.exists():
            self.outcome.noticed_s.append(max(0.0, min(seen) - at))
            self.outcome.scheduler_s.append(begun.stat().st_mtime - max(seen))
        first = next(r for r in updates_of(self._run.records) if r["attempt"] > before)
        self.outcome.resumed_s.append(first["time"] - at)

    def _look_at_the_end(self) -> None:
        run = self._run.run
        self._run.read_new()
        self.outcome.wrong += compare([], self._run, self._undisturbed, self._spec)
        [status], _ = statuses([run])
        if status.state != "finished":
            self.outcome.wrong.append(f"it is {status.state}: {status.reason}")
        restarts = (run.read_result() or {}).get("restarts", ())
        self.outcome.redone = sum(note["lost_updates"] for note in restarts)
        wait_for(lambda: not self._processes(), f"the end of {self._processes()}", 20)

    def _processes(self) -> list[str]:
        found = job_processes(self._cluster.layout)
        return [f"{one.node}: {one.pid}" for one in found if str(one.job) == self._run.job_id]
