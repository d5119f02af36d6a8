"""What the kernel tells of a process: does it work, is it stopped, does it sleep for good?"""

from __future__ import annotations

from pathlib import Path


def processor_s(pid: int) -> float:
    """Processor time of a process so far, in seconds; 0.0 when it is gone."""
    return stat_of(pid)[1]


def state_of(pid: int) -> str:
    """The kernel's letter for a process's state: T is stopped, t traced; X when it is gone."""
    return stat_of(pid)[0]


def stat_of(pid: int) -> tuple[str, float]:
    """`state_of` and `processor_s`, of one moment."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0.0
    values = text.rpartition(")")[2].split()  # the name before may hold anything
    ticks = int(values[11]) + int(values[12])
    return values[0], ticks / 100.0


def asleep_in(pid: int) -> str:
    """In which of the kernel's functions a process sleeps that nothing can wake (state D), as when
    a disk or a file system of the network does not answer; "" where it does not sleep like that.
    """
    if state_of(pid) != "D":
        return ""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").strip("0\n")
    except OSError:  # not everybody may read it
        name = ""
    return name or "the kernel"


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs: loader workers, compilers."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in path.read_text(encoding="ascii").split()]
        except (FileNotFoundError, ProcessLookupError):  # that thread ended in this moment
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found
