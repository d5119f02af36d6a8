"""Conversion of plain values into a checked `Config`, and back into YAML."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import cache, lru_cache
from types import UnionType
from typing import Any, cast, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.config.rules import check
from orchestrator.config.schema import Config, plain
from orchestrator.errors import ConfigError, did_you_mean

PLAIN = (int, float, bool, str)
ROOTED = re.compile(r"/[A-Za-z0-9_./-]*")  # as most paths are: YAML says them as they are


def as_they_are(values: Any) -> Any:
    """Plain values for OmegaConf, in which `${…}` is text: whoever composed them is done.

    >>> OmegaConf.to_container(as_they_are({"word": "${HOME}", "n": 1}), resolve=True)
    {'word': '${HOME}', 'n': 1}
    """
    return OmegaConf.create(_escaped(values))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: _escaped(inner) for key, inner in value.items()}
    return [_escaped(inner) for inner in value] if isinstance(value, list) else value


def read_config(values: Any) -> Config:
    """A `Config` from plain values, as in a run folder's config.yaml; checked.

    Raises:
        ConfigError: unknown keys, wrong types, values that cannot be used.
    """
    try:
        config = _by_sections(values) or cast(
            "Config", _typed(OmegaConf.structured(Config), values)
        )
    except OmegaConfBaseException as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"{error.full_key or 'the configuration'}: {reason}") from error
    check(config)
    return config


def _typed(schema: DictConfig, values: Any) -> Any:
    return OmegaConf.to_object(OmegaConf.merge(schema, as_they_are(values)))


def _by_sections(values: Any) -> Config | None:
    """As from all values at once, but each section, and each of its fields, once for all
    configurations that have it so: the points of a sweep differ in one or two. None where only the
    whole tells what is wrong.
    """
    if not isinstance(values, Mapping) or not _alone(Config).keys() >= values.keys():
        return None
    try:
        return cast("Config", _of_fields(Config, values))
    except (OmegaConfBaseException, pickle.PicklingError):
        return None


@cache
def _alone(kind: type) -> dict[str, DictConfig]:
    """A schema with nothing but it, for each field."""
    kinds = [
        make_dataclass(f.name, [(f.name, _hints(kind)[f.name], copy(f))]) for f in fields(kind)
    ]
    return {kind.__name__: OmegaConf.structured(kind) for kind in kinds}


_hints = cache(get_type_hints)


def _of_fields(kind: type, values: Mapping[str, Any]) -> Any:
    return kind(**{k: pickle.loads(_field(kind, k, pickle.dumps(v))) for k, v in values.items()})  # noqa: S301  # pickled here


@lru_cache(maxsize=4096)
def _field(kind: type, name: str, packed: bytes) -> bytes:
    values, inner = pickle.loads(packed), _hints(kind)[name]  # noqa: S301  # pickled above
    if _is_as_declared(values, inner):
        return packed  # nothing to convert, or to refuse
    section = isinstance(inner, type) and is_dataclass(inner) and isinstance(values, Mapping)
    if section and _alone(inner).keys() >= values.keys():
        return pickle.dumps(_of_fields(inner, values))
    return pickle.dumps(getattr(_typed(_alone(kind)[name], {name: values}), name))


def _is_as_declared(value: Any, kind: Any) -> bool:
    declared = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return type(value) in PLAIN and type(value) in declared and value != "???"


def to_yaml(config: Config) -> str:
    """The text of config.yaml; `read_config` of it is the same configuration."""
    return "".join(_yaml(name, pickle.dumps(value)) for name, value in plain(config).items())


@lru_cache(maxsize=4096)
def _yaml(name: str, packed: bytes) -> str:
    """Of one section, and of each of its fields, once for all configurations that have it so."""
    value = pickle.loads(packed)  # noqa: S301  # as above
    if not isinstance(value, dict) or len(value) < 2:
        return _of_one(name, value)
    fields = (_yaml(name, pickle.dumps({key: inner})) for key, inner in value.items())
    return "".join([f"{name}:\n", *(text.partition("\n")[2] for text in fields)])


@cache
def _sections(schema: type) -> dict[str, type | None]:
    """The keys of a schema, with the schema of each that is a section."""
    usual = {field.name: getattr(schema(), field.name) for field in fields(schema)}
    return {name: type(v) if is_dataclass(v) else None for name, v in usual.items()}


def _of_one(name: str, value: Any) -> str:
    if isinstance(value, dict) and len(value) == 1:
        [(key, inner)] = value.items()
        if type(inner) is int or (type(inner) is str and ROOTED.fullmatch(inner)):
            return _with_zero(name, pickle.dumps(key)).removesuffix("0\n") + f"{inner}\n"
    return OmegaConf.to_yaml(OmegaConf.create({name: value}))


@cache
def _with_zero(name: str, packed: bytes) -> str:
    return OmegaConf.to_yaml(OmegaConf.create({name: {pickle.loads(packed): 0}}))  # noqa: S301  # as above


def unknown_keys(found: Mapping[str, Any], schema: type = Config, prefix: str = "") -> list[str]:
    """A sentence for every key of `found` that the schema does not have, at any level."""
    known = _sections(schema)
    sentences: list[str] = []
    for key, value in found.items():
        if key not in known:
            sentences.append(f"there is no key '{prefix}{key}'{did_you_mean(str(key), known)}")
        elif (section := known[key]) is not None and isinstance(value, Mapping):
            sentences += unknown_keys(value, section, f"{prefix}{key}.")
    return sentences


@dataclass
class NoOptions:
    """Of what has none."""


def options_of(schema: type, values: Mapping[str, Any], key: str) -> Any:
    """A `schema`, a dataclass with a default for each field (`omegaconf.MISSING`: has to be set).

    Args:
        key: of the section, `cluster.options` say.

    Raises:
        ConfigError: a key that the schema does not have, a wrong type, or one that has to be set.
    """
    if schema is NoOptions and not values:
        return NoOptions()
    # Not above: `status` and its like ask clusters where runs stand, and read no options.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

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
