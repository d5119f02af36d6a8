"""What srun says of tasks that ended badly, read into values."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.errors import describe_status

EXITED = re.compile(r"Exited with exit code (\d+)")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STOP_CODES = frozenset(128 + number for number in STOP_SIGNALS)
SIGNALS = {text: number for number in signal.valid_signals() if (text := signal.strsignal(number))}
TASKS = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\-]+): (?P<what>.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEnd:
    """srun's word on one task."""

    rank: int
    node: str
    what: str

    @property
    def words(self) -> str:
        """In our words, which are those of `describe_status`."""
        code = EXITED.fullmatch(self.what)
        if code is not None:
            return describe_status(int(code[1]))
        number = self.signal
        return describe_status(-number) if number else f"ended: {self.what}"

    @property
    def signal(self) -> int | None:
        return SIGNALS.get(self.what.removesuffix(" (core dumped)"))

    @property
    def stopped(self) -> bool:
        """Whether it was told to end, as srun tells all others when one has failed."""
        code = EXITED.fullmatch(self.what)
        return self.signal in STOP_SIGNALS or (code is not None and int(code[1]) in STOP_CODES)


def numbers(listed: str) -> Iterator[int]:
    """SLURM's list of numbers.

    >>> list(numbers("0,2-4"))
    [0, 2, 3, 4]
    """
    for part in listed.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def task_ends(log: str) -> list[TaskEnd]:
    """Every task that srun says ended badly, in the order in which it says so."""
    return [
        TaskEnd(rank=rank, node=found["node"], what=found["what"].strip())
        for found in TASKS.finditer(log)
        for rank in numbers(found["tasks"])
    ]
