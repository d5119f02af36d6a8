"""Keys that a sweep's line states twice: by one name, or in a table and by a name inside it.

Hydra would take what stands last, and the points that the other one asks for would be missing, or
be one and the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Override

from orchestrator.errors import ConfigError


def refuse_twice(parsed: Sequence[Override], is_group: Callable[[str], bool]) -> None:
    """Raise `ConfigError` for a key that is stated twice where one of them is a sweep, or its
    folder.

    Args:
        is_group: whether a name is one of a group of files: `optimizer=adamw optimizer.lr=1,2`
            chooses a file and changes one key of it.
    """
    kept = [one for one in parsed if not one.is_delete()]
    stated: dict[tuple[str, str | None], list[Override]] = {}
    for one in kept:
        stated.setdefault((_name(one), one.package), []).append(one)
    for (key, _), several in stated.items():
        _refuse_one_name(key, several)
    for one, other in combinations(kept, 2):
        _refuse_inside(one, other, is_group)


def _name(one: Override) -> str:
    return one.key_or_group.replace("/", ".")


def _refuse_one_name(key: str, several: Sequence[Override]) -> None:
    lines = [str(one.input_line) for one in several]
    swept = [str(one.input_line) for one in several if one.is_sweep_override()]
    if len(several) > 1 and (swept or key == "run.dir"):
        once = swept[-1] if swept else lines[-1]
        values = ",".join(line.partition("=")[2] for line in lines)
        if swept and not set(values) & set("([{'\""):
            once = f"{key}={','.join(dict.fromkeys(values.split(',')))}"
        raise ConfigError(
            f"{' and '.join(lines)}: {key} is stated {len(several)} times, and only the last would "
            f"count; state it once, as in {once}"
        )


def _refuse_inside(one: Override, other: Override, is_group: Callable[[str], bool]) -> None:
    """The same where one of two is named inside the other, as optimizer.lr is in optimizer."""
    outer, inner = sorted((one, other), key=lambda each: len(_name(each)))
    if not _name(inner).startswith(f"{_name(outer)}."):
        return
    if not (one.is_sweep_override() or other.is_sweep_override() or _name(inner) == "run.dir"):
        return
    both = [
        max(a, b, key=len)
        for a in _keys(outer, is_group)
        for b in _keys(inner, is_group)
        if _holds(a, b) or _holds(b, a)
    ]
    if both:
        raise ConfigError(
            f"{one.input_line} and {other.input_line}: {both[0]} is stated 2 times, and only the "
            f"last would count; state it once, and leave it out of {outer.input_line}"
        )


def _holds(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")


def _keys(one: Override, is_group: Callable[[str], bool]) -> list[str]:
    """All keys that it sets to a value, in any point; a table is merged into what is there, so it
    sets those that it names. None where it chooses files of a group.
    """
    value: Any = one.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    group = is_group(one.key_or_group)
    return [
        key
        for each in values or ()
        if isinstance(each, Mapping) or not group
        for key in _inside(_name(one), each)
    ]


def _inside(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield name
        return
    for key, each in value.items():
        yield from _inside(f"{name}.{key}", each)
