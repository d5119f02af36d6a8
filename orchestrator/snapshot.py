"""Copies of the code of a run, made at submission, so that the submitted code is what runs.

A queued job may start days later, and again after every preemption. It imports from its copy, so
editing files meanwhile changes nothing. Copied are the source folders that hold this package and
the job's module, as git sees them: tracked, modified and new files, of the ignored ones those that
the job certainly imports, and no files that hold secrets by their names. Installed packages are not
copied.

A copy is a folder `code/NNN` of a run, or of a sweep whose runs share it, with one folder for each
source folder (`0`, `1`) and a record of what it holds (`copy.json`). All nodes import from it.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.config.job_source import copied_script, source_files
from orchestrator.config.program import ProgramConfig
from orchestrator.errors import RunFolderError
from orchestrator.rundir.files import (
    is_unreadable_now,
    make_folder,
    read_json,
    remove,
    write_json,
)
from orchestrator.source.git import GitRefusal, code_state, is_secret, listed_files
from orchestrator.source.modules import (
    PACKAGE,
    cached,
    find_module,
    is_in_interpreter,
    is_installed,
)
from orchestrator.units import format_bytes

LIMIT_BYTES = 64 * 2**20
LIMIT_FILES = 20_000
OF_RUNS = (".lock", "attempts", "arrays", "search.journal")  # in a run's folder, or a sweep's
CODE_VARIABLE = "ORCHESTRATOR_CODE"
"""The copy that a process runs from."""
RECORD = "copy.json"
OUR_FOLDERS = {PACKAGE.name, "jobs", "conf"}
"""All that a run needs of a checkout of this project, unless its job lies elsewhere in it."""


@cached
def source_roots(target: str | ProgramConfig) -> dict[Path, set[str]]:
    """Return the source folders to copy, each with the top entries that are certainly needed.

    Args:
        target: a job's class, by its dotted name, or a program.
    """
    roots: dict[Path, set[str]] = {}
    # A container, say, has this interpreter's packages, but no others.
    if not is_in_interpreter(PACKAGE):
        # In a checkout orchestrator/jobs is a link to jobs/, which has the files.
        roots[PACKAGE.parent] = {PACKAGE.name, "jobs"}
    if job := _root_of(target):
        roots.setdefault(job[0], set()).add(job[1])
    return roots


def _root_of(target: str | ProgramConfig) -> tuple[Path, str] | None:
    """Return the source folder of a job or program, and its top entry in it.

    Of a script that is its repository, or else its folder; of a module the folder on Python's path.
    None for an installed, built-in or missing module.
    """
    if isinstance(target, str):
        module = target.rpartition(".")[0]
    elif target.is_module:
        module = target.target
    elif script := copied_script(target):
        root = next((f for f in script.parents if (f / ".git").exists()), script.parent)
        return root, str(script.relative_to(root))
    else:
        return None
    spec = find_module(module)
    folders = list(spec.submodule_search_locations or []) if spec else []
    origin = spec.origin if spec and spec.origin not in (None, "built-in", "frozen") else None
    if origin is None and not folders:
        return None
    path = Path(folders[0] if folders else str(origin)).absolute()
    root = path.parents[module.count(".")]
    return None if is_installed(path) else (root, module.split(".", maxsplit=1)[0])


def _walked(root: Path, tops: set[str]) -> Iterator[str]:
    """Return, without git: the needed packages whole, and the modules next to them.

    For a script, which may import or start any file of its folder, all of it.
    """
    if any((root / top).is_file() for top in tops):
        tops = {"."}
    for path in sorted(root.iterdir()) if tops != {"."} else ():
        if path.is_file() and path.suffix == ".py":
            yield path.name
    for top in sorted(tops):
        yield from _below(root, top)


def _leads_up(path: Path) -> bool:
    """Return whether a path is a link to a folder that it is in, or to one that another link of the
    path was followed into: that would never end.
    """
    if not path.is_symlink():
        return False
    target = path.resolve()
    return any(folder.resolve().is_relative_to(target) for folder in path.parents)


def _below(
    root: Path,
    top: str,
    *,
    follow_links: bool = False,
    is_left_out: Callable[[str], bool] = lambda _: False,
) -> Iterator[str]:
    """Return the files below a folder of `root`, except hidden folders and compiled Python files;
    and the folders that may not be read, for the caller to leave out.

    Args:
        follow_links: to folders, too; or else return these links.
        is_left_out: whether to leave out a folder below `top`, by its name below `root`.

    Raises:
        OSError: the file system does not answer for a folder.
    """
    denied: list[str] = []

    def refuse(error: OSError) -> None:
        if isinstance(error, PermissionError):
            denied.append(os.path.relpath(error.filename, root))
        elif is_unreadable_now(error):
            raise error

    for folder, folders, files in os.walk(root / top, onerror=refuse, followlinks=follow_links):
        inside = Path(folder).relative_to(root)
        folders[:] = sorted(
            f
            for f in folders
            if f != "__pycache__" and f[0] != "." and not is_left_out(str(inside / f))
        )
        names = [f for f in files if not f.endswith(".pyc")]
        if follow_links:
            folders[:] = [f for f in folders if not _leads_up(Path(folder, f))]
        else:
            names += [f for f in folders if (Path(folder) / f).is_symlink()]
        yield from (str(inside / name) for name in names)
    yield from denied


def _files(
    root: Path, tops: set[str], run: Path, *, ignored: bool = False
) -> tuple[dict[str, int], list[str]]:
    """Return names below `root` of the files to copy, with their sizes; and of those left out.

    Left out are secrets, links that lead out of `root`, and folders that may not be read.

    Args:
        ignored: take files that git may ignore, where it does not say which these are.

    Raises:
        GitRefusal: it does not, and `ignored` is false.
    """
    try:
        listed = listed_files(root)
    except GitRefusal:
        if not ignored:
            raise
        listed = None
    if listed is not None and root == PACKAGE.parent and tops <= OUR_FOLDERS:
        listed = [name for name in listed if name.split("/")[0] in OUR_FOLDERS]
    wanted = {*tops, *(f"{top}.py" for top in tops)}
    if listed is None or not any(name in tops or name.split("/")[0] in wanted for name in listed):
        # no repository, or one that ignores this folder
        listed = list(islice(_walked(root, tops), LIMIT_FILES + 1))
    no_code = (f"{os.path.relpath(run, root)}/",)
    if not (root / "runs" / "__init__.py").exists():  # else it is a package of the user's
        no_code += ("runs/",)
    is_of_runs = cache(partial(_is_of_runs, root))
    sizes: dict[str, int] = {}
    left_out: list[str] = []
    for name in listed:
        if name.startswith(no_code) or is_of_runs(os.path.dirname(name)):  # noqa: PTH120
            continue
        try:
            facts = os.lstat(f"{root}/{name}")  # hundreds of times a submission
        except (FileNotFoundError, NotADirectoryError):  # deleted, but git still has it
            continue
        if is_secret(name) or (stat.S_ISLNK(facts.st_mode) and _leads_out(root, name)):
            left_out.append(name)
        elif stat.S_ISREG(facts.st_mode) or stat.S_ISLNK(facts.st_mode):
            sizes[name] = facts.st_size
        elif stat.S_ISDIR(facts.st_mode) and not os.access(f"{root}/{name}", os.R_OK | os.X_OK):
            left_out.append(name)
        elif stat.S_ISDIR(facts.st_mode):  # git lists a submodule as one entry
            inner = listed_files(root / name) or ()
            # The loop walks these entries, too.
            listed.extend(
                f"{name.rstrip('/')}/{entry}" for entry in inner if entry not in ("", "./")
            )
    return sizes, left_out


def _imported(
    target: str | ProgramConfig, sizes_by_root: Mapping[Path, Mapping[str, int]]
) -> tuple[dict[Path, dict[str, int]], list[str]]:
    """Return what else a job or program certainly imports from the folders: files that git ignores
    (a version that is written at the installation, an extension that is built in place), and those
    that are reached by a link out of the folder. By folder, with their sizes.

    A package is copied whole: a part of it would hide the rest, which is imported from where it is
    if the copy has nothing of it. One that would make the copy too large is left out; where the
    ranks could not import it then, only what is certainly imported of it is copied. Such modules
    and packages are returned, too, by their names, and files of the others that are not copied.
    """
    sizes_by_unit: dict[tuple[Path, str], dict[str, int]] = {}
    needed_by_unit: dict[tuple[Path, str], dict[str, int]] = {}
    omitted_by_unit: dict[tuple[Path, str], list[str]] = {}
    for path in source_files(target)[0]:
        holders = [root for root in sizes_by_root if path.is_relative_to(root)]
        if not holders:
            continue
        root = max(holders, key=lambda folder: len(folder.parts))
        name, sizes = str(path.relative_to(root)), sizes_by_root[root]
        name = _behind_links(root, name, sizes)  # where git may ignore it
        if name in sizes or is_secret(name):
            continue
        unit = _unit(root, name, sizes)
        needed_by_unit.setdefault((root, unit), {})[name] = path.stat().st_size
        if (root, unit) not in sizes_by_unit:
            sizes_by_unit[root, unit], omitted_by_unit[root, unit] = _new_files(root, unit, sizes)
    for key, needed in needed_by_unit.items():
        sizes_by_unit[key] |= needed
    imported: dict[Path, dict[str, int]] = {}
    left_out: list[str] = []
    size = sum(sum(sizes.values()) for sizes in sizes_by_root.values())
    count = sum(map(len, sizes_by_root.values()))

    def order(item: tuple[tuple[Path, str], dict[str, int]]) -> tuple[bool, int]:
        (root, unit), sizes = item
        return not _is_in_package(unit, sizes_by_root[root]), sum(sizes.values())

    for (root, unit), sizes in sorted(sizes_by_unit.items(), key=order):
        files = sizes
        if size + sum(sizes.values()) > LIMIT_BYTES or count + len(sizes) > LIMIT_FILES:
            left_out.append(unit)
            # Its package in the copy would hide it; a program finds nothing outside of the copy.
            if isinstance(target, str) and not _is_in_package(unit, sizes_by_root[root]):
                continue
            files = needed_by_unit[root, unit]
        else:
            left_out += omitted_by_unit[root, unit]
        size, count = size + sum(files.values()), count + len(files)
        imported.setdefault(root, {}).update(files)
    return imported, left_out


def _behind_links(root: Path, name: str, sizes: Mapping[str, int]) -> str:
    """Return the name of a file below `root` that leads through none of the links in `sizes`."""
    while True:
        parts = (name, *map(str, Path(name).parents))
        link = next((part for part in parts if part in sizes and (root / part).is_symlink()), None)
        if link is None:
            return name
        target = os.path.relpath(os.path.realpath(root / link), os.path.realpath(root))
        name = str(Path(target, Path(name).relative_to(link)))


def _unit(root: Path, name: str, sizes: Mapping[str, int]) -> str:
    """Return the outermost package or folder of an imported file of which the copy, with the files
    `sizes`, has no part that hides the rest; or the file itself.
    """
    for folder in list(Path(name).parents)[-2::-1]:
        start = f"{folder}/__init__.py"
        if start not in sizes and (
            (root / start).exists() or not any(file.startswith(f"{folder}/") for file in sizes)
        ):
            return str(folder)
    return name


def _is_in_package(unit: str, sizes: Mapping[str, int]) -> bool:
    """Return whether a package with the files `sizes` in the copy would hide this part of it."""
    return any(f"{folder}/__init__.py" in sizes for folder in Path(unit).parents)


def _new_files(root: Path, unit: str, sizes: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Return the files of a package, or the one of a module, except `sizes`, with their sizes, as
    many as a copy may have and one more; and the names of those left out: secrets, and files that
    may not be read, which would end the start.

    Raises:
        OSError: the file system does not answer for one.
    """
    is_of_runs = cache(partial(_is_of_runs, root))

    def is_left_out(folder: str) -> bool:  # one that is copied as a link has its files elsewhere
        return folder in sizes or is_of_runs(folder)

    names: Iterable[str] = (unit,)
    if (root / unit).is_dir():
        names = _below(root, unit, follow_links=True, is_left_out=is_left_out)
    files: dict[str, int] = {}
    left_out: list[str] = []
    for name in names:
        if name in sizes or is_of_runs(os.path.dirname(name)):  # noqa: PTH120
            continue
        try:
            facts = os.stat(f"{root}/{name}")  # noqa: PTH116  # thousands of times
            if not os.access(root / name, os.R_OK):  # for which reason?
                os.close(os.open(root / name, os.O_RDONLY | os.O_NONBLOCK))
        except (FileNotFoundError, NotADirectoryError):  # a link that leads nowhere
            continue
        except OSError as error:
            # An outage ends the start: without this file ranks would fail hours later.
            if is_unreadable_now(error) and not isinstance(error, PermissionError):
                raise
            left_out.append(name)
            continue
        if is_secret(name):
            left_out.append(name)
        elif stat.S_ISREG(facts.st_mode):
            files[name] = facts.st_size
        if len(files) > LIMIT_FILES:
            break
    return files, left_out


def _is_of_runs(root: Path, folder: str) -> bool:
    """Return whether a folder below `root` is a run's or a sweep's, or is inside one.

    Copies would otherwise hold copies, and all earlier results.
    """
    while folder:
        lock, *others = (f"{root}/{folder}/{name}" for name in OF_RUNS)
        if os.path.lexists(lock) and any(map(os.path.lexists, others)):
            return True
        folder = os.path.dirname(folder)  # noqa: PTH120  # hundreds of times a submission
    return False


def python_files(target: str | ProgramConfig) -> Iterator[Path]:
    """Yield the files that a job's or program's copy would certainly need, and every other Python
    file that it would hold, but tests and this package.
    """
    location = _root_of(target)
    if location is None:
        return
    root, top = location
    # Files that are too many change no result; `code_state` has the warning.
    for name in _files(root, {top}, root / "runs", ignored=True)[0]:
        first = name.partition("/")[0]
        wanted = first not in ("tests", "docs", PACKAGE.name) and name.endswith(".py")
        if (first == top or wanted) and not os.path.islink(f"{root}/{name}"):  # noqa: PTH114
            yield root / name


@cached
def code_files(target: str | ProgramConfig) -> list[Path]:
    """Return the files of the user's own that a job or program is made of, sorted.

    If one of them imports by computed names, or the program is not Python, all Python files of its
    source folder count.

    Args:
        target: a job's class, by its dotted name, or a program.
    """
    files, complete = source_files(target)
    return sorted({*files, *(() if complete else python_files(target))})


def _leads_out(root: Path, name: str) -> bool:
    """Return whether a link would lead elsewhere from the copy than from here."""
    link = root / name
    inside = Path(os.path.realpath(link)).is_relative_to(os.path.realpath(root))
    return not inside or os.path.isabs(os.readlink(link))  # noqa: PTH115, PTH117  # text is enough


def copies(target: str | ProgramConfig, into: Path) -> dict[Path, Path]:
    """Return where each source folder's copy goes: the start of the job's PYTHONPATH, in order."""
    return {root: into / str(i) for i, root in enumerate(source_roots(target))}


def copy_code(target: str | ProgramConfig, run: Path, into: Path) -> list[str]:
    """Copy the code of the run, or sweep, `run` into the folder `into`; it appears complete.

    A copy of an earlier start that was refused is replaced. Files cannot be written.

    Returns:
        The names of files that were left out: secrets, what cannot be read, links that lead
        elsewhere, and what is too large, so imported from where it is or copied in part.

    Raises:
        RunFolderError: there is too much of it, or git does not say which files it ignores.
    """
    files_by_root: dict[Path, dict[str, int]] = {}
    left_out: list[str] = []
    for root, tops in source_roots(target).items():
        try:
            files_by_root[root], omitted = _files(root, tops, run)
        except GitRefusal as refusal:
            raise RunFolderError(
                f"{refusal}\nso the copy of the code would hold what git ignores; or set "
                f"run.snapshot=false"
            ) from refusal
        left_out += omitted
        if absent := [
            top for top in tops if (root / top).is_file() and top not in files_by_root[root]
        ]:
            raise RunFolderError(
                f"{root / absent[0]} is left out of the copy of the code, as what may hold a "
                f"secret is, or a link that leads elsewhere; rename it, or set run.snapshot=false"
            )
    imported, too_large = _imported(target, files_by_root)
    for root, names in imported.items():
        files_by_root[root] |= names
        # A link to a folder is left out, but not if the files below it are copied.
        copied = {*names, *(str(folder) for name in names for folder in Path(name).parents)}
        left_out = [name for name in left_out if name not in copied]
    left_out = list(dict.fromkeys([*left_out, *too_large]))
    sizes = {
        root / name: size for root, names in files_by_root.items() for name, size in names.items()
    }
    size = sum(sizes.values())
    if size > LIMIT_BYTES or len(sizes) > LIMIT_FILES:
        largest = max(sizes, key=lambda path: sizes[path])
        is_imported = any(largest == root / name for root in imported for name in imported[root])
        way = "" if is_imported else "leave data out by .gitignore, or "
        raise RunFolderError(
            f"the code in {' and '.join(map(str, files_by_root))} is {format_bytes(size)} in "
            f"{len(sizes)} files (the largest is {largest}), too much to keep a copy with the run "
            f"(at most {format_bytes(LIMIT_BYTES)}, {LIMIT_FILES} files); {way}"
            f"set run.snapshot=false"
        )
    into.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = into.with_name(f".{into.name}.part")
    for old in filter(os.path.lexists, (part, into)):
        remove(old)
    make_folder(part)
    for number, (root, names) in enumerate(files_by_root.items()):
        for name in names:
            path = part / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not with its time: a site may remove files that are old by it while a job waits.
            shutil.copy(root / name, path, follow_symlinks=name in imported.get(root, ()))
            if not path.is_symlink():
                path.chmod(0o500 if path.stat().st_mode & stat.S_IXUSR else 0o400)
    roots = {str(root): str(number) for number, root in enumerate(files_by_root)}
    git = code_state(next(reversed(files_by_root), PACKAGE.parent))
    write_json(part / RECORD, {"roots": roots, "git": git})
    part.rename(into)
    return left_out


def submitted(env: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the record of the copy that this process runs from; None if it runs from none.

    Returns:
        `roots`: the path of each source folder's copy; `git`: its `code_state` at submission.
    """
    if CODE_VARIABLE not in env:
        return None
    copy = Path(env[CODE_VARIABLE])
    record = read_json(copy / RECORD)
    if record is None:
        raise RunFolderError(f"{copy} is no copy of the code: it has no {RECORD}")
    return {**record, "roots": {root: str(copy / name) for root, name in record["roots"].items()}}
