"""Values of a free section of the configuration, made what the class that reads them says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConfigError


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

    from orchestrator.config.reading import unknown_keys

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
