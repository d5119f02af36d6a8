"""Unpack a run's copy of the code, once on each node, and continue with a program in it.

As `python -I COPY.py COPY PROGRAM ARGUMENT…`: this file lies next to the archive, COPY.tar, as
COPY.py, and imports nothing of this package, which may be what is packed. The code is unpacked
where hundreds of small files cost nothing: in TMPDIR, or without it in the node's memory (/dev/shm;
disks can take a second) if it is small, else in /tmp. If that fails, in the run folder, with a
note. A process that runs from it holds a lock on it, which the kernel releases. It is removed
when no process does (`after_node.sh`, `node_entry.py`), and the remains on a node that lost power
at the next start there.

Only an archive with the digest COPY.sha256 is unpacked, and only into a folder that no other user
can write.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import stat
import sys
import tarfile
import time
from pathlib import Path

NAME = "orchestrator-code"
PLACE_VARIABLE, LOCK_VARIABLE = "ORCHESTRATOR_CODE", "ORCHESTRATOR_CODE_LOCK"
WHOLE = "whole"
LOOK_S = 0.05
EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB
MEMORY, DISK = Path("/dev/shm"), Path("/tmp")  # noqa: S108  # folders there are checked: `_held`
SMALL_BYTES = 16 * 2**20
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def sealed(copy: str) -> bytes:
    """Return the archive if it is the one submitted for this run; else end the process."""
    content: list[bytes] = []
    for suffix in (".py", ".tar", ".sha256"):
        descriptor = os.open(copy + suffix, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            content.append(file.read())
    program, archive, digest = content
    found = hashlib.sha256(os.fsencode(copy) + b"\n" + program + archive).hexdigest()
    if digest.decode("ascii", "replace").split() != [found, "-"]:
        sys.exit(f"error: the code in {copy}.tar is damaged: {copy}.sha256 differs")
    return archive


def _held(place: Path) -> int:
    """Return a descriptor of the folder `place`, which is made; it must be this user's alone."""
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
    descriptor = os.open(place, FOLDER)
    facts = os.fstat(descriptor)
    if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        os.close(descriptor)
        raise PermissionError(f"{place} is open to others")
    return descriptor


def unpacked(place: Path, copy: str) -> int:
    """Unpack the code to `place`; return the descriptor that keeps it there. Raises `OSError`."""
    whole = place / WHOLE
    while True:
        descriptor = _held(place)
        try:
            if not whole.exists():
                fcntl.flock(descriptor, EXCLUSIVE)
                if _is_there(descriptor, place) and not whole.exists():
                    _unpack(place, copy)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_there(descriptor, place) and whole.exists():
                return descriptor
        except BlockingIOError:  # another rank unpacks it
            time.sleep(LOOK_S)
        os.close(descriptor)


def _is_there(descriptor: int, place: Path) -> bool:
    """Return whether an opened folder is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), place.stat())
    except FileNotFoundError:
        return False


def _unpack(place: Path, copy: str) -> None:
    try:
        for left in place.iterdir():  # by one that was killed on the way
            shutil.rmtree(left)
        with tarfile.open(fileobj=io.BytesIO(sealed(copy))) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extraction_filter = tarfile.data_filter
            archive.extractall(place)  # noqa: S202  # it is ours, by its digest
        (place / WHOLE).touch(mode=0o600)
    except OSError:
        shutil.rmtree(place, ignore_errors=True)
        raise


def remove(place: Path) -> None:
    """Remove a folder unless a process runs from it, or it is not this user's."""
    try:
        descriptor = os.open(place, FOLDER)
    except OSError:
        return
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, EXCLUSIVE)
            shutil.rmtree(place, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)


def bases(copy: str) -> list[Path]:
    """Return where the code may be unpacked on this node, the best first."""
    chosen = Path(os.environ.get("TMPDIR") or DISK)
    if chosen != DISK:  # which slurmd sets if it is not set otherwise
        found = [chosen]
    elif _serves(MEMORY, Path(f"{copy}.tar").stat().st_size):
        found = [MEMORY, DISK]
    else:
        found = [DISK]
    return [*found, Path(copy).parent]


def _serves(memory: Path, size: int) -> bool:
    """Return whether a folder takes that size without harm, is writable, and can run programs."""
    if size > SMALL_BYTES or not os.access(memory, os.W_OK):
        return False
    facts = os.statvfs(memory)
    return facts.f_bavail * facts.f_frsize >= 16 * size and not facts.f_flag & os.ST_NOEXEC


def somewhere(copy: str) -> tuple[Path, int]:
    """Return the code on this node, and what keeps it there. Ends the process if that fails."""
    env, mine = os.environ, f"{NAME}-{os.getuid()}-"
    restarts = env.get("SLURM_RESTART_COUNT", "0")
    # The code of another cluster's job of this number, or of an earlier one, differs in its place.
    digest = Path(f"{copy}.sha256").read_text("ascii", "replace")[:16]
    name = f"{mine}{digest}-{env['SLURM_JOB_ID']}-{restarts}-{env['SLURMD_NODENAME']}"
    said: list[str] = []
    for base in bases(copy):
        try:
            kept = unpacked(base / name, copy)
        except OSError as error:
            said.append(f"{base} ({error.strerror or error})")
            continue
        if said and env.get("SLURM_LOCALID", "0") == "0":
            note = f"note: the code is unpacked in {base}: it cannot be in {said[0]}"
            print(note, file=sys.stderr)  # noqa: T201  # the node's log
        for other in base.glob(f"{mine}*-{env['SLURMD_NODENAME']}"):
            if other.name != name:
                remove(other)
        return base / name, kept
    sys.exit(f"error: the code in {copy}.tar cannot be unpacked in {' or '.join(said)}")


def main(copy: str, program: str, *arguments: str) -> None:
    """Become the program."""
    place, kept = somewhere(copy)
    os.set_inheritable(kept, True)
    roots = sorted((p for p in place.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    path = [*map(str, roots), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.environ.update({PLACE_VARIABLE: str(place), LOCK_VARIABLE: str(kept)})
    command = [sys.executable, "-u", str(place / program), *arguments]
    os.execv(sys.executable, command)  # noqa: S606  # the interpreter of this process


if __name__ == "__main__":
    main(*sys.argv[1:])
