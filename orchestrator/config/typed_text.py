"""Texts as they were typed, in files and on the command line.

YAML 1.1 and Hydra's grammar read a bare scalar as a number or a boolean where it looks like one:
account 0042 as 34, partition on as true, 4:00:00 as 14400, 1e3 as 1000.0. Where the schema wants a
text, what was typed counts. Where it wants a number, what YAML would read in base 60 or 8 is
refused. A time limit takes SLURM's forms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Never, get_args, get_type_hints

import yaml
from omegaconf import OmegaConf

from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError
from orchestrator.units import time_limit_min

TIME_LIMIT = "cluster.time_min"
_TEXT_LISTS = (
    "run.tags",
    "run.callbacks",
    "cluster.preamble",
    "job.command",
    "job.resume_arguments",
)
_TEXT_TABLES = ("cluster.environment",)
_WORD_TABLES = ("cluster.slurm_flags", "cluster.srun_flags", "job.arguments")
"""Their values become words of a command: true is a flag without a value, and a number that is
written as Python would write it is that number."""


@cache
def text_keys() -> frozenset[str]:
    """Return the dotted keys of the schema that hold a text.

    >>> {"cluster.qos", "run.name", "transport"} <= text_keys(), "train.seed" in text_keys()
    (True, False)
    """
    return frozenset(_text_keys(Config, ""))


def _text_keys(schema: Any, prefix: str) -> Iterator[str]:
    hints = get_type_hints(schema)
    for item in fields(schema):
        hint = hints[item.name]
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if is_dataclass(hint):
            yield from _text_keys(hint, f"{prefix}{item.name}.")
        elif str in kinds:
            yield prefix + item.name


def _holds_text(key: str) -> bool:
    return key in text_keys() or key.startswith(tuple(f"{table}." for table in _TEXT_TABLES))


def _holds_words(key: str) -> bool:
    return key.startswith(tuple(f"{table}." for table in _WORD_TABLES))


def _is_as_python_writes_it(text: str, value: Any) -> bool:
    if isinstance(value, bool):
        return text.lower() in ("true", "false")
    return str(value) == text


def _time_limit(text: str) -> str:
    """Return a text that begins as a time limit in minutes; any other text unchanged."""
    if not re.fullmatch(r"\d[\w:.-]*", text):
        return text
    return str(int(text) if text.isdigit() else time_limit_min(text, TIME_LIMIT))


# ------------------------------------------------------------------ the command line


_NUMERAL = r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?"
_READ_OTHERWISE = rf"{_NUMERAL}|[+-]?(?i:inf|nan)|(?i:true|false)"
"""Texts that Hydra's grammar reads as a number or a boolean."""

_SCALARS = re.compile(rf"(^|[,(\[]\s*|:\s+)({_READ_OTHERWISE})(?=\s*(?:$|[,)\]}}]))")


def quote_text(key: str, value: str) -> str:
    """Return the value of an override, in quotes where Hydra would read another value.

    >>> quote_text("cluster.account", "1e3"), quote_text("cluster.qos", "1e3,on,2")
    ("'1e3'", "'1e3',on,2")
    >>> quote_text("job.arguments.lr", "1e-4,0.1"), quote_text("train.clip_norm", "1e3")
    ("'1e-4',0.1", '1e3')
    >>> quote_text("cluster.time_min", "4:00:00")
    '240'
    """
    if "'" in value or '"' in value or "$" in value:
        return value
    if key == TIME_LIMIT:
        return ",".join(_time_limit(part.strip()) for part in value.split(","))
    is_table = key in _TEXT_TABLES or key in _WORD_TABLES
    is_text = _holds_text(key) or key in _TEXT_LISTS or key in _TEXT_TABLES
    if not (is_text or is_table or _holds_words(key)) or re.match(r"(?:range|interval)\(", value):
        return value

    def quoted(match: re.Match[str]) -> str:
        text = match[2]
        is_boolean = text.lower() in ("true", "false")
        bare = not is_text if is_boolean else _is_as_python_writes_numbers(text)
        return match[0] if bare else f"{match[1]}'{text}'"

    return _SCALARS.sub(quoted, value)


def _is_as_python_writes_numbers(text: str) -> bool:
    """Return whether a number becomes this very text again.

    >>> [_is_as_python_writes_numbers(text) for text in ("12", "0.1", "012", "1e3", "nan")]
    [True, True, False, False, False]
    """
    digits = text.lstrip("+-")
    is_whole = digits.isdigit()
    if not is_whole and not re.fullmatch(r"[\d.]+", digits):
        return False
    return text == (str(int(text)) if is_whole else str(float(text)))


# ------------------------------------------------------------------ files


def refuse_unset(name: str) -> Never:
    """Raise `ConfigError` for a value that a file leaves to its users, as OmegaConf's `???`."""
    raise ConfigError(f"is ??? in {name}")


class TypedFile:
    """A configuration file as its author typed it.

    Args:
        config: the file as OmegaConf has read it; `keep_text` changes it.
        text: of the file.
        package: the dotted place of its keys in the configuration, "" for the whole.
        name: for messages.
    """

    def __init__(self, config: Any, text: str, package: str, name: str) -> None:
        self._config, self._text, self._package, self._name = config, text, package, name

    def keep_text(self) -> None:
        """Set the texts in the configuration to those of the file.

        Raises:
            ConfigError: a number, or a key, in a form that YAML reads otherwise, or a time limit in
                none of SLURM's forms.
        """
        root = yaml.compose(self._text, yaml.SafeLoader)
        if isinstance(root, yaml.MappingNode):
            self._keep_in(self._config, root, self._package)

    def _keep_in(self, config: Any, node: yaml.MappingNode | yaml.SequenceNode, key: str) -> None:
        is_list = isinstance(node, yaml.SequenceNode)
        for place, inner in self._parts(node):
            config_node = config._get_node(place)  # noqa: SLF001  # the node itself, unresolved
            if config_node is None:
                continue  # a number as a key, say, which no key of ours is
            dotted = key if is_list else f"{key}.{place}".lstrip(".")
            if isinstance(inner, yaml.ScalarNode):
                value = self._typed_value(dotted, inner, config_node, in_list=is_list)
                if value is not None:
                    config[place] = value
            elif OmegaConf.is_config(config_node):
                self._keep_in(config_node, inner, dotted)

    def _parts(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the keys (or numbers) of a mapping or sequence, with their nodes."""
        if isinstance(node, yaml.SequenceNode):
            yield from enumerate(node.value)
            return
        own = {key.value for key, _ in node.value}
        for key, inner in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                merged = inner.value if isinstance(inner, yaml.SequenceNode) else [inner]
                for mapping in merged:
                    yield from (part for part in self._parts(mapping) if part[0] not in own)
                continue
            if key.tag == "tag:yaml.org,2002:bool":
                raise ConfigError(
                    f"{self._at(key)}: the key {key.value} is a boolean to YAML; put it in quotes: "
                    f"'{key.value}'"
                )
            yield key.value, inner

    def _typed_value(
        self, key: str, node: yaml.ScalarNode, config_node: Any, *, in_list: bool
    ) -> str | int | None:
        """Return the value that replaces YAML's; None: YAML's stays."""
        text: str = node.value
        if text == "" and self._text[node.start_mark.index :].startswith("&"):
            word = self._text[node.start_mark.index :].split()[0]
            raise ConfigError(
                f"{self._at(node)}: {key}: {word} names a value for YAML, but there is none; write "
                f"'{word}' in quotes for the text"
            )
        value = config_node._value()  # noqa: SLF001  # an interpolation stays one
        if value == "???":  # as it is, it overrides no default, and would be dropped
            name = self._name.replace("'", "\\'")
            return f"${{{refuse_unset.__name__}:'{name}'}}"
        if key == TIME_LIMIT and value is not None:
            limit = _time_limit(text)
            return int(limit) if limit.isdigit() else None
        if node.style is not None or value is None or isinstance(value, str):
            return None  # in quotes, or a text already
        if _holds_text(key) or (in_list and key in _TEXT_LISTS):
            return text
        if _holds_words(key):
            return None if _is_as_python_writes_it(text, value) else text
        if not isinstance(value, bool) and (":" in text or re.fullmatch(r"[+-]?0[0-7_]+", text)):
            raise ConfigError(
                f"{self._at(node)}: {key}: {text} is {value} to YAML, which reads it in base "
                f"{60 if ':' in text else 8}; write that number, or '{text}' in quotes for the text"
            )
        return None

    def _at(self, node: yaml.Node) -> str:
        return f"{self._name}, line {node.start_mark.line + 1}"
