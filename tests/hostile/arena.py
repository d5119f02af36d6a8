"""Runs a command line in a forked child with limits, and says what is wrong with how it ended.

The parent has imported what a command imports, so a line costs what it computes, not the start of
an interpreter. Each child is bounded in seconds, in memory, and in what it may write.
"""

import os
import resource
import runpy
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.lines import CANARY, Line

LIMIT_S = 30.0
MEMORY = 3 << 30
LONGEST = 6_000
CODES = (0, 1, 2)
USAGE = 2


@dataclass(frozen=True)
class Ended:
    """How a line ended: its exit code (None: killed by us, negative: by a signal), its words."""

    code: int | None
    words: str
    seconds: float
    verbose: bool = False  # was asked for tracebacks

    def faults(self, watched: Path) -> list[str]:
        """What must not be, in words; nothing when all is well."""
        found = []
        if self.code is None:
            found.append(f"hangs: over after {self.seconds:.0f} s")
        elif self.code not in CODES:
            found.append(f"exit code {self.code}")
        asked = self.verbose and self.code == USAGE
        if ("Traceback" in self.words and not asked) or "Error executing job" in self.words:
            found.append("a traceback")
        if self.code == 2 and not self.words.strip():
            found.append("refused without a word")
        if self.code and len(self.words) > LONGEST:
            found.append(f"{len(self.words)} characters of refusal")
        if self.code and "\x1b[31mred" in self.words:
            found.append("a value's escape codes reach the terminal")
        found += [f"made {path}" for path in watched.rglob("*") if path.name == CANARY]
        return found


def run(line: Line, folder: Path, limit_s: float = LIMIT_S) -> Ended:
    """Run it in a child of this process, standing in a new folder of its own."""
    output = folder / "words"
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _be(line, folder, output)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        seconds = time.monotonic() - began
        if pid:
            code = os.waitstatus_to_exitcode(status)
            break
        if seconds > limit_s:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            code = None
            break
        time.sleep(0.005)
    words = output.read_bytes().decode("utf-8", "replace") if output.exists() else ""
    return Ended(code, words, seconds, "-v" in line.arguments)


def _own_bytes() -> int:
    """What this process has mapped already: much, where others imported frameworks before."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _be(line: Line, folder: Path, output: Path) -> None:
    """In the child: never returns."""
    code = 70
    try:
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        most = _own_bytes() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (int(LIMIT_S), int(LIMIT_S)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        here = folder / "here"
        here.mkdir()
        os.chdir(here)
        if line.folder == "gone":
            here.rmdir()
        os.environ.update(line.environment)
        encoding = line.environment.get("PYTHONIOENCODING", "utf-8")
        for stream, number in (("stdout", 1), ("stderr", 2)):
            errors = "strict" if stream == "stdout" else "backslashreplace"
            text = os.fdopen(number, "w", encoding=encoding, errors=errors, closefd=False)
            setattr(sys, stream, text)
        sys.argv = [line.module, *line.arguments]
        for name in (line.module, f"{line.module}.__main__"):
            sys.modules.pop(name, None)  # else runpy warns of it
        runpy.run_module(line.module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  # whatever a line raises is what is looked for
        traceback.print_exc()
        code = 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
