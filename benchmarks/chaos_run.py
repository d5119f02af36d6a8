"""One disturbed run of `chaos`: submit, break at the moment drawn, wait for the end, look at it."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos_faults import FAULTS, Fault, Scene
from benchmarks.measure import wait_for
from slurm.dev_cluster import DevCluster
from slurm.errors import DevClusterError

ROOT = Path(__file__).resolve().parent.parent
MOMENTS = ("start", "window", "checkpoint", "last", "after")
UPDATES, EVERY, PAUSE_S, RANKS = 40, 5, 0.04, 2
PLAN = (
    "job._target_=tests.tiny_job.Tiny", "tracker=none", "accumulation.global_batch=32",
    "accumulation.steps=4", "cluster.nodes=2", "cluster.ranks_per_node=1",
    f"train.updates={UPDATES}", "run.survive=false",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A run of the harness: faults one after another, each with its moment and its own chance."""

    faults: tuple[tuple[str, str], ...]
    seed: int

    def __str__(self) -> str:
        return ", then ".join(f"{kind} ({moment})" for kind, moment in self.faults)


@dataclass(kw_only=True)
class Outcome:
    """What came of one: `wrong` is empty where all is as it should be. Times in seconds."""

    draw: Draw
    wrong: list[str] = field(default_factory=list[str])
    noticed_s: list[float] = field(default_factory=list[float])
    resumed_s: list[float] = field(default_factory=list[float])
    scheduler_s: list[float] = field(default_factory=list[float])
    redone: int = 0


def _call(module: str, *words: object) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, words)], env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip


def _must(module: str, *words: object) -> str:
    done = _call(module, *words)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}")
    return done.stdout


def _records(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [record for line in lines if "loss" in (record := json.loads(line))]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


class Disturbed:
    """One run under its faults."""

    def __init__(self, cluster: DevCluster, folder: Path, draw: Draw, expected: str) -> None:
        self._cluster, self._run, self._draw, self._expected = cluster, folder, draw, expected
        self._chance = random.Random(draw.seed)  # noqa: S311  # it has to repeat
        self.outcome = Outcome(draw=draw)
        self._causes: list[str] = []  # patterns of what the faults so far may be called

    def play(self) -> Outcome:
        """Submit, disturb, wait for the end, look at everything."""
        partition = "low" if any(kind == "preempt" for kind, _ in self._draw.faults) else "main"
        _must(
            "orchestrator.launch", "+cluster=slurm_dev", *PLAN, f"run.dir={self._run}",
            f"cluster.slurm_conf={self._cluster.slurm_conf}", f"cluster.partition={partition}",
            f"train.checkpoint_every={EVERY}", f"job.pause_s={PAUSE_S}",
            "cluster.heartbeat_timeout_s=5", "run.max_restarts=3",
        )  # fmt: skip
        try:
            for kind, moment in self._draw.faults:
                self._disturb(FAULTS[kind], kind, moment)
            self._look_at_the_end()
        except (TimeoutError, RuntimeError, DevClusterError) as error:
            self.outcome.wrong.append(str(error))
        return self.outcome

    @property
    def _job(self) -> str:
        return str(_json(self._run / "handle.json")["job_id"])

    def _state(self) -> dict[str, Any]:
        return json.loads(_must("orchestrator", "status", self._run, "--json"))[0]

    def _queue(self) -> str:
        query = ("squeue", "-h", "-a", "-t", "all", "-j", self._job, "-o", "%T")
        return self._cluster.command(*query).strip()

    def _over(self) -> bool:
        try:
            return self._queue() in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        except DevClusterError:
            return False

    def _held(self) -> bool:
        """Return whether SLURM holds the job, since a node still had its last start."""
        query = ("squeue", "-h", "-a", "-j", self._job, "-o", "%r")
        try:
            return "requeued held" in self._cluster.command(*query)
        except DevClusterError:
            return False

    def _let_go(self) -> None:
        """Release the job, as a user would who sees that it is held; it ends at once if its run has
        ended.
        """
        self._state()
        if self._held():
            self._cluster.command("scontrol", "release", self._job)

    def _attempt(self) -> int:
        return max((r["attempt"] for r in _records(self._run)), default=-1)

    def _await(self, moment: str) -> None:
        if moment == "start":
            wait_for(lambda: self._queue() == "RUNNING" or self._over(), "the start")
            time.sleep(self._chance.uniform(0.0, 3.0))
            return
        if moment == "after":
            wait_for((self._run / "result.json").exists, "the result")
            return
        least = {
            "window": self._chance.randrange(3, UPDATES // 2),
            "checkpoint": EVERY * self._chance.randrange(1, 4) - 1,
            "last": UPDATES - 3,
        }[moment]
        reached = self._attempt()
        after = max((r["update"] for r in _records(self._run)), default=-1)
        least = max(least, after + 2) if moment != "last" and reached > 0 else least
        wait_for(
            lambda: any(r["update"] >= least for r in _records(self._run)[-3:]) or self._over(),
            f"update {least}",
        )
        time.sleep(self._chance.uniform(0.0, 4 * PAUSE_S) if moment == "window" else 0.0)

    def _disturb(self, fault: Fault, kind: str, moment: str) -> None:
        self._await(moment)
        before, restarts = self._attempt(), len(list(self._run.glob("attempts/*/restart.json")))
        scene = Scene(
            cluster=self._cluster, run=self._run, job=self._job, ranks=RANKS, chance=self._chance,
            verb=lambda *words: _must("orchestrator", *words),
        )  # fmt: skip
        at = time.time()
        ended_before = (self._run / "result.json").exists()
        try:
            fault.do(scene)
        except (DevClusterError, RuntimeError, IndexError):
            if not self._over() and not (self._run / "result.json").exists() and moment != "start":
                raise
            return  # it ended before the fault could reach it
        finally:
            self._cluster.up()
        if fault.ends is not None:
            self._resume(fault.ends)
            return
        wait_for(
            lambda: self._attempt() > before or self._over() or self._held(),
            f"what follows from {kind}",
        )
        if self._held():
            self._let_go()
        if self._over() and not (self._run / "result.json").exists():
            self._state()  # does what the batch script could not do any more
            wait_for(
                lambda: (self._run / "result.json").exists() or not self._over(), "the next look"
            )
        self._measure(at, before, restarts, kind, scene, fault, ended_before)

    def _resume(self, expected: str) -> None:
        wait_for(self._over, "the end of the job")
        found = self._state()["state"]
        if found not in (expected, "finished"):
            self.outcome.wrong.append(f"it should be {expected}, but is {found}")
        if found != "finished":
            _must("orchestrator", "resume", self._run)

    def _measure(
        self, at: float, before: int, restarts: int, kind: str, scene: Scene, fault: Fault,
        ended_before: bool,
    ) -> None:  # fmt: skip
        wait_for(lambda: self._attempt() > before or self._over(), f"the restart after {kind}")
        notes = sorted(self._run.glob("attempts/*/restart.json"))[restarts:]
        first = next((r["time"] for r in _records(self._run) if r["attempt"] > before), None)
        if not notes or first is None:
            return
        left = self._run / "attempts" / f"{max(0, before):03d}"
        signs = [p.stat().st_mtime for p in (*left.glob("departure.json"), *left.glob("failure-*"))]
        seen = [sign for sign in signs if sign >= at - 0.5]
        begun = notes[0].parent / "node-00000.json"
        if seen:
            self.outcome.noticed_s.append(max(0.0, min(seen) - at))
            self.outcome.scheduler_s.append(begun.stat().st_mtime - max(seen))
        self.outcome.resumed_s.append(first - at)
        why = str(_json(notes[0])["why"])
        # An earlier fault of the run may be what ended this attempt.
        self._causes += filter(None, (scene.notes.get("why"), fault.why))
        if not any(re.search(cause, why) for cause in self._causes) and not ended_before:
            self.outcome.wrong.append(f"after {kind} the cause is {why!r}")

    def _look_at_the_end(self) -> None:
        def over() -> bool:
            return (self._run / "result.json").exists() and self._over()

        wait_for(over, "the end")
        status, result = self._state(), _json(self._run / "result.json")
        if (status["state"], result["state"]) != ("finished", "finished"):
            self.outcome.wrong.append(f"it is {status['state']}: {status['reason']}")
        elif result["weights_sha256"] != self._expected:
            self.outcome.wrong.append("the weights differ")
        self.outcome.redone = sum(note["lost_updates"] for note in result["restarts"])
        wait_for(lambda: not self._processes(), f"the end of {self._processes()}", 20)

    def _processes(self) -> list[str]:
        return [
            f"{node}: {process.pid}"
            for node in self._cluster.node_names
            for found in [self._cluster.node_pids(node)]
            for process in (*found.step_daemons, *found.tasks)
            if str(process.job) == self._job
        ]


def undisturbed(folder: Path) -> str:
    """Return the digest of the same plan, run locally."""
    _must("orchestrator.launch", *PLAN, f"run.dir={folder}", "-q")
    return str(_json(folder / "result.json")["weights_sha256"])
