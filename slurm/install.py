"""Installation of the programs that the cluster and its tests need, on a Debian machine.

Programs on PATH are not installed again, and no service is left running or enabled: the cluster
starts its own daemons in its own folder. Without root, or on another system, one message lists
everything to request from an administrator.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from slurm.errors import DevClusterError

# What a Debian package is needed for, by its name.
Programs = Mapping[str, tuple[str, ...]]
# Looked up by program, not by package, so that a SLURM that came another way (EasyBuild, Spack, a
# site's own build) serves as well.
_PROGRAMS = {
    "slurm-wlm": ("slurmctld", "slurmd", "scontrol", "sinfo", "squeue", "srun", "sbatch"),
    "munge": ("munged",),
}
_ACCOUNTING_PROGRAMS = {
    "slurmdbd": ("slurmdbd",),
    "mariadb-server": ("mariadbd", "mariadb-install-db", "mariadb-admin"),
}
_SERVICES = {
    "slurm-wlm": ("slurmctld", "slurmd"),
    "munge": ("munge",),
    "slurmdbd": ("slurmdbd",),
    "mariadb-server": ("mariadb",),
}
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")

_POLICY = Path("/usr/sbin/policy-rc.d")
_POLICY_SAVED = Path("/usr/sbin/policy-rc.d.before-slurm-dev")
_POLICY_TEXT = (
    "#!/bin/sh\n# Written by `python -m slurm up` while it installs: no service starts.\nexit 101\n"
)

_APT_LOG_LINES = 15


def search_path() -> str:
    """Return PATH with the system folders, which hold daemons and which users' PATH often lacks."""
    given = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join([*given, *(f for f in _SYSTEM_FOLDERS if f not in given)])


def program(name: str) -> str:
    """Return the absolute path of a program, for a daemon whose command line we recognise later."""
    found = shutil.which(name, path=search_path())
    if found is None:
        raise DevClusterError(f"program `{name}` is needed, but is not on PATH ({search_path()})")
    return found


def cluster_programs(*, accounting: bool) -> Programs:
    """Return the programs that a cluster needs, with its accounting or without."""
    return _PROGRAMS | (_ACCOUNTING_PROGRAMS if accounting else {})


def _missing(wanted: Programs) -> list[str]:
    """Return Debian's names of the packages of which at least one program is absent."""
    path = search_path()
    return [
        package
        for package, programs in wanted.items()
        if any(shutil.which(p, path=path) is None for p in programs)
    ]


def ensure_installed(wanted: Programs, *, say: Callable[[str], None]) -> None:
    """Install missing packages, or raise with the line that an administrator has to type."""
    with _alone():  # another `up` may be installing the same
        missing = _missing(wanted)
        if missing:
            _install(missing, wanted, say)


def _install(missing: list[str], wanted: Programs, say: Callable[[str], None]) -> None:
    names = " ".join(missing)
    by_hand = f"apt-get install --no-install-recommends {names}"
    if shutil.which("apt-get", path=search_path()) is None:
        raise DevClusterError(
            f"programs are missing, and this is not Debian or Ubuntu. Please install what these "
            f"Debian packages hold: {names}"
        )
    if os.geteuid() != 0:
        raise DevClusterError(
            f"these packages are missing: {names}. You are not root; please ask the administrator "
            f"for\n    {by_hand}\nA cluster itself then runs as you, without root."
        )
    say(f"installing {names} (once)")
    with _no_service_starts():
        _apt("update")
        _apt("install", "-y", "--no-install-recommends", *missing)
    _disable_services(missing)
    still = _missing(wanted)
    if still:
        raise DevClusterError(
            f"installed, but programs of {' '.join(still)} are still not on PATH; "
            f"try by hand: {by_hand}"
        )


@contextlib.contextmanager
def _alone() -> Generator[None, None, None]:
    """Allow one process at a time, if we can install: the lock is on apt-get's own file."""
    apt = shutil.which("apt-get", path=search_path())
    if os.geteuid() != 0 or apt is None:
        yield
        return
    with Path(apt).open("rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _apt(*arguments: str) -> None:
    environment = {
        **os.environ,
        "PATH": search_path(),
        "DEBIAN_FRONTEND": "noninteractive",
        "LC_ALL": "C.UTF-8",
    }
    command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-_APT_LOG_LINES:])
        raise DevClusterError(f"`{' '.join(command)}` ended with {done.returncode}:\n{tail}")


@contextlib.contextmanager
def _no_service_starts() -> Generator[None, None, None]:
    """Keep Debian from starting each service that it installs, by policy-rc.d.

    The administrator's own file, if any, is restored afterwards, also after an earlier run that
    was killed in between: a saved copy is never overwritten.
    """
    if _POLICY.exists() and not _POLICY_SAVED.exists():
        _POLICY.rename(_POLICY_SAVED)
    _POLICY.write_text(_POLICY_TEXT)
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        if _POLICY_SAVED.exists():
            _POLICY_SAVED.replace(_POLICY)
        else:
            _POLICY.unlink()


def _disable_services(installed: list[str]) -> None:
    """Disable the services of packages that this run installed; systemd starts them at boot."""
    services = [s for package in installed for s in _SERVICES.get(package, ())]
    if not services or not Path("/run/systemd/system").is_dir():
        return
    subprocess.run(
        ["systemctl", "disable", *services], env={**os.environ, "PATH": search_path()}, check=True
    )
