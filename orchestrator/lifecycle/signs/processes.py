"""What the kernel knows of a process: whether it works, is stopped, or sleeps for good."""

from __future__ import annotations

from pathlib import Path


def processor_s(pid: int) -> float:
    """Return the processor time of a process so far, in seconds; 0.0 if it has ended."""
    return stat_of(pid)[1]


def state_of(pid: int) -> str:
    """Return the kernel's state letter of a process: T stopped, t traced; X if it has ended."""
    return stat_of(pid)[0]


def stat_of(pid: int) -> tuple[str, float]:
    """Return `state_of` and `processor_s`, read together."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0.0
    values = text.rpartition(")")[2].split()  # the process name may hold anything
    ticks = int(values[11]) + int(values[12])
    return values[0], ticks / 100.0


def asleep_in(pid: int) -> str:
    """Return the kernel function in which a process sleeps uninterruptibly (state D).

    As when a disk or network file system does not answer; "" if it does not sleep like that.
    """
    if state_of(pid) != "D":
        return ""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").strip("0\n")
    except OSError:  # needs permission
        name = ""
    return name or "the kernel"


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process: loader workers, compilers."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in path.read_text(encoding="ascii").split()]
        except (FileNotFoundError, ProcessLookupError):  # that thread has just ended
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found
