"""Conversion of plain values into a checked `Config`, and back into YAML."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.config.command_line import escape_interpolations
from orchestrator.config.messages import describe_conversion
from orchestrator.config.rules import check
from orchestrator.config.schema import Config, plain
from orchestrator.errors import ConfigError, did_you_mean

PLAIN = (int, float, bool, str)
RUN_FOLDER = "{run.dir}"
"""In a job's arguments, the folder of its run, which is chosen after they are composed."""


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return nested dicts and lists with each text changed.

    >>> map_texts({"a": ["b", 1]}, str.upper)
    {'a': ['B', 1]}
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_texts(inner, change) for key, inner in value.items()}
    return [map_texts(inner, change) for inner in value] if isinstance(value, list) else value


def with_run_folder(value: Any, folder: str) -> Any:
    """Return a job's arguments, or one of them, with `RUN_FOLDER` replaced."""
    return map_texts(value, lambda text: text.replace(RUN_FOLDER, folder))


def literal_container(values: Any) -> Any:
    """Return an OmegaConf container of plain values, in which `${…}` is text.

    >>> OmegaConf.to_container(literal_container({"word": "${HOME}", "n": 1}), resolve=True)
    {'word': '${HOME}', 'n': 1}
    """
    return OmegaConf.create(map_texts(values, escape_interpolations))


def read_config(values: Any) -> Config:
    """Return a checked `Config` of plain values, as in a run folder's config.yaml.

    Raises:
        ConfigError: unknown keys, wrong types, values that cannot be used.
    """
    try:
        config: Config = _direct(Config, values)
    except _NeedsConversion:
        try:
            merged = OmegaConf.merge(OmegaConf.structured(Config), literal_container(values))
            config = cast("Config", OmegaConf.to_object(merged))
            _refuse_other_than_texts(config)
        except OmegaConfBaseException as error:
            reason = str(error).split("\n", maxsplit=1)[0]
            key = error.full_key or "the configuration"
            raise ConfigError(describe_conversion(key, reason) or f"{key}: {reason}") from error
    check(config)
    return config


def _refuse_other_than_texts(section: Any, prefix: str = "") -> None:
    """Raise `ConfigError` for a list or a table among texts, which OmegaConf lets pass."""
    for name, hint in _hints(type(section)).items():
        value, key = getattr(section, name), f"{prefix}{name}"
        if is_dataclass(value):
            _refuse_other_than_texts(value, f"{key}.")
        elif get_args(hint)[-1:] == (str,) and isinstance(value, dict | list):
            items: Any = value.items() if isinstance(value, dict) else enumerate(value)
            for place, item in items:
                if not isinstance(item, str):
                    where = f"[{place}]" if isinstance(value, list) else f".{place}"
                    raise ConfigError(
                        f"{key}{where} must be a text, but is {item!r}; put a text in quotes"
                    )


class _NeedsConversion(Exception):
    """Raised for a value that is not of its declared type: OmegaConf converts or refuses it."""


_hints = cache(get_type_hints)


def _direct(schema: type, values: Any) -> Any:
    """Build a dataclass of values that have the declared types: 100 times as fast as OmegaConf,
    for the thousand points of a sweep.
    """
    if not isinstance(values, Mapping) or not _hints(schema).keys() >= values.keys():
        raise _NeedsConversion
    return schema(**{key: _declared(_hints(schema)[key], v) for key, v in values.items()})


def _declared(hint: Any, value: Any) -> Any:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if value == "???":
        raise _NeedsConversion
    if type(value) in kinds or (hint is Any and (value is None or type(value) in PLAIN)):
        return value
    if type(value) is int and float in kinds:
        return float(value)
    if isinstance(hint, type) and is_dataclass(hint):
        return _direct(hint, value)
    inner = (get_args(hint) or (Any,))[-1]
    if isinstance(value, dict) and (get_origin(hint) is dict or hint is Any):
        if all(isinstance(key, str) for key in value):
            return {key: _declared(inner, v) for key, v in value.items()}
    elif isinstance(value, list) and (get_origin(hint) is list or hint is Any):
        return [_declared(inner, v) for v in value]
    raise _NeedsConversion


def to_yaml(config: Config) -> str:
    """Return the text of config.yaml; `read_config` of it is the same configuration."""
    return "".join(_yaml(pickle.dumps({k: v})) for k, v in plain(config).items())


@lru_cache(maxsize=256)
def _yaml(packed: bytes) -> str:
    """Return the text of a section, which many points of a sweep share."""
    return OmegaConf.to_yaml(OmegaConf.create(pickle.loads(packed)))  # noqa: S301  # packed here


@cache
def _sections(schema: type) -> dict[str, type | None]:
    """Return the keys of a schema, with the schema of each that is a section."""
    usual = {field.name: getattr(schema(), field.name) for field in fields(schema)}
    return {name: type(v) if is_dataclass(v) else None for name, v in usual.items()}


def unknown_keys(settings: Mapping[str, Any], schema: type = Config, prefix: str = "") -> list[str]:
    """Return a sentence for every key that the schema does not have, at any level."""
    known = _sections(schema)
    sentences: list[str] = []
    for key, value in settings.items():
        if key not in known:
            sentences.append(f"there is no key '{prefix}{key}'{did_you_mean(str(key), known)}")
        elif (section := known[key]) is not None and isinstance(value, Mapping):
            sentences += unknown_keys(value, section, f"{prefix}{key}.")
    return sentences


@dataclass
class NoOptions:
    """Options class for plug-ins without options."""


def options_of(schema: type, values: Mapping[str, Any], key: str) -> Any:
    """Build a `schema`, a dataclass with a default (or `omegaconf.MISSING`) for each field.

    Args:
        key: of the section, `cluster.options` say.

    Raises:
        ConfigError: an unknown key, a wrong type, or a required key that is absent.
    """
    if schema is NoOptions and not values:
        return NoOptions()
    if sentences := unknown_keys(values, schema, f"{key}."):
        raise ConfigError("\n".join(sentences))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(dict(values)))
        if lacking := OmegaConf.missing_keys(merged):
            raise ConfigError("\n".join(f"{key}.{name} has to be set" for name in sorted(lacking)))
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"{key}.{error.full_key}: {reason}") from error
