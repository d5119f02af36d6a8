"""Inputs of a run: the code and data that it depends on, recorded at its start and compared later.

Code is found from the source, as nothing is imported on the submitting side: the files of the
user's own that the job or script imports, directly or through others. Installed packages count by
their versions. Data are the files and folders that the job's arguments name, and the defaults of
its constructor.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import math
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.config.changes import flat
from orchestrator.config.job_source import calls_current_run, copied_script
from orchestrator.config.program import is_program, program_of, target_of
from orchestrator.config.reading import RUN_FOLDER
from orchestrator.config.schema import Config
from orchestrator.errors import RunFolderError
from orchestrator.rundir.checkpoints import file_sha256, kept_checkpoint, split_reference
from orchestrator.rundir.files import names_in, read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics
from orchestrator.snapshot import code_files
from orchestrator.source.modules import PACKAGE, cached, find_class, is_in_interpreter

INPUTS = "inputs"  # in submission.json
PACKAGES = ("cluster-orchestrator", "torch", "mindspore", "numpy")
MOST_FILES = 10_000
# Prefixes of keys that name data; a command's arguments may be paths.
KEYS = ("job.", "train.initial_weights", "train.initial_state")
NO_NAMES = ("", ".", "..")
REPORTS = "reports"  # a program's source records its updates
MOST_UNRECORDED_S = 60.0  # of a program that records nothing and is taken to have done nothing


def inputs_of(config: Config) -> dict[str, Any]:
    """Return the present inputs of a run with this configuration.

    Returns:
        `code`: SHA-256 of each file, by path; `data`: a digest of each file's or folder's stamps,
        by what names it; `times`: when the newest file of each was written, in seconds;
        `versions` of Python and of the packages that compute.
        Of a program that records its updates also `reports`: true.
    """
    files = code_files(target_of(config.job))
    stamps = {key: _stamped(path) for key, path in _data(config)}
    inputs: dict[str, Any] = {
        "code": {str(path): _sha256(path) for path in files},
        "data": {key: stamp for key, (stamp, _) in stamps.items()},
        "times": {key: moment for key, (_, moment) in stamps.items()},
        "versions": dict(_versions()),
    }
    if is_program(config.job) and calls_current_run(program_of(config.job), ("report", "windows")):
        inputs[REPORTS] = True
    return inputs


def has_done_nothing(run: RunDir, config: Config) -> bool:
    """Return whether a program that has ended certainly, or very likely, has computed nothing.

    Nothing was recorded and nothing saved; and it records its updates, or its attempts took less
    than a minute together. One whose words name the run's folder may have saved there.
    """
    program = program_of(config.job)
    words = (*program.argv, *program.resume_arguments)
    names_run = any(RUN_FOLDER in word or str(run.path) in word for word in words)
    if program.resume_arguments or names_run:
        return False
    if read_metrics(run.metrics).updates or names_in(run.checkpoints):
        return False
    if (run.read_submission().get(INPUTS) or {}).get(REPORTS):
        return True
    ends = [read_json(run.program_end(number)) for number in run.attempt_numbers()]
    return all(ends) and sum(end["seconds"] for end in ends if end) < MOST_UNRECORDED_S


def differences(run: RunDir, before: Mapping[str, Any], config: Config) -> list[str]:
    """Return the changes in the code and data of a run, as sentences.

    Data that the run may have written does not count: files of which the newest was last written
    while it ran, and none was replaced or removed later; see `rewritten_data`.

    Args:
        before: as `inputs_of` recorded it.
    """
    sentences: list[str] = []
    for name, digest in sorted((before.get("code") or {}).items()):
        now = _sha256(Path(name))
        if now != digest:
            sentences.append(f"{_shown(name)} {'is gone' if now is None else 'has changed'}")
    for key, _, is_of_run in _changed_data(run, before, config):
        if not is_of_run:
            sentences.append(
                f"files of {key} have changed" if key.startswith(KEYS) else f"{key} has changed"
            )
    return sentences


def rewritten_data(run: RunDir, before: Mapping[str, Any], config: Config) -> list[str]:
    """Return, as sentences, the data of a job class with files that were there when the run began,
    and were written or removed while it ran. The run may have done that (a lock, an index), or
    another process.

    New files do not count, nor does the data of a program, which may write there.

    Args:
        before: as `inputs_of` recorded it.
    """
    if is_program(config.job):
        return []
    times = before.get("times") or {}
    began = run.read_submission().get("time") or 0.0
    return [
        f"files of {key} that the run began with were written while it ran, perhaps by itself"
        for key, path, is_of_run in _changed_data(run, before, config)
        # The run's folder may be in the data, with files that change.
        if path and is_of_run and not run.path.is_relative_to(path.absolute())
        if _stamped(path, times.get(key, began))[0] != before["data"][key]
    ]


def _changed_data(
    run: RunDir, before: Mapping[str, Any], config: Config
) -> Iterator[tuple[str, Path | None, bool]]:
    """Yield the keys of data that is not as before, its path, and whether it was last written
    while the run ran. A path is None if it is gone.
    """
    there = dict(_data(config))
    began = run.read_submission().get("time") or 0.0
    logs = [run.logs / name for name in names_in(run.logs)] if run.logs.is_dir() else []
    outcomes = [run.outcome(number) for number in run.attempt_numbers()]
    ended = _newest([run.metrics, run.result, run.checkpoints, *outcomes, *logs])
    for key, stamp in sorted((before.get("data") or {}).items()):
        path = there.get(key)
        if path is None:
            yield key, None, False
            continue
        now, newest = _stamped(path)
        if now != stamp:
            yield key, path, began <= newest and _changed_at(path, run) <= ended


def _changed_at(path: Path, run: RunDir) -> float:
    """Return when a file or folder last changed, apart from the run's folder in it.

    A file may be replaced by one with an older time, so the time counts at which it got there, too;
    one that is removed changes the time of its folder.
    """
    newest = 0.0
    for entry in islice(_entries(path, without=run.path), MOST_FILES):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            facts = entry.stat()
            # The inode of a folder changes with its mode, too, which is none of its content.
            changed = facts.st_mtime if stat.S_ISDIR(facts.st_mode) else facts.st_ctime
            newest = max(newest, facts.st_mtime, changed)
    return newest


def _entries(path: Path, *, without: Path | None = None) -> Iterator[Path]:
    """Yield a file, or a folder with all folders and files below it, except one folder."""
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if Path(folder, f).absolute() != without)
        yield Path(folder)
        yield from (Path(folder, name) for name in sorted(names))


def _newest(paths: Iterable[Path]) -> float:
    """Return when the last of these files was written; 0 if none exists."""
    newest = 0.0
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # others write there, too
            newest = max(newest, path.stat().st_mtime)
    return newest


def accepted(before: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return inputs as they are now, but only data that `before` has: the run may have written the
    rest.
    """
    now, data = inputs_of(config), before.get("data") or {}
    return {**now, "data": {key: stamp for key, stamp in now["data"].items() if key in data}}


def other_versions(before: Mapping[str, Any]) -> list[str]:
    """Return which of the recorded versions are others now."""
    old, new = before.get("versions") or {}, dict(_versions())
    return [
        f"{key} (was {old.get(key)})"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def code_differences(a: RunDir, b: RunDir) -> list[str]:
    """Return how the commits and files of two runs differ; nothing where they are not recorded."""
    left, right = (
        str(((run.read_environment() or {}).get("git") or {}).get("commit") or "") for run in (a, b)
    )
    sentences: list[str] = []
    if left and right and left != right:
        sentences.append(f"commit {left:.12} against {right:.12}")
    both = [(run.read_submission().get(INPUTS) or {}).get("code") or {} for run in (a, b)]
    if not all(both):
        return sentences
    if not both[0].keys() & both[1].keys():  # two copies of the code, in different folders
        both = [_below_common_folder(code) for code in both]
    left, right = both
    common = sorted(left.keys() & right.keys())
    sentences += [f"{_shown(name)} differs" for name in common if left[name] != right[name]]
    for run, names in ((a, left.keys() - right.keys()), (b, right.keys() - left.keys())):
        sentences += [f"{_shown(name)} is used by {run.path} only" for name in sorted(names)]
    return sentences


def _below_common_folder(code: Mapping[str, str]) -> dict[str, str]:
    folder = os.path.commonpath([os.path.dirname(name) for name in code])  # noqa: PTH120
    return {os.path.relpath(name, folder): digest for name, digest in code.items()}


def _shown(name: str) -> str:
    path = Path(name)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


@cached
def _sha256(path: Path) -> str | None:
    try:
        return file_sha256(path)
    except OSError:
        return None


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    versions = [("python", ".".join(map(str, sys.version_info[:3])))]
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append((name, version(name)))
    if not is_in_interpreter(PACKAGE):
        # Run from its source, whose version stays while it is edited.
        whole = hashlib.sha256()
        for path in sorted(PACKAGE.rglob("*.py")):
            whole.update(path.read_bytes())
        versions.append((f"the source in {PACKAGE}", whole.hexdigest()[:12]))
    return tuple(versions)


# ------------------------------------------------------------------ Data


def _data(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield the paths that the job may read, each with the key or argument that names it.

    Of a job these are its arguments and defaults, of a program's command only files (folders are
    mostly outputs), and in both cases the initial weights.
    """
    for key, value in flat(config.job).items():
        texts: list[Any] = value if isinstance(value, list) else [value]
        for path in _existing(texts) if key != "command" else ():
            yield f"job.{key}" if texts is not value else f"{path} (job.{key})", path
    if is_program(config.job):
        program = program_of(config.job)
        own = copied_script(program)  # it is code, not data
        values = [*program.command, *(a.partition("=")[2] for a in program.command)]
        yield from ((str(p), p) for p in _existing(values) if p.is_file() and p.absolute() != own)
    else:
        target = str(config.job["_target_"])
        for key, value in _constructor_defaults(target).items():
            if key not in config.job:
                yield from ((f"job.{key}", path) for path in _existing([value]))
    for key in ("initial_weights", "initial_state"):
        reference = getattr(config.train, key)
        folder, which = (None, None) if reference is None else split_reference(reference)
        for path in _existing([folder]):
            run = RunDir(path)
            if not run.checkpoints.is_dir():  # a file of weights
                yield f"train.{key}", path
            elif which is None:
                yield f"train.{key}", run.checkpoints
            else:
                with contextlib.suppress(RunFolderError):  # the run has a copy
                    yield f"train.{key}", kept_checkpoint(run, which)


def _constructor_defaults(target: str) -> dict[str, Any]:
    """Return the literal defaults of a class's constructor, as its source states them; also of a
    data class.
    """
    source = find_class(target)
    defaults: list[tuple[str, ast.expr | None]] = []
    for node in source.members.values() if source else ():
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            parameters = node.args
            names = [parameter.arg for parameter in (*parameters.posonlyargs, *parameters.args)]
            defaults += zip(names[::-1], parameters.defaults[::-1], strict=False)
            defaults += zip(
                (parameter.arg for parameter in parameters.kwonlyargs),
                parameters.kw_defaults,
                strict=True,
            )
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defaults.append((node.target.id, node.value))
    return {key: value.value for key, value in defaults if isinstance(value, ast.Constant)}


def _existing(texts: Sequence[Any]) -> Iterator[Path]:
    """Yield the texts that are paths of something; skip those that may not be read."""
    for text in texts:
        if not isinstance(text, str) or text in NO_NAMES:
            continue
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # "~nobody" is no home
            path = Path(text).expanduser()
            path.stat()
            yield path


@cached
def _stamped(path: Path, until: float = math.inf) -> tuple[str, float]:
    """Return a digest of the names, sizes and times of a file or a folder's files, since contents
    may be large; and when the newest of them was written, by the clock that files have: a file
    server's may differ from this machine's.

    Args:
        until: leave out files that were written later: all that are new since, if none changed.
    """
    whole, count, newest = hashlib.sha256(), 0, 0.0
    for file in _files(path):
        try:
            facts = file.stat()
        except FileNotFoundError:  # another process writes there
            continue
        if facts.st_mtime > until:
            continue
        count += 1
        if count > MOST_FILES:
            break
        newest = max(newest, facts.st_mtime)
        line = f"{file.relative_to(path)} {facts.st_size} {facts.st_mtime_ns}\n"
        whole.update(line.encode("utf-8", "surrogateescape"))  # a name may be any bytes
    return whole.hexdigest(), newest


def _files(path: Path) -> Iterator[Path]:
    return (entry for entry in _entries(path) if entry.is_file())
