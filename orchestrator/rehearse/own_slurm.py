"""Breaking nodes of a SLURM that is ours and all on this machine, as the development cluster is.

Nobody else's work is on it: its daemons run as this user, its nodes are at loopback addresses, and
it was named by cluster.slurm_conf. What is broken is mended by `mend`.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

from orchestrator.errors import ClusterError
from orchestrator.lifecycle.address import is_loopback
from orchestrator.scheduler.client import CONF, SlurmClient


def is_own(client: SlurmClient) -> bool:
    """Whether nobody but us can have work there. Raises `ClusterError` where nobody answers."""
    me = pwd.getpwuid(os.getuid()).pw_name
    users = re.findall(
        r"^Slurmd?User\s*=\s*([^(\s]+)", client.must("scontrol", "show", "config"), re.MULTILINE
    )
    nodes = client.must("scontrol", "show", "nodes", "-o")
    addresses = re.findall(r"NodeAddr=(\S+)", nodes)
    return set(users) == {me} and bool(addresses) and all(map(_is_loopback, addresses))


def _is_loopback(address: str) -> bool:
    try:
        return is_loopback(address)
    except ValueError:  # a name; the development cluster has none
        return False


class OwnSlurm:
    """What is broken of it, and how it is mended."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self._mend: list[Callable[[], object]] = []

    def set_down(self, node: str) -> None:
        """As an administrator does."""
        self._scontrol(node, "state=down", "reason=rehearsal")
        self._mend.append(lambda: self._scontrol(node, "state=resume"))

    def power_off(self, node: str) -> None:
        """End slurmd first, so that it cannot tell of the others' end; then all jobs' processes."""
        daemon = self._daemon(node)
        argv, environment, folder = daemon.cmdline(), daemon.environ(), daemon.cwd()
        theirs = [one for one in psutil.process_iter() if self._is_on(one, node)]
        steps = {parent for one in theirs if (parent := one.parent()) and _is_step(parent)}
        for process in (daemon, *steps, *theirs):
            with suppress(psutil.NoSuchProcess):  # it ended with the one before
                process.kill()
        self._mend.append(lambda: self._power_on(node, argv, environment, folder))

    def mend(self) -> None:
        """Make all of it whole again."""
        while self._mend:
            self._mend.pop()()

    def _power_on(
        self, node: str, argv: list[str], environment: dict[str, str], folder: str
    ) -> None:
        subprocess.run(
            ["setsid", "--fork", *argv], env=environment, cwd=folder, check=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        # A node that was not missed yet takes jobs already, and cannot be resumed.
        self._client.ask("scontrol", "update", f"nodename={node}", "state=resume")

    def _scontrol(self, node: str, *words: str) -> None:
        self._client.must("scontrol", "update", f"nodename={node}", *words)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            conf = process.environ().get(CONF)
        except psutil.Error:  # somebody else's, or it has ended
            return False
        mine = self._client.environment("scontrol").get(CONF)
        return bool(conf and mine) and Path(conf or "").resolve() == Path(mine or "").resolve()

    def _is_on(self, process: psutil.Process, node: str) -> bool:
        with suppress(psutil.Error):  # it has ended, or is somebody else's
            return self._is_ours(process) and process.environ().get("SLURMD_NODENAME") == node
        return False

    def _daemon(self, node: str) -> psutil.Process:
        for process in psutil.process_iter(["name", "cmdline"]):
            words = process.info["cmdline"] or []
            named = ("-N", node) in pairwise(words)
            if process.info["name"] == "slurmd" and named and self._is_ours(process):
                return process
        raise ClusterError(f"slurmd of {node} is not to be found among your processes")


def _is_step(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it has ended
        return process.name() == "slurmstepd"
    return False
