"""Two nodes that do not share a network: namespaces of the kernel, a cable between them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import environment

NODES = ("left", "right")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "cable0"
# As Debian's and Ubuntu's installer writes it: a node's own name means its loopback.
HOSTS = "127.0.0.1 localhost\n127.0.1.1 {own}\n{address} {other}\n"


def available() -> bool:
    """Whether this machine lets us make namespaces."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "nsenter", "mount"))):
        return False
    return subprocess.run(["unshare", "-n", "-m", "true"], check=False).returncode == 0


class Node:
    """A machine of its own, as far as names and networks go: a process that holds namespaces."""

    def __init__(self, index: int, folder: Path) -> None:
        self.name, other = NODES[index], NODES[1 - index]
        hosts = folder / f"hosts-{self.name}"
        hosts.write_text(HOSTS.format(own=self.name, address=ADDRESSES[1 - index], other=other))
        self.holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c",
             f"hostname {self.name} && mount --bind {hosts} /etc/hosts && echo ready && sleep 900"],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.holder.stdout.readline() == "ready\n"

    def command(self, *words: str) -> list[str]:
        return ["nsenter", "-t", str(self.holder.pid), "--net", "--mount", "--uts", *words]

    def plug_in(self, index: int) -> None:
        for words in (f"addr add {ADDRESSES[index]}/24 dev {CABLE}", f"link set {CABLE} up",
                      "link set lo up"):  # fmt: skip
            subprocess.run(self.command("ip", *words.split()), check=True)

    def begin(self, code: str, *arguments: str, **env: str) -> subprocess.Popen:
        """Start Python on this node."""
        return subprocess.Popen(
            self.command(sys.executable, "-c", code, *arguments), env=environment(**env),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    nodes = Node(0, folder), Node(1, folder)
    try:
        pids = [str(node.holder.pid) for node in nodes]
        ends = ("name", CABLE, "netns", pids[0], "type", "veth",
                "peer", "name", CABLE, "netns", pids[1])  # fmt: skip
        subprocess.run(["ip", "link", "add", *ends], check=True)
        for index, node in enumerate(nodes):
            node.plug_in(index)
        yield nodes
    finally:
        for node in nodes:  # the namespaces, and the cable with them, go with their last process
            os.killpg(node.holder.pid, signal.SIGKILL)
            node.holder.communicate()
