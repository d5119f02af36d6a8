"""Whether a weights file fits a model: names, shapes and dtypes, said tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from orchestrator.errors import ConfigError, did_you_mean

Kinds = Mapping[str, tuple[str, tuple[int, ...]]]  # name: dtype, shape
MOST_NAMED = 5


def check_fits(path: Path, found: Kinds, wanted: Kinds) -> None:
    """Not collective; every rank comes to the same end.

    Args:
        found: tensors of the file; wanted: those of the model.

    Raises:
        ConfigError: they are not alike; the first few that differ are named.
    """
    wrong: list[str] = []
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            wrong.append(f"it lacks {name}{did_you_mean(name, found)}")
        elif name not in wanted:
            wrong.append(f"it has {name}, which this model has not{did_you_mean(name, wanted)}")
        elif found[name] != wanted[name]:
            wrong.append(f"{name} is {_words(*found[name])}, but must be {_words(*wanted[name])}")
    if not wrong:
        return
    more = len(wrong) - MOST_NAMED
    raise ConfigError(
        f"train.initial_weights: {path} does not fit this model: "
        + "; ".join(wrong[:MOST_NAMED])
        + (f"; and {more} more" if more > 0 else "")
    )


def _words(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
