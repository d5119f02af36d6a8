"""A checked configuration from plain values, and its text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from omegaconf import OmegaConf
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
        merged = OmegaConf.merge(OmegaConf.structured(Config), as_they_are(values))
        config = cast("Config", OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"{error.full_key or 'the configuration'}: {reason}") from error
    check(config)
    return config


def to_yaml(config: Config) -> str:
    """The text of config.yaml; `read_config` of it is the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
