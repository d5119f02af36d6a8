"""Bounds for what reaches Hydra's parsers, and clear messages for what they raise."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, OrchestratorError, did_you_mean, nearest, shortened

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


GROUPS = ("experiment",)  # groups whose name is no key of the schema
ELSEWHERE = {
    "lr": "schedule.base_lr",
    "learning_rate": "schedule.base_lr",
    "batch_size": "accumulation.global_batch",
    "accumulation_steps": "accumulation.steps",
    "gradient_accumulation_steps": "accumulation.steps",
    "max_grad_norm": "train.clip_norm",
    "data_dir": "job.data_dir",
    "output_dir": "run.dir",
}
"""What other tools call a key of ours."""
OWN_LAUNCHER = (
    "a sweep's points are placed by this package's own launcher: here, or with +cluster=slurm as "
    "arrays of jobs; leave {} out"
)
NO_SWEEPER = "it is not installed here; without {}, all combinations of stated values are swept"


def _dotted_keys(schema: Any = Config, prefix: str = "") -> Iterator[str]:
    for item in fields(schema):
        yield prefix + item.name
        value = getattr(schema(), item.name)
        if is_dataclass(value):
            yield from _dotted_keys(type(value), f"{prefix}{item.name}.")


def no_such_key(key: str) -> str:
    """A sentence about a key that the schema does not have: the nearest one, wherever it is.

    >>> no_such_key("accumulation.stpes")
    "there is no key 'accumulation.stpes'; did you mean 'steps'?"
    >>> no_such_key("epochs")
    "there is no key 'epochs'; did you mean 'train.epochs'?"
    """
    section, _, leaf = key.rpartition(".")
    known = [*_dotted_keys(), *GROUPS]
    beside = [k.removeprefix(f"{section}.") for k in known if k.rpartition(".")[0] == section]
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    tail = did_you_mean(leaf, beside)
    if nearest(leaf, beside) is None and (leaf in ELSEWHERE or elsewhere):
        tail = did_you_mean(found := ELSEWHERE.get(leaf) or elsewhere[0], [found])
    elif elsewhere and leaf not in beside:
        tail = did_you_mean(elsewhere[0], elsewhere)
    return f"there is no key '{key}'{tail}"


def explained(error: BaseException, whose: str = "") -> ConfigError:
    """Put an exception of Hydra or OmegaConf into one clear message.

    Args:
        whose: the code that may have raised it instead, which has nothing to do with either.
    """
    text = str(error)
    for words in (_unknown_key, _unknown_choice, _unreadable):
        if sentence := words(error, text):
            return ConfigError(sentence)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    first = re.split(r"\n    full_key|\nSee https|\n?Config search path", str(cause))[0].strip()
    first = first or type(error).__name__
    if key is None and whose:
        return ConfigError(f"{whose} ended with {type(error).__name__}: {first}")
    return ConfigError(f"{key}: {first}" if key else f"the configuration cannot be read: {first}")


def _unknown_key(error: BaseException, text: str) -> str | None:
    del error
    if found := re.search(r"Could not override '([^']+)'\.? ?(No match)?", text):
        key, is_group = found.groups()
        if is_group and "." not in key:
            return (
                f"the primary configuration lists no {key} to choose; write +{key}=…, or begin its "
                f"defaults with 'base'"
            )
        return no_such_key(key)
    if found := re.search(r"Could not delete(?: from config\.)? '([^']+)'", text):
        key = found.group(1)
        return f"there is nothing at '{key}' to delete; leave ~{key} out"
    if found := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        key = found.group(1)
        return f"'{key}' is there already: to change it, leave the + out, as in {key}=…"
    if found := re.search(r"Multiple values for ([^ .]+)\.", text):
        group = found.group(1)
        return f"'{group}' is chosen from a list already: leave the + out, as in {group}=…"
    return None


def _unknown_choice(error: BaseException, text: str) -> str | None:
    del error
    if found := re.search(r"Cannot find primary config '([^']+)'", text):
        return (
            f"there is no primary configuration '{found.group(1)}.yaml': --config-name takes the "
            f"name of a file in the folder that --config-dir names"
        )
    if found := re.search(r"Could not (?:find|load) '([^']+?)(?:/([^'/]+))?'", text):
        group, choice = found.groups()
        if choice is None:
            return f"there is no configuration '{group}'"
        if group in {"hydra/launcher", "hydra/sweeper"}:
            way = OWN_LAUNCHER if group == "hydra/launcher" else NO_SWEEPER
            return f"{group}={choice} is not available: {way.format(group)}"
        offered = re.findall(r"^\t(?!provider=)(\S+)$", text, flags=re.MULTILINE)
        return f"there is no {group} called '{choice}'{did_you_mean(choice, offered)}"
    return None


def _unreadable(error: BaseException, text: str) -> str | None:
    if found := re.search(r"Ambiguous value for argument '([^'=]+)=(.*)'", text):
        key, values = found.groups()
        return (
            f"{key}={values} holds commas: to sweep over its values add -m, for a list write "
            f"{key}=[{values}], for one text {key}=\"'{values}'\""
        )
    if found := re.search(r"Sweep parameters '([^']+)' requires --multirun", text):
        return f"{found.group(1)} is for a sweep: add -m"
    if "BasicSweeper does not support sweep type" in text:
        return (
            "a sweep runs all of its points, so it takes values (a,b or range(1,9)), no interval; "
            "to choose points from one by what came of others, add sweep.search=tpe sweep.trials=20"
        )
    override = getattr(error, "override", None)
    first = text.split("\nSee https", maxsplit=1)[0].strip()
    if override is not None:
        if first.startswith("LexerNoViableAlt"):  # ANTLR's name for it, and the whole text again
            first = "a quote or a bracket is not closed"
        return (
            f"the command line cannot be read at {override.removeprefix('++')}: {first}; text with "
            f"other letters than a-z, 0-9 and ./_- is put in quotes, as in KEY=\"'VALUE'\""
        )
    if isinstance(error, YAMLError):
        return f"a configuration file is no YAML: {first}"
    return None
