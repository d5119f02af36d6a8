"""Write docs/reference/configuration.md from the schema and a sentence for each key.

Usage: `python -m orchestrator.config.reference > docs/reference/configuration.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from orchestrator.config.bounds import Bound
from orchestrator.config.meanings import MEANINGS
from orchestrator.config.schema import Config

HEAD = """# Every key of the configuration

Set a key as `key=value` after `python -m orchestrator.launch`, or in a file of your own
(`--config-dir`). `python -m orchestrator.launch --cfg job` prints the resulting configuration.
Other keys and values are refused, with the nearest valid one. The groups `cluster=`, `job=`,
`optimizer=`, `tracker=` and `experiment=` set several keys at once, to defaults other than these.

`python -m orchestrator.config.reference > docs/reference/configuration.md` generates this page; a
test checks that it is current.

| key | type | default | may be | what it does |
|---|---|---|---|---|
"""


def keys(schema: Any = Config, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Every key by its dotted name, sections opened."""
    for item in fields(schema):
        section = item.default_factory
        if section is not MISSING and is_dataclass(section):
            yield from keys(section, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item


def markdown() -> str:
    """The page. Raises `KeyError` for a key without a sentence."""
    return HEAD + "".join(_row(key, item) for key, item in keys())


def _row(key: str, item: Field[Any]) -> str:
    bound: Bound = item.metadata.get("bound", Bound())
    kind = str(item.type).replace(" | None", " or null").replace("Any", "any")
    return f"| `{key}` | {kind} | {_default(item)} | {_allowed(bound)} | {MEANINGS[key]} |\n"


def _default(item: Field[Any]) -> str:
    value = item.default
    if value is MISSING:
        return "empty"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _allowed(bound: Bound) -> str:
    if bound.choice:
        return ", ".join(bound.choice)
    least = "" if bound.least is None else f"{bound.least:,.12g} or more"
    above = "" if bound.above is None else f"above {bound.above:,.12g}"
    most = "" if bound.most is None else f"at most {bound.most:,.12g}"
    return ", ".join(filter(None, (least, above, most)))


if __name__ == "__main__":
    sys.stdout.write(markdown())
