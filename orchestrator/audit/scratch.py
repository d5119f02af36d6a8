"""The scratch folder of an audit: links to the files of the current folder, copied on write.

Python announces each file that it opens to audit hooks (`sys.addaudithook`), so a link is replaced
before anything is written through it: that to a file by a copy, that to a folder by a folder of
links. `torch.save` and safetensors open files by themselves, and are wrapped.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = frozenset({"os.link", "os.mkdir", "os.remove", "os.rename", "os.symlink"})
"""Events whose first arguments are paths in a folder that changes."""
_CHANGES_ITSELF = frozenset(
    {
        "os.chdir",
        "os.rmdir",
        "os.truncate",
        "shutil.rmtree",
        "sqlite3.connect",
    }
)
"""Events whose first argument is a path that changes, or that paths are then relative to."""
_EXCHANGE = 2  # of renameat2, which exchanges two names at once
_AT_FDCWD = -100

LARGEST_COPY = 2**30
"""Bytes of a file that is copied. A larger one is data, as a rule, which numpy.memmap opens for
writing by default; its link stays, and it cannot be appended to."""


def link_entries(source: Path, target: Path, but: str | None = None) -> None:
    """Link each entry of a folder in another one, except for `but`."""
    try:
        entries = list(source.iterdir())
    except PermissionError:  # a parent that may be passed, but not read
        return
    for entry in entries:
        if entry.name != but:
            (target / entry.name).symlink_to(entry)


class CopyOnWrite:
    """Keeps this process from writing through the links of a scratch folder.

    Args:
        root: the folder. All processes that write there lock the file with its name and .lock.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._lock = root, root.with_suffix(".lock")
        self._thread = threading.local()  # has `replaces` while it replaces links itself

    def install(self) -> None:
        """Begin, for the rest of this process."""
        import safetensors.torch
        import torch

        sys.addaudithook(self._on_event)
        torch.save = self._before_saving(torch.save)
        torch.jit.save = self._before_saving(torch.jit.save)
        safetensors.torch.save_file = self._before_saving(safetensors.torch.save_file)

    def _before_saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def saving(*args: Any, **kwargs: Any) -> Any:
            for path in (*args[1:2], *kwargs.values()):
                if isinstance(path, str | os.PathLike):
                    self.own(path, emptied=True)
            return save(*args, **kwargs)

        return saving

    def _on_event(self, event: str, args: Any) -> None:
        flags = args[2] if event == "open" and isinstance(args[2], int) else 0
        if flags & _WRITES:
            writes = bool(flags & (os.O_WRONLY | os.O_APPEND))
            self.own(args[0], emptied=bool(flags & os.O_TRUNC), writes=writes)
        elif event in _CHANGES_ITSELF:
            self.own(args[0])
        elif event in _CHANGES:
            for path in args[:2]:
                self.own(path, itself=False)

    def own(
        self, path: Any, *, itself: bool = True, emptied: bool = False, writes: bool = False
    ) -> None:
        """Replace the links on the way to a path, and `itself`, by copies (`_replace`).

        Args:
            emptied: what the file holds is not needed.
            writes: it is certainly written to. Raises `PermissionError` if it is too large for
                that.
        """
        replaces = getattr(self._thread, "replaces", False)
        if replaces or not isinstance(path, str | bytes | os.PathLike):
            return
        place, places = Path("/"), list[Path]()  # on the way; ".." leads back once links are gone
        for part in (Path.cwd() / os.fsdecode(path)).parts[1:]:
            place = place.parent if part == ".." else place / part
            places.append(place)
        if not itself:
            places.pop()
        places = [entry for entry in places if self._root in entry.parents]
        if not any(map(Path.is_symlink, places)):
            return
        self._thread.replaces = True
        try:
            with self._lock.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    for place in filter(Path.is_symlink, places):
                        _replace(place, emptied=emptied, writes=writes)
                finally:
                    fcntl.flock(lock, fcntl.LOCK_UN)  # a fork meanwhile has the file open, too
        finally:
            self._thread.replaces = False


def _replace(link: Path, *, emptied: bool, writes: bool) -> None:
    """Replace a link by a copy of its file, or by a folder with links to its folder's entries."""
    target, new = link.resolve(), link.with_name(f".{link.name}.{os.getpid()}")
    if target.is_dir():
        new.mkdir()
        link_entries(target, new)
        names = os.fsencode(new), os.fsencode(link)
        if ctypes.CDLL(None).renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE) == 0:
            new.unlink()
        else:  # not on this file system; other ranks may see no folder for a moment
            link.unlink()
            new.rename(link)
    elif target.is_file():
        if emptied:
            new.touch()
        elif target.stat().st_size <= LARGEST_COPY:
            shutil.copyfile(target, new)
        elif writes:
            raise PermissionError(
                f"{target} is larger than 1 GiB, and an audit changes no original"
            )
        else:
            return
        new.replace(link)
