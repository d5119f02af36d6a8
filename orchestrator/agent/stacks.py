"""Python stacks of main threads: of this process, of ranks and their children, of programs.

SIGQUIT requests a dump: every rank and loader process has a handler (`install_stack_handler`) that
writes the stacks of all threads to the rank's log, even while code holds the interpreter. No
scheduler sends it by itself, and jobs do not use it: USR1 and USR2 are used by SLURM and people,
TERM and INT request a stop. A process that is stopped, or sleeps in the kernel, cannot answer: for
it the report of the last second counts.

A user's program has no such handler. py-spy reads its stacks from outside, as far as the machine
lets a parent trace its children.

An agent's loop must not wait: both kinds of requests are polled until they are done.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.interrupt import catches
from orchestrator.rundir.files import read_end

STACK_SIGNAL = signal.SIGQUIT
STACK_S = 0.3
"""Time limit for a process to write its stack on request."""
ANSWER_S, ONE_ANSWER_S = 10.0, 2.0
"""Time limits for a request that is polled, and within it for one process."""
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
    frames: list[Frame] = []
    while frame is not None and len(frames) < MOST_FRAMES:
        code = frame.f_code
        frames.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return frames


def as_lines(stack: Sequence[Frame]) -> list[str]:
    """Format for people: the most recent call last, with each line's text if readable."""
    lines: list[str] = []
    for file, line, name in reversed(stack):
        lines.append(f'  File "{file}", line {line}, in {name}')
        if text := linecache.getline(file, line).strip():
            lines.append(f"    {text}")
    return lines


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


class ProcessStacks:
    """Request for the stacks of some of a rank's processes, by `STACK_SIGNAL`.

    They write them one by one, to their shared log. One without a handler, or without an answer, is
    left out, and so are those that `ANSWER_S` leaves no time for.

    Attributes:
        text: where they are, to append to a sentence.
    """

    def __init__(self, pids: Iterable[int], log: Path) -> None:
        self._pending, self._log = deque(pid for pid in pids if catches(pid, STACK_SIGNAL)), log
        self._until = time.monotonic() + ANSWER_S
        self._request: tuple[int, int, float] | None = None  # pid, size of the log, time
        self._answers = 0
        self.text = ""

    def poll(self) -> bool:
        """Return whether it is done. Call it again some time later if it is not."""
        if self._request is not None:
            pid, before, asked_at = self._request
            written = max(0, _size_of(self._log) - before)
            if not written and time.monotonic() - asked_at < ONE_ANSWER_S:
                return False
            self._request = None
            dump = read_end(self._log, DUMP_BYTES) if written else b""
            if stack := of_main_thread(dump.decode(errors="replace")):
                self.text += f"; its process {pid} is {describe_stack(stack)}"
                self._answers += 1
        while self._pending and self._answers < MOST_PROCESSES and time.monotonic() < self._until:
            pid = self._pending.popleft()
            size = _size_of(self._log)
            try:
                os.kill(pid, STACK_SIGNAL)
            except ProcessLookupError:
                continue
            self._request = pid, size, time.monotonic()
            return False
        return True


def _size_of(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:  # it was removed
        return 0


class ProgramStacks:
    """Request for the stacks of a program's Python process, by py-spy.

    Attributes:
        stack: of its main thread, innermost first.
        dump: all threads, as lines for people.
        is_after_script: the main thread has left its script.
        is_done: and the interpreter waits for other threads, or runs what a package registered for
            its end. Functions that the user's code registered are work.
        threads: its other threads that execute Python, and those of its children that are Python
            processes, as (process, thread). An interpreter that ends waits for both.
        problem: why there is no stack.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self.stack: list[Frame] = []
        self.dump: list[str] = []
        self.is_after_script = self.is_done = False
        self.problem = ""
        self.threads: list[tuple[int, int]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._until = time.monotonic() + ANSWER_S
        self._pids = list(filter(_is_python, pids))
        self._pid = pid = next(iter(self._pids), None)
        if pid is None:
            self.problem = "it is no Python program"
            return
        command = Path(sysconfig.get_path("scripts"), "py-spy")
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `poll`
        arguments = ["dump", "--json", "--nonblocking", "--pid", str(pid)]
        try:
            self._process = subprocess.Popen(
                [str(command), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            self.problem = f"py-spy cannot be started: {error.strerror}"
            self._output.close()

    def poll(self) -> bool:
        """Return whether it is done. Call it again some time later if it is not."""
        if self._process is None:
            return True
        if self._process.poll() is None and time.monotonic() < self._until:
            return False
        if self._process.poll() is None:
            self._process.kill()
        self._process = None
        with self._output:
            self._output.seek(0)
            text = self._output.read().decode(errors="replace")
        try:
            threads: list[dict[str, Any]] = json.loads(text)
        except ValueError:  # it says what is wrong: no permission, an unknown Python
            last = text.strip().splitlines()[-1:] or ["py-spy gave no answer"]
            self.problem = last[0].removeprefix("Error: ")
            return True
        for thread in threads:
            frames = [
                Frame(frame["filename"], frame["line"], frame["name"]) for frame in thread["frames"]
            ]
            name = thread["thread_name"] or thread["os_thread_id"]
            self.dump += [f"thread {name}:", *as_lines(frames)]
            if thread["os_thread_id"] == self._pid:
                self.stack = frames
                self.is_after_script = bool(frames) and _is_after_script(frames[-1])
                self.is_done = self.is_after_script and not any(frame.own for frame in frames)
            elif self._pid is not None and thread["os_thread_id"] is not None:
                self.threads.append((self._pid, thread["os_thread_id"]))
        for child in self._pids[1:]:
            self.threads += [(child, thread) for thread in _threads_of(child)]
        return True


def _is_python(pid: int) -> bool:
    """Return whether a process executes a Python interpreter."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:  # it has ended
        return False


def _threads_of(pid: int) -> list[int]:
    try:
        return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:  # it has ended
        return []


def _is_after_script(outermost: Frame) -> bool:
    """Return whether the main thread has left its script, by its outermost frame.

    Until then that is the script's, or runpy's for `python -m`; before, the import system's.
    """
    return outermost.name not in {"<module>", "_run_module_as_main"} and not (
        outermost.file.startswith("<frozen")
    )


def of_main_thread(log: str) -> list[Frame]:
    """Return the main thread's stack in the last dump of a log, where it comes last."""
    threads = list(_THREAD.finditer(log))
    if not threads:
        return []
    dump = log[threads[-1].end() :]
    return [Frame(file, int(line), name) for file, line, name in _FRAME.findall(dump)]
