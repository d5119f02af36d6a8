"""Requirements on every cluster, tested by the commands that users type.

    class TestMine(ClusterSuite):
        @pytest.fixture
        def cluster(self):
            return ["cluster.kind=mine", "cluster.options.hosts=[a,b]"]

The fixture gives the overrides that choose it, for two nodes of up to two ranks each, whose ranks
see pytest's temporary folder. torch has to be installed, and the cluster's package where a new
process finds it. A run that continues alone (`Cluster.attended` is False) is followed by
`run.watch=true`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.clusters.api import class_of, cluster_of
from orchestrator.config.command_line import quote_for_hydra
from orchestrator.config.composer import compose
from orchestrator.engine.conformance import expect
from orchestrator.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_STOPPED
from orchestrator.rundir.checkpoints import folder_of
from orchestrator.rundir.folder import RunDir
from orchestrator.testing.trial_program import INTERVAL_S

WAIT_S = 600.0
LAUNCHER_GONE_S = 15.0
SILENT_S = 10 * INTERVAL_S
TRAINED = (
    "job._target_=orchestrator.testing.trial_job.LineJob",
    "job.pause_s=0.05",
    "tracker=none",
    "transport=gloo",
    "accumulation.global_batch=8",
    "accumulation.steps=2",
    "train.updates=100000",
)


class Started:
    """A running launch on two nodes of one rank each, in its own folder."""

    def __init__(self, cluster: Sequence[str], folder: Path, *more: str) -> None:
        self.run, self.signs = RunDir(folder / "run"), folder / "signs"
        self.signs.mkdir(exist_ok=True)
        self._output = folder / "output"
        run_dir = f"run.dir={quote_for_hydra(str(self.run.path))}"
        where = ("cluster.nodes=2", "cluster.ranks_per_node=1", run_dir)
        self._command("orchestrator.launch", *cluster, *where, "run.watch=true", *more)

    @classmethod
    def program(cls, cluster: Sequence[str], folder: Path, act: str, *more: str) -> Started:
        """Start the trial program, whose ranks only live and perhaps fail."""
        command = f"-m,orchestrator.testing.trial_program,{folder / 'signs'},{act}"
        job = ("job=program", f"job.command=[{command}]", "job.style=plain")
        return cls(cluster, folder, *job, *more)

    def _command(self, module: str, *arguments: str) -> None:
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def resume(self, *overrides: str) -> None:
        """Start it again, with the same output."""
        self._command("orchestrator", "resume", str(self.run.path), *overrides)

    def cancel(self, *options: str) -> None:
        """Cancel the run as from another shell."""
        arguments = ["orchestrator", "cancel", *options, str(self.run.path)]
        subprocess.run(
            [sys.executable, "-m", *arguments],
            check=True,
            timeout=WAIT_S,
            stdout=subprocess.DEVNULL,
        )

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def ends_with(self, code: int, *, within_s: float = 0.0) -> None:
        """Wait for the launcher's end; no rank is left then, or `within_s` of it."""
        try:
            status = self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._give_up(f"the launch has not ended after {WAIT_S:g} s")
        if status != code:
            raise AssertionError(f"exit code {status} where {code} is due:\n{self.output}")
        expect(self._silent_within(within_s), True, "all ranks have ended with the launcher")

    def trains(self) -> None:
        """Wait until an update is done."""
        self._until(lambda: self.run.metrics.exists() and self.run.metrics.stat().st_size > 0)

    def lives(self) -> None:
        """Wait until the program of every rank runs."""
        self._until(lambda: len(self._beats()) == 2)

    def _until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > until or self.process.poll() is not None:
                self._give_up("no rank came to work")
            time.sleep(0.05)

    def _give_up(self, why: str) -> NoReturn:
        """Clean up after a cluster that may leave more processes than the launcher."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        raise AssertionError(f"{why}:\n{self.output}")

    def _silent_within(self, most_s: float) -> bool:
        """Return whether every process of a rank ends within that time."""
        until = time.monotonic() + most_s
        while True:
            before = self._beats()
            time.sleep(SILENT_S)
            if self._beats() == before:
                return True
            if time.monotonic() > until:
                return False

    def _beats(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in sorted(self.signs.glob("rank-?"))}

    def reports(self) -> dict[int, Any]:
        """Return each rank's own report of where it is."""
        paths = sorted(self.signs.glob("*.json"))
        return {int(p.stem[5:]): json.loads(p.read_text(encoding="utf-8")) for p in paths}

    def result(self) -> dict[str, Any]:
        result = self.run.read_result()
        if result is None:
            raise AssertionError(f"{self.run.result} was not written:\n{self.output}")
        return result


def _blamed(started: Started, rank: int) -> str:
    """Return the cause, once the run failed with the expected culprit."""
    result = started.result()
    expect(result["state"], "failed", "state of the run")
    culprit = result["culprit"] or {}
    expect(culprit.get("rank"), rank, "rank that is blamed")
    expect(culprit["node"], started.reports()[rank]["node"], "node that is blamed")
    return str(culprit["cause"])


class ClusterSuite:
    """Tests of one kind of cluster; see the module."""

    def test_a_request_is_a_value_and_writes_nothing(
        self, cluster: Sequence[str], tmp_path: Path
    ) -> None:
        config = compose([*cluster, "job=digits", "cluster.nodes=2", "cluster.ranks_per_node=1"])
        run = tmp_path / "run"
        first, second = (cluster_of(config).request(run, 0) for _ in range(2))
        expect(first, second, "the same request twice")
        expect((first.nodes, first.ranks_per_node, first.run), (2, 1, run), "what is requested")
        expect(run.exists(), False, "a folder for a request that was only made")

    def test_every_rank_has_its_node_local_rank_and_environment(
        self, cluster: Sequence[str], tmp_path: Path
    ) -> None:
        more = ("cluster.ranks_per_node=2", "cluster.environment.TRIAL=seen")
        started = Started.program(cluster, tmp_path, "end", *more)
        started.ends_with(EXIT_FINISHED)
        reports = started.reports()
        expect(started.result()["state"], "finished", "state of the run")
        expect([reports[rank]["local_rank"] for rank in range(4)], [0, 1, 0, 1], "local ranks")
        nodes = [reports[rank]["node"] for rank in range(4)]
        expect((nodes[0], nodes[2]), (nodes[1], nodes[3]), "node of both of its ranks")
        expect(len(set(nodes)), 2, "nodes with names of their own")
        expect(
            {report["mark"] for report in reports.values()},
            {"seen"},
            "cluster.environment in ranks",
        )
        expect(started.run.ranks_with_logs(), [0, 1, 2, 3], "ranks with logs")

    def test_a_rank_that_fails_is_named_with_its_own_message(
        self, cluster: Sequence[str], tmp_path: Path
    ) -> None:
        started = Started.program(cluster, tmp_path, "raise")
        started.ends_with(EXIT_FAILED)
        cause = _blamed(started, 1)
        expect("the trial was asked to fail" in cause, True, f"the rank's own message in {cause!r}")

    def test_a_rank_that_is_killed_is_named(self, cluster: Sequence[str], tmp_path: Path) -> None:
        started = Started.program(cluster, tmp_path, "kill")
        started.ends_with(EXIT_FAILED)
        _blamed(started, 1)

    def test_a_rank_that_exits_with_code_0_during_training_is_named(
        self, cluster: Sequence[str], tmp_path: Path
    ) -> None:
        started = Started(cluster, tmp_path, *TRAINED, "job.leaving=1")
        started.ends_with(EXIT_FAILED)
        culprit = started.result()["culprit"] or {}
        expect(culprit.get("rank"), 1, "rank that is blamed, not one that missed it")

    def test_a_cancelled_run_stops_at_a_boundary_and_resumes_from_there(
        self, cluster: Sequence[str], tmp_path: Path
    ) -> None:
        started = Started(cluster, tmp_path, *TRAINED)
        started.trains()
        started.cancel()
        started.ends_with(EXIT_STOPPED)
        stopped = started.result()
        expect(stopped["state"], "stopped", "state of the run")
        kept = folder_of(started.run.checkpoints, stopped["updates"])
        expect(kept.is_dir(), True, f"{kept.name} among the checkpoints")
        started.resume(f"train.updates={stopped['updates'] + 2}")
        started.ends_with(EXIT_FINISHED)
        expect(started.result()["updates"], stopped["updates"] + 2, "updates after the resume")

    def test_a_run_that_is_cancelled_at_once_leaves_no_process(
        self, cluster: Sequence[str], tmp_path: Path
    ) -> None:
        started = Started.program(cluster, tmp_path, "live")
        started.lives()
        started.cancel("--now")
        attended = class_of(compose(cluster).cluster.kind).attended
        started.ends_with(EXIT_INTERRUPTED if attended else EXIT_FAILED)
        # A launcher knows that its user asked for it. A scheduler may not.
        state = started.result()["state"]
        expect(state, "stopped" if attended else "failed", "state of the run")

    def test_no_rank_outlives_a_launcher_that_holds_the_run(
        self, cluster: Sequence[str], tmp_path: Path
    ) -> None:
        if not class_of(compose(cluster).cluster.kind).attended:
            return  # a run that continues alone has no launcher to outlive
        started = Started.program(cluster, tmp_path, "live")
        started.lives()
        os.killpg(started.process.pid, signal.SIGKILL)
        started.ends_with(-signal.SIGKILL, within_s=LAUNCHER_GONE_S)
