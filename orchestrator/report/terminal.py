# ruff: noqa: RUF001 - these signs are meant, and have stand-ins where they cannot be shown.
"""Text for a terminal: foreign text made harmless, our symbols made legible.

Log lines, node names and configuration values come from other programs. Before they are printed,
escape sequences and control characters are taken out, nothing in them is read as rich markup, and
what the stream's encoding cannot carry is replaced instead of raising in the middle of a table.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import re
import select
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterable
from pathlib import Path
from typing import IO, Any, ClassVar, TextIO, cast

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.errors import (
    LONGEST_MESSAGE,
    OrchestratorError,
    RunFolderError,
    UsageError,
    shortened,
)
from orchestrator.report.caller import tell_error
from orchestrator.rundir.files import blocks, start_of_last

# CSI and OSC sequences (ECMA-48), then any other two-character escape.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
LONGEST_LINE = 1 << 16
WRITE_POLL_S = 0.01
"""A terminal may be writable and have no room for a line feed, which it writes as two bytes."""
_PLAIN_SYMBOLS = str.maketrans("●○━─–×…", "*.=--x~")


class _Output(io.FileIO):
    """A standard stream that leads nowhere once its terminal has closed.

    Where `outlive_reader` is entered, no error of it is one: neither a reader that ends nor a full
    disk, nor a file that cannot be written for another reason.
    """

    then: ClassVar[list[Callable[[], object]]] = []

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_terminal = self.isatty()

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        written = 0
        while written < len(content):
            try:
                count = super().write(content[written:])
            except OSError as error:
                closed = self._is_terminal and error.errno == errno.EIO
                if not closed and not self.then:
                    raise
                if error.errno == errno.EPIPE:
                    self.then[-1]()
                if closed or error.errno == errno.EPIPE:
                    with Path(os.devnull).open("wb") as nothing:
                        os.dup2(nothing.fileno(), self.fileno())
                return len(content)
            if count is None:  # another program has left it non-blocking: wait as if it were not
                select.select([], [self], [])
                time.sleep(WRITE_POLL_S)
            written += count or 0
        return written


def _stream(stream: Any) -> TextIO:
    """Return a standard stream that writes by `_Output`, and raises for no character that its
    encoding lacks.
    """
    if stream is None:  # closed before the start (`>&-`)
        return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    buffer: Any = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if type(raw) is not io.FileIO or raw.closefd:  # a caller's own, or ours already
        return stream
    stream.flush()
    written = _Output(raw.fileno())
    return io.TextIOWrapper(
        cast("IO[bytes]", written) if raw is buffer else io.BufferedWriter(written),
        encoding=stream.encoding,
        errors="replace" if stream.errors in ("strict", "surrogateescape") else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


@contextlib.contextmanager
def outlive_reader(then: Callable[[], object]) -> Generator[None]:
    """When the reader of our output ends, as `tee` does at Ctrl-C, call `then` and continue; and do
    without lines for which the disk has no room.
    """
    _Output.then.append(then)
    try:
        yield
    finally:
        _Output.then.remove(then)


@contextlib.contextmanager
def exit_on_broken_pipe() -> Generator[None]:
    """End silently when the reader of our output ends, as in `… --help | head -2`.

    What is still unwritten is written within, where it can fail, rather than at Python's exit.
    Streams that were closed before the start lead nowhere, and so does a terminal that closes.
    """
    sys.stdout, sys.stderr = _stream(sys.stdout), _stream(sys.stderr)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)  # as a shell has it for a program that this signal ends


def harmless(text: object) -> str:
    r"""Remove escape sequences and control characters (line feeds stay, tabs are expanded).

    >>> harmless("\x1b[31mred\x1b[0m [bold]x\r\n\tback\x08")
    'red [bold]x\n        back'
    """
    return _CONTROLS.sub("", _ESCAPES.sub("", str(text))).expandtabs(8)


class LogReader:
    """Text of a log, made harmless, as the log grows. A log may not exist yet.

    Args:
        lines: begin with so many of its last lines; None: with all of it.
    """

    def __init__(self, path: Path, lines: int | None = None) -> None:
        self.path, self._lines = path, lines
        self._offset: int | None = None
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""  # what has no end yet, nor a whole escape sequence perhaps

    def read(self) -> Generator[str]:
        """Yield the lines that were added since the last call, in bounded memory."""
        if not os.path.lexists(self.path):
            return
        if self._offset is None:
            self._offset = 0 if self._lines is None else start_of_last(self.path, self._lines)
        for block in blocks(self.path, self._offset):
            self._offset += len(block)
            text = self._line + self._decode.decode(block)
            end = text.rfind("\n") + 1
            if len(text) - end > LONGEST_LINE:
                end = len(text)
            self._line = text[end:]
            yield harmless(text[:end])

    def rest(self) -> str:
        """Return the last line, which has no end."""
        rest, self._line = self._line + self._decode.decode(b"", final=True), ""
        return harmless(rest)


def legible(text: object, console: Console) -> str:
    """Return harmless text in characters that the console's stream can carry."""
    if (plain := str(text)).isascii() and plain.isprintable():  # a table has thousands of these
        return plain
    clean = harmless(text)
    encoding = console.encoding
    if console.options.ascii_only:
        clean = clean.translate(_PLAIN_SYMBOLS)
    return clean.encode(encoding, "replace").decode(encoding, "replace")


def literal(text: object, console: Console, style: str = "") -> Text:
    """Return text as a rich `Text`: brackets stay brackets, only `style` is applied."""
    return Text(legible(text, console), style=style)


def say(console: Console, text: object, style: str = "", *, prose: bool = False) -> None:
    """Print one line that is never broken by us, so that paths and commands can be copied.

    `prose` is broken between words on a terminal, and stays one line in a log that is searched.
    """
    whole = not (prose and console.is_terminal)
    console.print(literal(text, console, style), soft_wrap=whole, highlight=False)


def print_facts(rows: Iterable[tuple[str, str, str]], console: Console) -> None:
    """Print labels with their values, each with the style of the value."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value, style in rows:
        table.add_row(literal(label, console), literal(value, console, style))
    console.print(table)


def new_table(headings: Iterable[str | Text], right: Collection[int]) -> Table:
    """Return an empty table with a line below its headings.

    Args:
        right: columns of numbers, by index; the others begin at the left.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column, heading in enumerate(headings):
        justify = "right" if column in right else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    return table


def print_error(error: OrchestratorError | OSError, *, verbose: bool = False) -> int:
    """Print an error as one message, cut where a value in it is endless; return its exit code.

    Args:
        error: ours, or the file system's on a path that the user named.
        verbose: print the traceback before it, unless it would say nothing more.
    """
    if verbose and not (isinstance(error, UsageError) and error.__cause__ is None):
        traceback.print_exception(error)
    if isinstance(error, OSError):
        path = f"{shortened(error.filename)}: " if error.filename else ""
        error = RunFolderError(f"{path}{error.strerror or error}")
    tell_error(error)
    text = str(error)
    if len(text) > LONGEST_MESSAGE and not verbose:
        text = f"{text[:LONGEST_MESSAGE]}… ({len(text)} characters; -v shows all)"
    say(Console(stderr=True), f"error: {text}", "bold red")
    return error.exit_code


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def command(verb: str, *paths: Path) -> str:
    """Return a command of ours as it must be typed, with paths quoted for the shell.

    >>> command("resume", Path("runs/my run"))
    "python -m orchestrator resume 'runs/my run'"
    """
    return " ".join(["python -m orchestrator", verb, *(shlex.quote(str(path)) for path in paths)])
