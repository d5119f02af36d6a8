"""Python stacks of main threads: of this process, or of another one.

SIGQUIT requests a dump: every rank and loader process has a handler (`install_stack_handler`) that
writes the stacks of all threads to the rank's log, even while code holds the interpreter. No
scheduler sends it by itself, and jobs do not use it: USR1 and USR2 are used by SLURM and people,
TERM and INT request a stop. A process that is stopped, or sleeps in the kernel, cannot answer: for
it the report of the last second counts.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.rundir.files import read_end

STACK_SIGNAL = signal.SIGQUIT
STACK_S = 0.3
"""Time limit for a process to write its stack on request."""
STACKS_S = 1.0
"""Time limit for all of a rank's processes: an agent or a worker sends no heartbeat meanwhile."""
MOST_FRAMES = 40
MOST_PROCESSES = 2  # processes of one rank, each with its position
DUMP_BYTES = 32 * 1024
_PACKAGE = Path(__file__).parents[1]
_NOT_OWN = (f"{_PACKAGE}{os.sep}", f"{sysconfig.get_path('stdlib')}{os.sep}", "<")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_LOADER = str(Path("torch", "utils", "data"))
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Frame(NamedTuple):
    """Frame of a stack."""

    file: str
    line: int
    name: str

    @property
    def own(self) -> bool:
        """Return whether it is the job's own: not Python's, an installed package's, or ours."""
        return not self.file.startswith(_NOT_OWN) and _INSTALLED.search(self.file) is None


def install_stack_handler() -> None:
    """Install the handler: `STACK_SIGNAL` has this process write its stacks to standard error."""
    faulthandler.register(STACK_SIGNAL, file=sys.stderr, all_threads=True)


def main_stack() -> list[Frame]:
    """Return the stack of the main thread, innermost first. Reads no file."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # it has no public name
    found: list[Frame] = []
    while frame is not None and len(found) < MOST_FRAMES:
        code = frame.f_code
        found.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found


def as_lines(stack: Sequence[Frame]) -> list[str]:
    """Format for people: the most recent call last, with each line's text if readable."""
    found: list[str] = []
    for file, line, name in reversed(stack):
        found.append(f'  File "{file}", line {line}, in {name}')
        if text := linecache.getline(file, line).strip():
            found.append(f"    {text}")
    return found


def describe_stack(stack: Sequence[Frame]) -> str:
    """Describe the position: the line of the job's own code, and the function called from it.

    >>> describe_stack([Frame("/home/me/train.py", 31, "load"), Frame("/home/me/train.py", 9, "f")])
    'in load (/home/me/train.py, line 31)'
    >>> describe_stack([])
    'in no Python code'
    """
    if not stack:
        return "in no Python code"
    inner = stack[0]
    index = next((n for n, frame in enumerate(stack) if frame.own), None)
    if any(_LOADER in frame.file for frame in stack[:index]):
        return f"in its DataLoader, which waits for samples ({inner.name}, line {inner.line})"
    own = stack[index or 0]
    text = f"in {own.name} ({own.file}, line {own.line})"
    if index:
        text += f", there in {inner.name} ({Path(inner.file).name}, line {inner.line})"
    return text


def catches(pid: int) -> bool:
    """Return whether a process has a handler for `STACK_SIGNAL`, which would kill it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)


def describe_processes(pids: Iterable[int], log: Path) -> str:
    """Describe where processes are, to append to a sentence, by the stacks that they write.

    They write them one by one, to their shared log. One without a handler, or without an answer
    within `STACK_S`, is left out, and so are those that `STACKS_S` leaves no time for.
    """
    found: list[str] = []
    ends = time.monotonic() + STACKS_S
    for pid in filter(catches, pids):
        if time.monotonic() >= ends:
            break
        before = log.stat().st_size
        os.kill(pid, STACK_SIGNAL)
        until = time.monotonic() + STACK_S
        while time.monotonic() < until and log.stat().st_size == before:
            time.sleep(0.01)
        time.sleep(0.05)  # a dump is many small writes
        if log.stat().st_size == before:
            continue
        if stack := of_main_thread(read_end(log, DUMP_BYTES).decode(errors="replace")):
            found.append(f"; its process {pid} is {describe_stack(stack)}")
        if len(found) == MOST_PROCESSES:
            break
    return "".join(found)


def of_main_thread(log: str) -> list[Frame]:
    """Return the main thread's stack in the last dump of a log, where it comes last."""
    threads = list(_THREAD.finditer(log))
    if not threads:
        return []
    dump = log[threads[-1].end() :]
    return [Frame(file, int(line), name) for file, line, name in _FRAME.findall(dump)]
