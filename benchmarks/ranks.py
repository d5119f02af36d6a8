"""Start the ranks of a measurement, and give what rank 0 found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.link import Link

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 3600.0
_LAST_LINES = 25


class RankFailed(RuntimeError):
    """A rank ended otherwise than well; the message has its last lines."""


def on_ranks(link: Link, task: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S) -> Any:
    """Run `python -m benchmarks.rank` for every rank of `link`.

    Args:
        link: whose prefixes say how many ranks there are.
        task: what they measure; see `benchmarks.rank`.
        timeout_s: for all of it.

    Raises:
        RankFailed: at once when the first rank fails; the others are ended.
        TimeoutError: after `timeout_s`.
    """
    ranks = len(link.prefixes)
    whole = {"interface": link.interface, "senders": link.senders, **task}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        port = _free_port()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, prefix in enumerate(link.prefixes):
                with (folder / f"{rank}.log").open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [
                                *prefix,
                                sys.executable,
                                "-m",
                                "benchmarks.rank",
                                json.dumps(whole),
                                str(folder / "found.json"),
                            ],
                            cwd=ROOT,
                            stderr=log,
                            env=_environment(link, rank, ranks, port),
                        )
                    )
            _wait(processes, folder, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return json.loads((folder / "found.json").read_text(encoding="utf-8"))


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            rank = failed[0]
            lines = (folder / f"{rank}.log").read_text("utf-8", "replace").splitlines()
            last = "\n".join(lines[-_LAST_LINES:])
            raise RankFailed(f"rank {rank} ended with code {codes[rank]}:\n{last}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            raise TimeoutError(f"the ranks were not done after {timeout_s:.0f} s")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(link: Link, rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return torchrun's environment for one process on each node, which the peers read."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": link.address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": link.interface,
        "OMP_NUM_THREADS": "1",
    }
