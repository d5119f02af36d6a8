"""What stands between a person's text and Hydra's parsers: bounds before, one message after.

Hydra, OmegaConf, YAML and ANTLR are written for well-meant input. What is not becomes a traceback,
minutes of computing, or gigabytes. So text is bounded before it is parsed, files are looked at
before they are loaded, and whatever is raised all the same becomes one `ConfigError`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult

from orchestrator.errors import ConfigError, OrchestratorError, shortened

LONGEST_ARGUMENT = 64 * 1024
MOST_ARGUMENTS = 2000
DEEPEST = 64
MOST_POINTS = 10_000
LARGEST_FILE = 256 * 1024
MOST_VALUES = 100_000
LIMIT_S = 30.0

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_RANGE = re.compile(r"range\(([^()]*)\)")


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse what no parser should see. Raises `ConfigError`."""
    if len(arguments) > MOST_ARGUMENTS:
        raise ConfigError(f"{len(arguments)} arguments are too many; at most {MOST_ARGUMENTS}")
    for argument in arguments:
        name = shortened(repr(argument))
        if len(argument) > LONGEST_ARGUMENT:
            raise ConfigError(
                f"an argument has {len(argument)} characters, at most {LONGEST_ARGUMENT} can be "
                f"read: {name}; long values belong into a file in your --config-dir"
            )
        if found := _CONTROL.search(argument):
            raise ConfigError(f"{name} has the control character {ord(found[0]):#04x} in it")
        if any(0xD800 <= ord(sign) < 0xE000 for sign in argument):
            raise ConfigError(f"{name} is not UTF-8")
        if _depth(argument) > DEEPEST:
            raise ConfigError(f"{name} is nested more than {DEEPEST} deep")
        _check_range(argument, name)


def _depth(text: str) -> int:
    """How deep brackets are open at most, whatever is quoted; dots of a key count as well."""
    depth = deepest = 0
    for sign in text:
        if sign in "[{(":
            depth += 1
            deepest = max(deepest, depth)
        elif sign in "]})":
            depth -= 1
    return max(deepest, text.partition("=")[0].count("."))


def _check_range(argument: str, name: str) -> None:
    """Hydra makes a list of all points of a `range` before anybody can count them."""
    for found in _RANGE.finditer(argument):
        with contextlib.suppress(ValueError, OverflowError):  # Hydra says what is wrong with it
            numbers = {key: float(value) for key, value in _range_arguments(found[1])}
            start, stop = numbers.get("start", 0.0), numbers["stop"]
            if abs(stop - start) > MOST_POINTS * abs(numbers.get("step", 1.0)):
                raise ConfigError(f"{name} makes more than {MOST_POINTS} points of a sweep")


def _range_arguments(text: str) -> list[tuple[str, str]]:
    """`1, 10, step=2` as names and values; `range(n)` has only an end."""
    parts = [part.strip() for part in text.split(",")]
    plain = [part for part in parts if "=" not in part]
    names = ("stop",) if len(plain) == 1 else ("start", "stop", "step")
    named = [(k.strip(), v) for k, _, v in (p.partition("=") for p in parts if "=" in p)]
    return [("stop", "0"), *zip(names, plain, strict=False), *named]


@contextlib.contextmanager
def guarded(*, bounded: bool = True, whose: str = "") -> Generator[None]:
    """Around all that Hydra and OmegaConf do with what people wrote: bounded, and in our words.

    Whatever they raise is the input's fault, or a defect of theirs that its writer has to avoid;
    neither is helped by a traceback (`-v` shows it).

    Args:
        bounded: give up after `LIMIT_S`; False where the work itself runs inside.
        whose: other code that runs inside, in words.

    Raises:
        ConfigError: in place of any exception but our own errors.
    """
    from orchestrator.compose.wording import explained

    rang: list[bool] = []
    try:
        with _alarm(rang) if bounded else contextlib.nullcontext():
            yield
    except (OrchestratorError, BrokenPipeError):  # the latter: nobody reads what Hydra prints
        raise
    except (Exception, RecursionError) as error:
        if rang:
            raise ConfigError(
                f"the configuration takes more than {LIMIT_S:g} s of computing: do its values "
                f"refer to each other again and again?"
            ) from error
        raise explained(error, whose) from error


class _TooLong(Exception):
    """Raised inside a parser to get out of it."""


@contextlib.contextmanager
def _alarm(rang: list[bool]) -> Generator[None]:
    """Interrupt what runs inside after `LIMIT_S`; again each second, since libraries catch much.

    These are seconds of computing: on a starved machine a sound configuration only takes longer.
    Only in the main thread: elsewhere Python delivers no signals, and nobody composes there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_: int, __: FrameType | None) -> None:
        rang.append(True)
        raise _TooLong

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


class CheckedFiles(FileConfigSource):
    """Hydra's source of configuration files, with a look at each before it is parsed."""

    trusted: Path | None = None  # what we ship need not be looked at

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path) / self._normalize_file_name(config_path)
        if self.trusted is None or not path.is_relative_to(self.trusted):
            check_file(path)
        try:
            return super().load_config(config_path)
        except (yaml.YAMLError, ValueError, OSError) as error:
            raise ConfigError(_in_file(path, error)) from error


# Hydra's registry knows a source by this name, and finds its own again when it looks for plugins.
CheckedFiles.__name__ = FileConfigSource.__name__


def register_checked_files(trusted: Path) -> None:
    """Let Hydra read every configuration file through `CheckedFiles`. May be called twice."""
    from hydra.core.plugins import Plugins

    Plugins.instance()  # registers Hydra's own sources, once
    CheckedFiles.trusted = trusted
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = CheckedFiles


def check_file(path: Path) -> None:
    """Refuse what is no text file of a sane size and shape. Raises `ConfigError`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # Hydra says so, and what there is instead
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} must be a file, but is not a regular one")
        content = os.read(descriptor, LARGEST_FILE + 1)
    finally:
        os.close(descriptor)
    if len(content) > LARGEST_FILE:
        raise ConfigError(
            f"{path} is larger than {LARGEST_FILE // 1024} KiB, which no configuration needs"
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: this is not UTF-8 text") from error
    _check_shape(path, text)


def _check_shape(path: Path, text: str) -> None:
    """Count what a YAML text comes to, from its events, before anything is built of it.

    An alias (`*name`) stands for all that its anchor holds, aliases included: ten lines of them can
    mean a billion values.
    """
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # anchor, values inside so far
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            grown = 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, 0))
                if len(open_nodes) > DEEPEST:
                    raise ConfigError(f"{path} is nested more than {DEEPEST} deep")
                continue
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, grown = open_nodes.pop()
                sizes |= {anchor: grown} if anchor else {}
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise ConfigError(f"{path}: *{event.anchor} stands for nothing complete")
                grown = sizes[event.anchor]
            elif isinstance(event, yaml.ScalarEvent) and event.anchor:
                sizes[event.anchor] = 1
            anchor, count = open_nodes[-1]
            open_nodes[-1] = (anchor, count + grown)
            if count + grown > MOST_VALUES:
                raise ConfigError(f"{path} comes to more than {MOST_VALUES} values")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(_in_file(path, error)) from error


def _in_file(path: Path, error: Exception) -> str:
    """What a parser says, with the file and the line."""
    mark: Any = getattr(error, "problem_mark", None)
    place = f", line {mark.line + 1}" if mark is not None else ""
    problem = (
        getattr(error, "problem", None) or str(error).partition("\n")[0] or type(error).__name__
    )
    return f"{path}{place}: {problem or type(error).__name__}"
