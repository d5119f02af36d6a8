"""A rehearsed run on pretended nodes: its launcher is a process of ours, and its ranks below it."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from orchestrator.rehearse.drawing import KILL_LAUNCHER, STOP, Fault
from orchestrator.rehearse.hand import Hand
from orchestrator.rehearse.outside import Harm, Outside

KEEP_UP_S = 0.05


class Near:
    """The hand at all ranks of a run folder; there is one machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._hand = Hand(self._ranks)

    def where(self) -> Mapping[int, str]:
        return {rank: node for rank, (_, node) in self.processes()[0].items()}

    def tell(self, word: str, *what: Any) -> list[Any]:
        return getattr(self._hand, word)(*what) or []

    def _ranks(self) -> Mapping[int, int]:
        return {rank: process.pid for rank, (process, _) in self.processes()[0].items()}

    def processes(
        self,
    ) -> tuple[dict[int, tuple[psutil.Process, str]], dict[str, psutil.Process]]:
        """Its living ranks, by their numbers, with their pretended nodes; and these, by name."""
        ranks: dict[int, tuple[psutil.Process, str]] = {}
        nodes: dict[str, psutil.Process] = {}
        for process in psutil.process_iter(["name", "cmdline", "status"]):
            name = process.info["name"]
            ours = self._folder in " ".join(process.info["cmdline"] or [])
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


class Pretended(Outside):
    """In a session of its own."""

    _kept_up = 0.0

    @property
    def ended(self) -> bool:
        assert self._command is not None  # noqa: S101  # it was started
        return self._command.poll() is not None

    def end(self) -> None:
        """Its processes end with the command."""
        if self._command is not None and self._command.poll() is None:
            self._command.kill()
            self._command.wait()

    def arm(self, fault: Fault) -> None:
        """What is needed is here."""

    @cached_property
    def _near(self) -> Near:
        return Near(self.run.path)

    def _reach(self) -> Near:
        return self._near

    def keep_up(self) -> None:
        """Looking through all processes takes some milliseconds, and is of use now and then."""
        if time.monotonic() - self._kept_up > KEEP_UP_S:
            self._near.tell("renew")
            self._kept_up = time.monotonic()

    def _hurt_all(self, fault: Fault) -> Harm | None:
        if fault.kind not in (STOP, KILL_LAUNCHER):
            return None
        assert self._command is not None  # noqa: S101  # it was started
        self._command.send_signal(signal.SIGTERM if fault.kind == STOP else signal.SIGKILL)
        return Harm(said=fault.kind, whole_run=True)

    def _kill_node(self, node: str, ranks: list[int]) -> None:
        """By its own process, as `node` is its ranks' parent: these end with it."""
        del ranks
        with suppress(KeyError, psutil.NoSuchProcess):  # it has ended by itself
            self._near.processes()[1][node].kill()
