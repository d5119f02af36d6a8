"""Points of a sweep that differ in plain values alone: one is composed, the others set theirs.

Composing a point takes Hydra a tenth of a second, and all of a sweep's points choose the same files
as a rule. So a composition is kept, and where nothing but numbers, words and truths differ, those
are set in it, and what refers to them is worked out anew. Whatever might mean more than its
own place is left to be composed whole: choices of groups, lists and mappings, `~`, keys of
Hydra's, what says which job or optimizer is meant, and interpolations that cannot be followed here.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from orchestrator.compose.composed import Composed, at_home
from orchestrator.compose.hydra.loader import Loader
from orchestrator.compose.interpolations import OF_A_POINT, interpolations, within

MOST_SHAPES = 64  # kept compositions, of some MiB each
FOLDERS = ("hydra.sweep.dir", "hydra.sweep.subdir")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(\.[0-9]+)?")  # as Python reads it, and Hydra
KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*")
SETTING = (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """One override of a point.

    Attributes:
        way: `key=`, `+key=`, `++key=` or `~key`.
        value: None as well where it is not `plain`.
        plain: it sets one value in its place, and may be another one in another point.
        sets: it sets values, and chooses no file.
    """

    text: str
    key: str
    way: OverrideType
    value: Any
    plain: bool
    sets: bool


def _overlap(one: str, other: str) -> bool:
    return within(one, other) or within(other, one)


class Alike:
    """Knows the compositions that were made, and composes what differs from one in values alone.

    Args:
        primary: name of the primary configuration.
        telling: keys that say what a composition is made of, so that no value of theirs is plain.
    """

    def __init__(self, loader: Loader, primary: str, telling: Collection[str]) -> None:
        self._loader, self._primary, self._telling = loader, primary, telling
        self._words: dict[str, Word] = {}
        self._numbers: dict[tuple[str, type], Word] = {}
        self._groups: dict[str, bool] = {}
        self._repository: Any = None
        self._shapes: dict[Any, Shape | tuple[Any, ...] | None] = {}

    def composed(self, number: int, overrides: Sequence[str]) -> Composed | None:
        """A point as composing it whole would have it; None where that has to be done."""
        words = self._read(overrides)
        key = _shape_of(words) if words else None
        shape = self._shapes.get(key)
        if words is None or shape is None:
            return None
        if isinstance(shape, tuple):  # the second of its kind: worth to be looked at
            shape = self._shapes[key] = self._shape(*shape)
        return shape.point(number, overrides, words) if shape else None

    def keep(self, overrides: Sequence[str], found: DictConfig, whole: Composed) -> None:
        """Remember a composition that was just made."""
        words = self._read(overrides)
        if words and len(self._shapes) < MOST_SHAPES:
            before = frozenset(self._loader.interpolated)
            self._shapes.setdefault(_shape_of(words), (found, whole, words, before))

    def _read(self, overrides: Sequence[str]) -> list[Word] | None:
        """None where composing them says what is wrong, or where they choose other files."""
        try:
            words = [self._words.get(text) or self._number(text) for text in overrides]
        except HydraException:
            return None
        return None if any(word.key == "hydra.searchpath" for word in words) else words

    def _number(self, text: str) -> Word:
        """A word; where it is another number for a key that had one, without Hydra's parser."""
        key, _, value = text.partition("=")
        found = NUMBER.fullmatch(value)
        kind = float if found and found[1] else int
        like = self._numbers.get((key, kind)) if found else None
        word = replace(like, text=text, value=kind(value)) if like else self._word(text)
        if found and word.plain and type(word.value) is kind:
            self._numbers[key, kind] = word
        return word

    def _word(self, text: str) -> Word:
        [parsed] = OverridesParser.create().parse_overrides([text])
        key = parsed.key_or_group
        if key not in self._groups:
            if self._repository is None:
                self._repository = self._loader.files(self._primary)
            self._groups[key] = self._repository.group_exists(key)
        sets = not self._groups[key] or parsed.package is not None
        plain = sets and self._is_plain(parsed)
        word = Word(
            text=text,
            key=key,
            way=parsed.type,
            value=parsed.value() if plain else None,
            plain=plain,
            sets=sets,
        )
        self._words[text] = word
        return word

    def _is_plain(self, parsed: Override) -> bool:
        key = parsed.key_or_group
        if parsed.type not in SETTING or parsed.value_type is not ValueType.ELEMENT:
            return False
        if parsed.package is not None or not KEY.fullmatch(key):
            return False
        if within(key, "hydra") or any(_overlap(key, told) for told in self._telling):
            return False
        value = parsed.value()
        if isinstance(value, str):
            return "${" not in value and value != "???"
        return value is None or isinstance(value, bool | int | float)

    def _shape(
        self, found: DictConfig, whole: Composed, words: Sequence[Word], before: frozenset[str]
    ) -> Shape | None:
        """None where another point's values could mean more than their places."""
        referring = interpolations(found)
        paths = before | referring.keys()
        setting = [word for word in words if word.sets]
        for number, word in enumerate(setting):
            if word.way not in SETTING or any(within(word.key, path) for path in paths):
                return None
            others = setting[:number] + setting[number + 1 :]
            if word.plain and any(_overlap(word.key, other.key) for other in others):
                return None
            if word.plain and not _is_leaf(found, word.key):
                return None
        if any(_overlap(path, told) for path in paths for told in self._telling):
            return None
        ours: dict[str, tuple[str, ...]] = {}
        for path, names in referring.items():
            if not within(path, "hydra") or path in FOLDERS:
                if names is None:
                    return None
                ours[path] = names
        return Shape(found, whole, words, ours)


def _shape_of(words: Sequence[Word]) -> Any:
    return tuple((word.key, word.way) if word.plain else word.text for word in words)


class Shape:
    """One composition, in which points set their values.

    Args:
        found: as Hydra composed it; changed from here on.
        words: that it was composed with.
        referring: all that may have to be worked out anew, and to what it refers.
    """

    def __init__(
        self,
        found: DictConfig,
        whole: Composed,
        words: Sequence[Word],
        referring: Mapping[str, Collection[str]],
    ) -> None:
        self._found, self._whole, self._referring = found, whole, referring
        self._values = pickle.dumps(whole.values)
        self._original = [word.text for word in words]
        self._standing = list(self._original)
        self._folders = {key: _worked_out(found, key) for key in FOLDERS}
        self._affected = cache(self._find_affected)

    def point(
        self, number: int, overrides: Sequence[str], words: Sequence[Word]
    ) -> Composed | None:
        """The point of these overrides; None where a value is none that its place takes."""
        values = pickle.loads(self._values)  # noqa: S301  # what was put there a moment ago
        try:
            self._set(number, words)
            changed = frozenset(
                word.key
                for word, before in zip(words, self._original, strict=True)
                if word.text != before
            )
            found = {key: _worked_out(self._found, key) for key in self._affected(changed)}
            for key, value in found.items():
                if not within(key, "hydra"):
                    _put(values, key.split("."), value)
            folder, part = ({**self._folders, **found}[key] for key in FOLDERS)
        except (OmegaConfBaseException, TypeError, ValueError, LookupError):
            return None  # composed whole, it is refused in the right words
        if "job" in values:
            values["job"] = at_home(values["job"])
        return replace(
            self._whole,
            values=values,
            overrides=tuple(overrides),
            sweep_folder=Path(folder),
            point_folder=Path(folder, str(part)),
        )

    def _set(self, number: int, words: Sequence[Word]) -> None:
        """Make this point's of the composition."""
        for index, word in enumerate(words):
            if word.plain and self._standing[index] != word.text:
                self._standing[index] = ""  # until it is known to be one that can be set
                OmegaConf.update(self._found, word.key, word.value)
                self._standing[index] = word.text
        hydra = self._found.hydra
        with read_write(hydra), open_dict(hydra):
            hydra.job.num, hydra.job.id = number, str(number)

    def _find_affected(self, keys: frozenset[str]) -> list[str]:
        """These keys, and what refers to them, or to others that do."""
        reached = [*keys, *OF_A_POINT]
        while more := [
            path
            for path, names in self._referring.items()
            if path not in reached and any(_overlap(n, key) for n in names for key in reached)
        ]:
            reached += more
        return [key for key in reached if key not in OF_A_POINT]


def _worked_out(found: DictConfig, key: str) -> Any:
    value = OmegaConf.select(found, key, throw_on_missing=True)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _is_leaf(found: DictConfig, key: str) -> bool:
    value = OmegaConf.select(found, key)
    return value is not None and not OmegaConf.is_config(value)  # what is null may be a section


def _put(values: Any, keys: Sequence[str], value: Any) -> None:
    """Set one of plain values. Raises `LookupError`, `ValueError` where there is no such place."""
    for key in keys[:-1]:
        values = values[int(key)] if isinstance(values, list) else values[key]
    last: Any = int(keys[-1]) if isinstance(values, list) else keys[-1]
    values[last]  # it was there before
    values[last] = value
