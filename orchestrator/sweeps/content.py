"""What a cell of a sweep is made of, so that the same sweep typed again runs only what differs.

A cell is done once it has finished with this configuration, code, data and these versions. Each is
kept as a digest in its submission.json; what changed is told by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.config.bounds import plain
from orchestrator.config.schema import Config
from orchestrator.config.user_code.class_source import once
from orchestrator.config.user_code.program_section import is_program, program_of, target_of
from orchestrator.config.user_code.program_source import copied_script
from orchestrator.run_folder.rundir import RunDir
from orchestrator.runs.resuming.rules import changes, flat
from orchestrator.snapshot.code_copy import digests_of_code

CELL = "cell"  # in submission.json
# Sections and keys that say where, when and how long to wait: a result does not depend on them.
NOT_MADE_OF = (
    "run", "sweep", "budget", "facts", "tracker", "cluster.partition", "cluster.account",
    "cluster.qos", "cluster.exclude", "cluster.reservation", "cluster.comment",
    "cluster.memory_gib", "cluster.time_min", "cluster.signal_ahead_s", "cluster.requeue",
    "cluster.allocation", "cluster.exclusive", "cluster.slurm_conf", "cluster.slurm_flags",
    "cluster.srun_flags", "cluster.interface", "cluster.rendezvous_timeout_s",
    "cluster.collective_timeout_s", "cluster.heartbeat_timeout_s", "cluster.hang_timeout_s",
)  # fmt: skip
PACKAGES = ("cluster-orchestrator", "torch", "mindspore", "numpy")
MOST_FILES = 10_000
NO_NAMES = ("", ".", "..")


def made_of(config: Config, overrides: tuple[str, ...]) -> dict[str, Any]:
    """What a point would be made of now: its place in the sweep, and digests of all it depends on.

    Args:
        overrides: that tell it from the sweep's other points.
    """
    return {
        "of": sorted(overrides),
        "config": _digest(_counted(plain(config))),
        "code": _code(config),
        "data": {key: once("stamp", _stamp, path) for key, path in _paths(config)},
        "versions": dict(_versions()),
    }


def why_changed(
    run: RunDir, before: Mapping[str, Any], now: Mapping[str, Any], config: Config
) -> str | None:
    """What differs between a cell as it ran and as it is asked for; None where nothing does."""
    causes: list[str] = []
    if before.get("config") != now["config"]:
        old, new = _counted(run.read_config()), _counted(plain(config))
        causes += [change.text for change in changes(old, new)] or ["the configuration"]
    for name, digest in now["code"].items():
        if (before.get("code") or {}).get(name) != digest:
            causes.append(f"code in {name}")
    read, there = before.get("data") or {}, now["data"]
    # What was not there when it began it has not read: it may have written it.
    causes += [f"files of {key}" for key in sorted(read) if read[key] != there.get(key)]
    old, new = before.get("versions") or {}, now["versions"]
    causes += [
        f"{key} (was {old.get(key)})"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    return ", ".join(causes) or None


def _counted(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a result depends on, by dotted key. Sections that older runs lack are at their
    defaults.
    """
    return {k: v for k, v in flat(values) if not _starts(k) and v not in (None, {}, [])}


@lru_cache(maxsize=4096)
def _starts(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in NOT_MADE_OF)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


_codes: dict[Any, dict[str, str]] = {}


def _code(config: Config) -> dict[str, str]:
    """Digests of the source folders that a job's copy would hold, by folder; read once a command,
    so that all points are made of one state of it.
    """
    target = target_of(config.job)
    key = target if isinstance(target, str) else target.command
    if key not in _codes:
        _codes[key] = digests_of_code(target)
    return _codes[key]


def _paths(config: Config) -> Iterator[tuple[str, Path]]:
    """What the job may read that is there: its arguments that name it; of a program's command the
    files, for folders are mostly what it writes into; and the initial weights.
    """
    for key, value in flat(config.job):
        texts: list[Any] = value if isinstance(value, list) else [value]
        for path in _there(texts) if key != "command" else ():
            yield f"job.{key}" if texts is not value else f"{path} in job.{key}", path
    if is_program(config.job):
        program = program_of(config.job)
        own = copied_script(program)  # which is code
        words = [*program.command, *(word.partition("=")[2] for word in program.command)]
        yield from ((str(p), p) for p in _there(words) if p.is_file() and p.absolute() != own)
    for path in _there([config.train.initial_weights]):
        saved = RunDir(path).checkpoints
        yield "train.initial_weights", saved if saved.is_dir() else path


def _there(texts: Sequence[Any]) -> Iterator[Path]:
    """Those that are names of something; not what is no name at all, as a sentence with a slash in
    it, or may not be looked at.
    """
    for text in texts:
        if not isinstance(text, str) or text in NO_NAMES:
            continue
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # "~nobody" is no home
            path = Path(text).expanduser()
            path.stat()
            yield path


def _stamp(path: Path) -> str:
    """A digest of a file's, or a folder's files', names, sizes and times: contents may be large."""
    whole = hashlib.sha256()
    for file in islice(_files(path), MOST_FILES):
        facts = file.stat()
        told = f"{file.relative_to(path)} {facts.st_size} {facts.st_mtime_ns}\n"
        whole.update(told.encode("utf-8", "surrogateescape"))  # a name may be any bytes
    return whole.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names) if Path(folder, name).is_file())


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    """Of Python and the packages that compute, as they are installed here."""
    found = [("python", ".".join(map(str, sys.version_info[:3])))]
    for name in PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)
