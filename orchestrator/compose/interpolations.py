"""Values of a composition that refer to others: where they stand, and to what they refer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from orchestrator.compose.resolvers import CONSTANT

OF_A_POINT = ("hydra.job.num", "hydra.job.id")
REFERENCE = re.compile(r"\$\{(?:(\.*)([A-Za-z_]\w*(?:\.\w+)*)\}|([A-Za-z_][\w.]*):)")


def within(one: str, other: str) -> bool:
    """Whether a key is another one, or below it."""
    return one == other or one.startswith(f"{other}.")


def interpolations(found: DictConfig) -> dict[str, tuple[str, ...] | None]:
    """Whatever refers to something, by its key, with the whole keys that it refers to; None where
    these cannot be told from its text.
    """
    return dict(_below(OmegaConf.to_container(found, resolve=False), ""))


def _below(value: Any, path: str) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            plain = isinstance(key, int) if isinstance(value, list) else isinstance(key, str)
            for name, refers_to in _below(inner, f"{path}.{key}" if path else str(key)):
                yield name, refers_to if plain and "." not in str(key) else None
    elif isinstance(value, str) and "${" in value:
        yield path, _references(value, path)


def _references(text: str, path: str) -> tuple[str, ...] | None:
    found = list(REFERENCE.finditer(text))
    if len(found) != text.count("${"):
        return None
    names: list[str] = []
    for dots, name, resolver in (match.groups() for match in found):
        if resolver is not None:
            if resolver not in CONSTANT:
                return None
            continue
        full = ".".join([*(path.split(".")[: -len(dots)] if dots else []), name])
        if within(full, "hydra") and full not in OF_A_POINT:
            return None
        names.append(full)
    return tuple(names)
