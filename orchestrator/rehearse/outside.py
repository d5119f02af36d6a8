"""A run as one sees it from outside: its command, its processes, its folder. And how it is hurt."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.rehearse.asked import Asked
from orchestrator.rehearse.drawing import (
    FREEZE_RANK,
    KILL_LAUNCHER,
    KILL_NODE,
    KILL_TWO,
    STOP,
    Fault,
)
from orchestrator.report.metrics import Tail
from orchestrator.run_folder.rundir import RunDir


class Outside:
    """One run, started as a person would, in a session of its own."""

    def __init__(self, folder: Path, asked: Asked) -> None:
        self.run, self._asked = RunDir(folder), asked
        self._tail = Tail(self.run.metrics)
        self.records: list[dict[str, Any]] = []
        self._output = folder.with_suffix(".log")
        self._command: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------ its command

    def launch(self) -> None:
        where = () if self._asked.config_dir is None else ("--config-dir", self._asked.config_dir)
        given = (*self._asked.overrides, f"run.dir={self.run.path}")
        self._start("orchestrator.launch", *where, *given, "-q")

    def resume(self) -> None:
        self._start("orchestrator", "resume", str(self.run.path), "-q")

    def _start(self, module: str, *words: str) -> None:
        with self._output.open("ab") as output:
            self._command = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    @property
    def code(self) -> int | None:
        """The command's exit code; None while it runs."""
        assert self._command is not None  # noqa: S101  # it was started
        return self._command.poll()

    @property
    def last_words(self) -> str:
        """Of its command."""
        lines = self._output.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    def end(self) -> None:
        """End all of it: its processes end with the command."""
        if self._command is not None and self._command.poll() is None:
            self._command.kill()
            self._command.wait()

    # ------------------------------------------------------------------ its folder

    def look(self) -> list[dict[str, Any]]:
        """Lines of updates that are new."""
        new = [record for record in self._tail.read() if "loss" in record]
        self.records += new
        return new

    @property
    def finished(self) -> bool:
        return (self.run.read_result() or {}).get("state") == "finished"

    def noticed(self, since: float, attempt: int) -> bool:
        """Whether the run, in this attempt or by another one, has taken note of a loss."""
        record, generation = GenerationRecord(self.run.attempt(attempt)), 1
        while found := record.read(generation):
            if found["time"] >= since:
                return True
            generation += 1
        return self.run.attempts_made() > attempt + 1

    # ------------------------------------------------------------------ its processes

    def hurt(self, fault: Fault) -> tuple[str, set[int]]:
        """Do it. Gives in words what was done, and the ranks that are gone by it: none where that
        is for the launcher to bear, or all have ended.
        """
        if fault.kind in (STOP, KILL_LAUNCHER):
            assert self._command is not None  # noqa: S101  # it was started
            self._command.send_signal(signal.SIGTERM if fault.kind == STOP else signal.SIGKILL)
            return fault.kind, set()
        ranks, nodes = self._processes()
        if not ranks:
            return f"{fault.kind}: none was left", set()
        if fault.kind == KILL_NODE:
            node = fault.of(sorted(nodes))
            _signal([nodes[node]], signal.SIGKILL)
            return f"kill {node}", {rank for rank, (_, where) in ranks.items() if where == node}
        first = fault.of(sorted(ranks))
        two = [rank for rank in sorted(ranks) if rank > first][:1] if fault.kind == KILL_TWO else []
        chosen = [first, *two]
        freeze = fault.kind == FREEZE_RANK
        _signal([ranks[rank][0] for rank in chosen], signal.SIGSTOP if freeze else signal.SIGKILL)
        said = f"rank{'s' * len(two)} {' and '.join(map(str, chosen))}"
        return f"{'freeze' if freeze else 'kill'} {said}", set(chosen)

    def _processes(
        self,
    ) -> tuple[dict[int, tuple[psutil.Process, str]], dict[str, psutil.Process]]:
        """Its living ranks, by their numbers, with their pretended nodes; and these, by name."""
        ranks: dict[int, tuple[psutil.Process, str]] = {}
        nodes: dict[str, psutil.Process] = {}
        for process in psutil.process_iter(["name", "cmdline", "status"]):
            name = process.info["name"]
            ours = str(self.run.path) in " ".join(process.info["cmdline"] or [])
            if not ours or process.info["status"] in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                continue
            with suppress(psutil.NoSuchProcess):  # it has ended since
                parent = process.parent()
                above = parent.name() if parent else ""
                if name.startswith("node"):
                    nodes[name] = process
                elif name.startswith("rank ") and above.startswith("node"):  # no fork of a rank's
                    ranks[int(name.removeprefix("rank "))] = process, above
        return ranks, {node: nodes[node] for _, node in ranks.values() if node in nodes}


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has ended by itself
            process.send_signal(number)
