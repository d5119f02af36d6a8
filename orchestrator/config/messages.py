"""Clear messages for what Hydra and OmegaConf raise."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, OrchestratorError, did_you_mean, nearest


@contextlib.contextmanager
def config_errors() -> Generator[None]:
    """Put everything that Hydra and OmegaConf raise about people's input into one message.

    Raises:
        ConfigError: in place of any exception but our own errors. `-v` shows the traceback.
    """
    try:
        yield
    except OrchestratorError:
        raise
    except Exception as error:
        raise explained(error) from error


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
"""Names that other tools have for our keys."""


def _dotted_keys(schema: Any = Config, prefix: str = "") -> Iterator[str]:
    for item in fields(schema):
        yield prefix + item.name
        value = getattr(schema(), item.name)
        if is_dataclass(value):
            yield from _dotted_keys(type(value), f"{prefix}{item.name}.")


def no_such_key(key: str) -> str:
    """Return a sentence about an unknown key, with the nearest one of any section.

    >>> no_such_key("accumulation.stpes")
    "there is no key 'accumulation.stpes'; did you mean 'steps'?"
    >>> no_such_key("epochs")
    "there is no key 'epochs'; did you mean 'train.epochs'?"
    """
    section, _, leaf = key.rpartition(".")
    known = [*_dotted_keys(), *GROUPS]
    siblings = [k.removeprefix(f"{section}.") for k in known if k.rpartition(".")[0] == section]
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    tail = did_you_mean(leaf, siblings)
    if nearest(leaf, siblings) is None and (leaf in ELSEWHERE or elsewhere):
        tail = did_you_mean(found := ELSEWHERE.get(leaf) or elsewhere[0], [found])
    elif elsewhere and leaf not in siblings:
        tail = did_you_mean(elsewhere[0], elsewhere)
    return f"there is no key '{key}'{tail}"


def explained(error: BaseException) -> ConfigError:
    """Put an exception of Hydra or OmegaConf into one clear message."""
    text = str(error)
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return ConfigError(f"{mark.name}, line {mark.line + 1}: {error.problem}")
    for words in (_unknown_key, _unknown_choice, _unreadable):
        if sentence := words(error, text):
            return ConfigError(sentence)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    first = re.split(r"\n    full_key|\nSee https|\n?Config search path", str(cause))[0].strip()
    first = first or type(error).__name__
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
    if isinstance(error, YAMLError | UnicodeDecodeError):
        return f"a configuration file is no YAML: {first}"
    return None
