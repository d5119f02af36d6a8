"""A run as one sees it from outside: its folder, its end, its ranks. And how it is hurt."""

from __future__ import annotations

import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from orchestrator.config.command_line import literally
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.rehearse.asked import Asked
from orchestrator.rehearse.drawing import (
    CUT,
    FILL_DISK,
    FREEZE_RANK,
    KILL_NODE,
    KILL_TWO,
    SILENCE,
    Fault,
)
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Tail

AFTER_SILENCE_S = 3.0
"""How much longer than a silent rank may live the silence lasts."""
LEAST_FULL_S, FULL_S = 0.3, 5.0
NOTHING_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Harm:
    """What was done.

    Attributes:
        said: in words.
        gone: ranks that the others have to lose by it, or that lose all these others.
        others: those that lived beside them.
        whole_run: no rank is left by it, or all leave.
        lasts_s: it lasts until `Outside.lift`, so long at most.
    """

    said: str
    gone: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    whole_run: bool = False
    lasts_s: float = 0.0

    def is_over(self, lost: AbstractSet[int]) -> bool:
        """Whether all are lost that this harm can take: one of both sides of a cut."""
        return self.gone <= lost or (bool(self.others) and self.others <= lost)


class Reach(Protocol):
    """The hands (`hand.py`) at a run's ranks."""

    def where(self) -> Mapping[int, str]:
        """The living ranks, by their numbers, with their nodes."""
        ...

    def tell(self, word: str, *what: Any) -> list[Any]:
        """Have every hand do what its method `word` does; what they give, one after another."""
        ...


class Outside(ABC):
    """One run, started as a person would."""

    def __init__(self, folder: Path, asked: Asked) -> None:
        self.run, self._asked = RunDir(folder), asked
        self._tail = Tail(self.run.metrics)
        self.records: list[dict[str, Any]] = []
        self._output = folder.with_suffix(".log")
        self._command: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------ its command

    def launch(self) -> None:
        where = () if self._asked.config_dir is None else ("--config-dir", self._asked.config_dir)
        given = (*self._asked.overrides, f"run.dir={literally(str(self.run.path))}")
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
    def last_words(self) -> str:
        """Of its command."""
        lines = self._output.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether it goes on no more by itself."""

    @property
    def waits(self) -> bool:
        """Whether it waits for its turn, so that nothing can move."""
        return False

    @abstractmethod
    def end(self) -> None:
        """End all of it."""

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
        generations = GenerationRecord(self.run.attempt(attempt)).since()
        if any(found["time"] >= since and found.get("gone") for found in generations):
            return True
        return self.run.attempts_made() > attempt + 1 or self.run.departure(attempt).exists()

    # ------------------------------------------------------------------ its ranks

    @abstractmethod
    def arm(self, fault: Fault) -> None:
        """Make ready for what comes next, so that it comes in its moment."""

    @abstractmethod
    def _reach(self) -> Reach: ...

    @abstractmethod
    def _hurt_all(self, fault: Fault) -> Harm | None:
        """Do what is not done to ranks; None of any other kind."""

    def hurt(self, fault: Fault, update_s: float) -> Harm:  # noqa: PLR0911  # a kind of fault each
        """Do it.

        Args:
            update_s: how long an update takes; a full disk lasts beyond the next checkpoint.
        """
        done = self._hurt_all(fault)
        if done is not None:
            return done
        reach = self._reach()
        where = reach.where()
        if not where:
            return Harm(said=f"{fault.kind}: none was left")
        if fault.kind in (KILL_NODE, CUT, SILENCE):
            node = fault.of(sorted(set(where.values())))
            its = sorted(rank for rank, of in where.items() if of == node)
            if fault.kind == KILL_NODE:
                self._kill_node(node, its)
                return Harm(said=f"kill {node}", gone=frozenset(its))
            if len(its) == len(where):  # no other node is left to be connected to
                return Harm(said=f"{fault.kind}: it had none", lasts_s=NOTHING_S)
            return self._part(fault, node, its, sorted({*where} - {*its}))
        if fault.kind == FILL_DISK:
            reach.tell("fill", sorted(where))
            updates = 1 + (self._asked.config.train.checkpoint_every or 0)
            return Harm(said=fault.kind, lasts_s=min(FULL_S, max(LEAST_FULL_S, updates * update_s)))
        first = fault.of(sorted(where))
        two = [rank for rank in sorted(where) if rank > first][:1] if fault.kind == KILL_TWO else []
        chosen, freeze = [first, *two], fault.kind == FREEZE_RANK
        reach.tell("signal", chosen, signal.SIGSTOP if freeze else signal.SIGKILL)
        said = f"rank{'s' * len(two)} {' and '.join(map(str, chosen))}"
        return Harm(said=f"{'freeze' if freeze else 'kill'} {said}", gone=frozenset(chosen))

    def _part(self, fault: Fault, who: str, ranks: list[int], others: list[int]) -> Harm:
        """Part these from the others."""
        reach = self._reach()
        outward = reach.tell("outward", ranks)
        if not outward:
            return Harm(said=f"{fault.kind}: it had none", lasts_s=NOTHING_S)
        if fault.kind == CUT:
            reach.tell("cut", ranks)
            return Harm(said=f"cut the links of {who}")  # they are whole again at once
        reach.tell("silence", outward, ranks)
        lasts_s = self._asked.config.cluster.heartbeat_timeout_s + AFTER_SILENCE_S
        return Harm(
            said=f"silence {who}", gone=frozenset(ranks), others=frozenset(others), lasts_s=lasts_s
        )

    def _kill_node(self, node: str, ranks: list[int]) -> None:
        del node
        self._reach().tell("signal", ranks, signal.SIGKILL)

    @abstractmethod
    def keep_up(self) -> None:
        """While something lasts: it holds for what is new as well."""

    def lift(self) -> None:
        """End what lasts."""
        self._reach().tell("lift")
