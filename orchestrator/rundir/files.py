"""Private, atomic files of a run folder.

A file is opened without following a link, which could lead out of the folder. A JSON table ends
with the key `sha256`: the digest of the file's name and of all text before it, so that damage is
found when it is read. That protects from damage, not from forgery.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.errors import RunFolderError

PRIVATE = 0o700
PRIVATE_FILE = 0o600
BLOCK = 1 << 20
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
DISK_PATIENCE_S, DISK_POLL_S = 600.0, 1.0
READ_PATIENCE_S, READ_POLL_S = 60.0, 5.0  # NFS forgets a stale handle within a minute
GLANCE_S, GLANCE_POLL_S = 0.2, 0.1  # a hundred runs that cannot be read take half a minute
T = TypeVar("T")
DIGEST = "sha256"  # the last key of a JSON table
_BEFORE_DIGEST = f'\n "{DIGEST}": "'
_AFTER_DIGEST = '"\n}\n'
APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND
MOST_LINES = 100_000  # kept in memory, some 70 MB of metrics; the oldest are given up first

_defer_sync: ContextVar[bool] = ContextVar("_defer_sync", default=False)


def open_nofollow(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a file, created private to its owner where `flags` say so.

    Raises:
        RunFolderError: it is a link.
        OSError: it does not exist, or may not be opened.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _foreign(path, "a link") from None
        raise


def _foreign(path: Path, kind: str) -> RunFolderError:
    return RunFolderError(f"{path} is {kind}; a run folder holds regular files and folders only")


def read_bytes(path: Path) -> bytes:
    """Return a file's content. Raises `RunFolderError` for a link."""
    with os.fdopen(open_nofollow(path), "rb", buffering=0) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return a file's UTF-8 text. Raises `RunFolderError` for a link and for other encodings."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RunFolderError(f"{path} is damaged: it is not UTF-8 ({error.reason})") from error


def blocks(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield a file's content from a byte on, in bounded memory."""
    with os.fdopen(open_nofollow(path), "rb") as file:
        file.seek(start)
        while block := file.read(BLOCK):
            yield block


def start_of_last(path: Path, lines: int) -> int:
    """Return the offset of a file's last lines."""
    with os.fdopen(open_nofollow(path), "rb") as file:
        last = deque(file, maxlen=lines)
        return file.tell() - sum(map(len, last))


def read_end(path: Path, at_most: int) -> bytes:
    """Return a file's last bytes."""
    with os.fdopen(open_nofollow(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - at_most))
        return file.read(at_most)


def is_folder(path: Path) -> bool:
    """Return whether a folder exists. Raises `RunFolderError` for a link or another file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise _foreign(path, "a link" if stat.S_ISLNK(mode) else "no folder")
    return True


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder; [] if it does not exist."""
    return sorted(entry.name for entry in os.scandir(folder)) if is_folder(folder) else []


def remove(path: Path) -> None:
    """Remove a file, a link (not its target), or a folder with its content."""
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def make_folder(path: Path) -> None:
    """Create a folder private to its owner, whatever the umask. Raises `FileExistsError`."""
    path.mkdir(mode=PRIVATE)
    make_private(path)


def is_full(path: Path) -> bool:
    """Return whether a file's system has no room, as far as it is known; quotas are not seen."""
    try:
        room = os.statvfs(path)
    except OSError:  # removed meanwhile
        return False
    # A file system without figures reports 0 blocks and 0 files in all.
    return (room.f_blocks > 0 and not room.f_bavail) or (room.f_files > 0 and not room.f_favail)


def await_disk_space(action: Callable[[], T], tell: Callable[[str], object]) -> T:
    """Repeat an action while the disk is full, for some time. Raises its `OSError` after that.

    Args:
        tell: gets a sentence about the wait, once.
    """

    def tell_wait(error: Exception) -> None:
        tell(f"{error}; waiting for space on the disk, for up to {DISK_PATIENCE_S:.0f} s")

    def may_pass(error: Exception) -> bool:
        return isinstance(error, OSError) and error.errno in FULL_ERRORS

    return _repeat(action, may_pass, tell_wait, DISK_PATIENCE_S, DISK_POLL_S)


def is_unreadable_now(error: Exception) -> bool:
    """Return whether a file is there but cannot be read: a stale handle, or no answer of a server.

    That may pass.
    """
    cause = error.__cause__ if isinstance(error, RunFolderError) else error
    lasting = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    # ELOOP: a link
    return (
        isinstance(cause, OSError) and not isinstance(cause, lasting) and cause.errno != errno.ELOOP
    )


def await_readable(
    action: Callable[[], T],
    tell: Callable[[str], object] = lambda _: None,
    *,
    brief: bool = False,
    existed: bool = False,
) -> T:
    """Repeat an action that reads, while a file is there but cannot be read, for some time. After
    that raises its `OSError`, or the `RunFolderError` with such a cause.

    Args:
        tell: gets a sentence about the wait, once.
        brief: for a moment only, since many runs may be read; and not where access is denied.
        existed: also while it is missing, as below a mount that is gone: it was there before.
    """
    patience_s, poll_s = (GLANCE_S, GLANCE_POLL_S) if brief else (READ_PATIENCE_S, READ_POLL_S)

    def tell_wait(error: Exception) -> None:
        tell(f"{error}; reading it again, for up to {patience_s:.0f} s")

    def may_pass(error: Exception) -> bool:
        cause = error.__cause__ if isinstance(error, RunFolderError) else error
        if isinstance(cause, PermissionError):
            return not brief
        return is_unreadable_now(error) or (existed and isinstance(cause, FileNotFoundError))

    return _repeat(action, may_pass, tell_wait, patience_s, poll_s)


def _repeat(
    action: Callable[[], T],
    may_pass: Callable[[Exception], bool],
    tell_wait: Callable[[Exception], object],
    patience_s: float,
    poll_s: float,
) -> T:
    failed_at: float | None = None  # at first: minutes that the action took until then do not count
    while True:
        try:
            return action()
        except (OSError, RunFolderError) as error:
            now, is_first = time.monotonic(), failed_at is None
            failed_at = now if failed_at is None else failed_at
            if not may_pass(error) or now - failed_at >= patience_s:
                raise
            if is_first:
                tell_wait(error)
            time.sleep(poll_s)


def is_own(path: Path) -> bool:
    """Return whether a file or folder is this user's.

    For users other than root also those of root and of the overflow user: only root can create
    them, and file systems that translate owners (NFS, containers) report them.
    """
    owners = {os.geteuid()}
    if os.geteuid():
        owners |= {0, int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))}
    return path.stat().st_uid in owners


def make_private(folder: Path) -> None:
    """Let only the owner in. A setgid bit stays: files in it count for a project's group quota."""
    folder.chmod(PRIVATE | folder.stat().st_mode & stat.S_ISGID)


@contextlib.contextmanager
def written_together(folders: Iterable[Path]) -> Generator[None]:
    """Sync many new files at once: on exit without an error, all below `folders` is on disk."""
    before = _defer_sync.set(True)
    try:
        yield
    finally:
        _defer_sync.reset(before)
    _sync_disks(folders)


def _sync_disks(folders: Iterable[Path]) -> None:
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


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write so that a reader, or a crash at any point, sees the old file or the new one.

    Inside `written_together` a crash of the machine may leave a damaged file where none was.

    Raises:
        RunFolderError: a folder has the file's name.
    """
    sync = not _defer_sync.get() or path.exists()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except IsADirectoryError as error:
        temporary.unlink(missing_ok=True)
        raise RunFolderError(f"{path} is a folder, but must be a file; move it away") from error
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def create_once(path: Path, content: str) -> bool:
    """Create a file with all of its content, unless it exists; return whether this call did.

    Of several processes exactly one creates it, by `link`, on network file systems too.
    """
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_atomically(own, content)
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    finally:
        own.unlink(missing_ok=True)
    return True


def text_digest(*texts: str) -> str:
    """Return a SHA-256 of texts."""
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def to_json_text(name: str, value: Mapping[str, Any]) -> str:
    """Return the text of a JSON file of this name, with its checksum. Batch scripts search it."""
    head = json.dumps({**value, DIGEST: ""}, indent=1).removesuffix(_BEFORE_DIGEST + '"\n}')
    return f"{head}{_BEFORE_DIGEST}{text_digest(name, head)}{_AFTER_DIGEST}"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a table as JSON with a checksum, atomically."""
    write_atomically(path, to_json_text(path.name, value))


def read_json(path: Path, read: Callable[[Path], str] = read_text) -> dict[str, Any] | None:
    """Return a JSON file's table; None if there is no such file.

    Args:
        read: reads its text; raises as `read_text` does.

    Raises:
        RunFolderError: it is damaged, a link, or cannot be read.
    """
    try:
        text = read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from error
    head, separator, end = text.rpartition(_BEFORE_DIGEST)
    if not separator:
        raise RunFolderError(f"{path} is damaged: its digest is missing")
    if end != text_digest(path.name, head) + _AFTER_DIGEST:
        raise RunFolderError(f"{path} is damaged: its digest is not that of its content")
    value: dict[str, Any] = json.loads(text)
    del value[DIGEST]
    return value


class LineFile:
    """A file of lines that survives a full disk. Its owner is the only writer.

    What cannot be written now follows later, in order; no line ever lacks a piece.

    Attributes:
        lost: lines that were given up, since more than `MOST_LINES` waited.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1
        self._waiting: deque[bytes] = deque(maxlen=MOST_LINES)
        self.lost = 0
        try:
            self._open()
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                raise

    def _open(self) -> None:
        self._descriptor = open_nofollow(self._path, APPENDING)
        if read_end(self._path, 1) not in (b"", b"\n"):  # an earlier writer was killed in its line
            self._waiting.appendleft(b"\n")

    @property
    def waiting(self) -> int:
        """Return how many lines could not be written yet."""
        return len(self._waiting)

    def write(self, line: str) -> None:
        """Append `line`, after those that wait. Raise `OSError` when it has to wait."""
        self.lost += len(self._waiting) == MOST_LINES
        self._waiting.append(line.encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Append what waits. Raise `OSError` when there is no room for all of it, or on another
        error of the file, which is then opened again at the next call: a network file system's
        handle may be stale for good.
        """
        if self._descriptor < 0:
            self._open()
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                with contextlib.suppress(OSError):
                    os.close(self._descriptor)
                self._descriptor = -1
            raise

    def _append(self, line: bytes) -> None:
        end = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):  # the last bytes there were: once more, for the reason
                os.write(self._descriptor, line[written:])
        except OSError:
            with contextlib.suppress(OSError):  # what is left of the line ends at the next one
                os.ftruncate(self._descriptor, end)
            raise

    def close(self) -> None:
        """Close the file. Raise `OSError` if there was no room for some lines."""
        try:
            self.flush()
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)
