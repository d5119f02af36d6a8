"""Completion of our command lines in shells: keys, their values, choices of groups, run folders.

bash takes `=` for a word of its own and shows or inserts what follows it; zsh passes KEY=VALUE
whole. A key that is the only one left comes with its values, so that no shell puts a space after
the `=`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

MOST_RUNS = 200


def typed_words(environment: Mapping[str, str]) -> list[str]:
    """Return the words before the one that is completed, as the shell passes them to typer, which
    passes them to no callback. An `=` that bash has not found a value after is before it, too.

    >>> typed_words({"COMP_WORDS": "orchestrator plan job = di", "COMP_CWORD": "4"})
    ['orchestrator', 'plan', 'job', '=']
    >>> typed_words({"_TYPER_COMPLETE_ARGS": "orchestrator plan -cd mine job=di"})
    ['orchestrator', 'plan', '-cd', 'mine']
    """
    if "COMP_WORDS" in environment:
        words = environment["COMP_WORDS"].split()
        place = int(environment.get("COMP_CWORD", len(words)))
        return words[: place + (words[place : place + 1] == ["="])]
    line = environment.get("_TYPER_COMPLETE_ARGS", "")
    words = line.split()
    return words if line.endswith(" ") else words[:-1]


def complete_override(args: Sequence[str], incomplete: str) -> list[str]:
    """Return the overrides that a word may become.

    >>> complete_override([], "train.precision")
    ['train.precision=float32', 'train.precision=bfloat16', 'train.precision=float16', \
'train.precision=float64']
    >>> complete_override([], "+cluster=slurm_d")
    ['+cluster=slurm_dev']
    >>> complete_override(["transport", "="], "gl")  # as bash splits it
    ['gloo']
    """
    if len(args) > 1 and args[-1] == "=":
        key = args[-2]
        return _beginning(_values(key, _config_dir(args)), incomplete)
    key, equals, value = incomplete.partition("=")
    if equals:
        words = _beginning(_values(key, _config_dir(args)), value)
        return [f"{key}={word}" for word in words]
    prefix = key[: len(key) - len(key.lstrip("+"))]
    keys = _beginning(_keys(_config_dir(args)), key.lstrip("+"))
    if len(keys) != 1:
        return [f"{prefix}{name}=" for name in keys]
    [name] = keys
    values = _values(name, _config_dir(args)) or [""]
    return [f"{prefix}{name}={word}" for word in (values if len(values) > 1 else ["", *values])]


def complete_run(incomplete: str) -> list[str]:
    """Return the newest run folders and sweeps in `runs/` that a word may become; none for paths
    elsewhere, which shells complete by themselves.
    """
    folder = Path("runs")
    if not folder.is_dir():
        return []
    entries = [entry for entry in folder.iterdir() if entry.is_dir() and entry.name[:1] != "."]
    entries.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    return _beginning((str(entry) for entry in entries[:MOST_RUNS]), incomplete)


def _beginning(words: Iterable[str], start: str) -> list[str]:
    return [word for word in words if word.startswith(start)]


def _config_dir(args: Sequence[str]) -> str | None:
    """Return the user's folder of configurations, if one was typed and exists.

    >>> _config_dir(["launch", "--config-dir=/", "job="])
    '/'
    >>> _config_dir(["launch", "--config-dir", "=", "/", "job"])  # as bash splits it
    '/'
    """
    # The shell has not expanded ~ yet; a completion cannot report that a folder is missing.
    words = [word for arg in args for word in arg.split("=") if word]
    for flag, value in itertools.pairwise(words):
        if flag in ("-cd", "--config-dir") and (folder := Path(value).expanduser()).is_dir():
            return str(folder)
    return None


def _groups(config_dir: str | None) -> dict[str, list[str]]:
    """Return the choices of each group, the user's own first."""
    from orchestrator.config.loader import search_path

    groups: dict[str, list[str]] = {}
    for element in search_path(config_dir).get_path():
        root = Path(str(element.path).removeprefix("file://"))
        if not str(element.path).startswith("file://") or not root.is_dir():
            continue
        for file in sorted(root.glob("*/*.yaml")):
            choices = groups.setdefault(file.parent.name, [])
            if file.stem not in choices:
                choices.append(file.stem)
    return groups


def _keys(config_dir: str | None) -> list[str]:
    from orchestrator.config.changes import flat
    from orchestrator.config.schema import FREE_SECTIONS, Config, plain

    known = [key for key in flat(plain(Config())) if key.partition(".")[0] not in FREE_SECTIONS]
    return sorted({*_groups(config_dir), *known})


def _values(key: str, config_dir: str | None) -> list[str]:
    """Return the values that a key may have: its choices, or else its default."""
    from orchestrator.config.changes import flat
    from orchestrator.config.schema import Config, bounds_of, plain

    name = key.lstrip("+~")
    bound = bounds_of(Config).get(name)
    if bound is not None and bound.choice:
        return [*bound.choice]
    groups = _groups(config_dir)
    if name in groups:
        return groups[name]
    value = flat(plain(Config())).get(name, "")
    if isinstance(value, bool):
        return ["true", "false"]
    return [] if value in ("", [], {}) else ["null" if value is None else str(value)]
