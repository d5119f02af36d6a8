"""The one door to files of a run folder: regular files only, no links, bounded, never waiting.

What lies in a run folder may have been damaged, or made by somebody else. A link could lead out of
it, a fifo would hold a reader for ever, a device has no end. So every file is opened here: without
following a link, without waiting, and only if it turns out to be a regular file. What is asked of a
run folder as a whole stands in docs/reference/security.md.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from orchestrator.errors import RunFolderError

PRIVATE = 0o700
PRIVATE_FILE = 0o600
LIMIT_BYTES = 64 * 2**20
BLOCK = 1 << 20
READ = 1 << 16

APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_HARMLESS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file, made private to its owner where `flags` create it.

    Truncate through the descriptor, never with O_TRUNC: only then it is known what is cut.

    Raises:
        RunFolderError: it is a link, a fifo, a device, a folder; or it is to be written and has a
            second name, under which somebody would find it changed.
        OSError: it is not there, or may not be read.
    """
    try:
        descriptor = os.open(path, flags | _HARMLESS, PRIVATE_FILE)
    except OSError as error:
        # a link; a fifo opened for writing, or a socket; a folder opened for writing
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _strange(path) from error
        raise
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise _strange(path)
    if facts.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR):
        os.close(descriptor)
        raise _shared(path)
    return descriptor


def check_writable(path: Path) -> None:
    """Raises `RunFolderError` where `open_regular` would, asked to write; nothing is opened."""
    try:
        facts = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(facts.st_mode):
        raise _strange(path)
    if facts.st_nlink > 1:
        raise _shared(path)


def _strange(path: Path) -> RunFolderError:
    kind = _KINDS.get(stat.S_IFMT(path.lstat().st_mode), "no regular file")
    return RunFolderError(f"{path} is {kind}; a run folder holds regular files and folders only")


def _shared(path: Path) -> RunFolderError:
    return RunFolderError(
        f"{path} has a second name elsewhere (a hard link), where all that is written here would "
        f"show; give the run a file of its own: cp {path} {path}.own && mv {path}.own {path}"
    )


def read_bytes(path: Path, *, at_most: int = LIMIT_BYTES) -> bytes:
    """All of a regular file. Raises as `open_regular` does, and when it is larger than `at_most`
    bytes.
    """
    parts, size, descriptor = list[bytes](), 0, open_regular(path)
    try:  # no file object: `status` reads thousands of small files
        while size <= at_most and (part := os.read(descriptor, READ)):
            parts.append(part)
            size += len(part)
    finally:
        os.close(descriptor)
    if size > at_most:
        raise RunFolderError(f"{path} is damaged: it is larger than {at_most} bytes")
    return b"".join(parts)


def read_text(path: Path, *, at_most: int = LIMIT_BYTES) -> str:
    """`read_bytes` of a UTF-8 text. Raises `RunFolderError` when it is none."""
    try:
        return read_bytes(path, at_most=at_most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RunFolderError(f"{path} is damaged: it is not UTF-8 ({error.reason})") from error


def blocks(path: Path, start: int = 0) -> Iterator[bytes]:
    """A regular file from a byte on, piece by piece, in bounded memory."""
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(start)
        while block := file.read(BLOCK):
            yield block


def start_of_last(path: Path, lines: int) -> int:
    """Where the last lines of a regular file begin, read from its end, in bounded memory."""
    with os.fdopen(open_regular(path), "rb") as file:
        end = file.seek(0, os.SEEK_END)
        wanted, whole = lines, end  # the newline that ends the file begins no line
        while end:
            start = max(0, end - BLOCK)
            file.seek(start)
            block = file.read(end - start)[: whole - 1 - start]
            if (found := block.count(b"\n")) >= wanted:
                at = len(block)
                for _ in range(wanted):
                    at = block.rindex(b"\n", 0, at)
                return start + at + 1
            wanted, end = wanted - found, start
    return 0


def read_end(path: Path, at_most: int) -> bytes:
    """The last bytes of a regular file."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - at_most))
        return file.read(at_most)


def is_folder(path: Path) -> bool:
    """Whether a real folder is there; not a link to one. Raises `RunFolderError` when something
    else is.
    """
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(kind):
        raise _strange(path)
    return True


def check_folders(within: Path, named: Callable[[str], object]) -> None:
    """Raises `RunFolderError` where one of these names is something else than a real folder, in a
    folder that may be missing. One look for all of them: `status` does this to a thousand runs.
    """
    try:
        entries = list(os.scandir(within))
    except FileNotFoundError:
        return
    for entry in entries:
        if named(entry.name) and not entry.is_dir(follow_symlinks=False):
            raise _strange(Path(entry.path))


def names_in(folder: Path) -> list[str]:
    """What lies in a real folder, sorted; nothing where there is none."""
    return sorted(entry.name for entry in os.scandir(folder)) if is_folder(folder) else []


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it; what a link points to stays."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except RecursionError as error:
        raise RunFolderError(f"{path} is nested too deep to be removed: rm -rf {path}") from error


def wait_for_disk(folders: Iterable[Path]) -> None:
    """Until all that was written below them is on their disks. Raises `OSError`."""
    import ctypes  # Python itself can wait for one file, or for all disks of the machine

    libc = ctypes.CDLL(None, use_errno=True)
    for folder in {path.stat().st_dev: path for path in folders}.values():
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if libc.syncfs(descriptor):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(folder))
        finally:
            os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder private to its owner, whatever the umask. Raises `FileExistsError`."""
    path.mkdir(mode=PRIVATE)
    path.chmod(PRIVATE)
