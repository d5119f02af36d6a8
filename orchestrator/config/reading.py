"""A checked configuration from plain values, and its text."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, fields, make_dataclass
from functools import cache, lru_cache
from typing import Any, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.config.rules import check
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError


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
    """As from all values at once, but each section once for all configurations that have it so: the
    points of a sweep differ in one or two. None where only the whole tells what is wrong.
    """
    if not isinstance(values, Mapping) or not _alone().keys() >= values.keys():
        return None
    try:
        found = {name: pickle.loads(_section(name, pickle.dumps(v))) for name, v in values.items()}  # noqa: S301  # pickled here
    except (OmegaConfBaseException, pickle.PicklingError):
        return None
    return Config(**found)


@cache
def _alone() -> dict[str, DictConfig]:
    """A schema with nothing but it, for each section."""
    hints = get_type_hints(Config)
    kinds = [make_dataclass(f.name, [(f.name, hints[f.name], copy(f))]) for f in fields(Config)]
    return {kind.__name__: OmegaConf.structured(kind) for kind in kinds}


@lru_cache(maxsize=1024)
def _section(name: str, packed: bytes) -> bytes:
    values = pickle.loads(packed)  # noqa: S301  # pickled above
    return pickle.dumps(getattr(_typed(_alone()[name], {name: values}), name))


def to_yaml(config: Config) -> str:
    """The text of config.yaml; `read_config` of it is the same configuration."""
    return "".join(_yaml(pickle.dumps({name: v})) for name, v in asdict(config).items())


@lru_cache(maxsize=1024)
def _yaml(packed: bytes) -> str:
    """Of one section, once for all configurations that have it so."""
    return OmegaConf.to_yaml(OmegaConf.create(pickle.loads(packed)))  # noqa: S301  # as above
