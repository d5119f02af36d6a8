"""This end of the hands on a SLURM job's nodes: one step of the job's own, a task a node."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, cast

from orchestrator.errors import ClusterError
from orchestrator.scheduler.client import SlurmClient

ANSWER_S = 30.0


class Hands:
    """Started ahead of a fault, since srun and Python take a moment; `close` when it is done."""

    def __init__(self, client: SlurmClient, job: str, nodes: int, run: str) -> None:
        count = str(nodes)
        self._nodes, self._unread = nodes, b""
        self._process = subprocess.Popen(
            ["srun", f"--jobid={job}", "--overlap", "--nodes", count, "--ntasks", count,
             "--ntasks-per-node=1", "--mem=0", "--gres=none", "--input=all", "--unbuffered",
             "--no-kill", "--kill-on-bad-exit=0", "--job-name=rehearsal",
             sys.executable, "-m", "orchestrator.rehearse.slurm.on_node", run],
            env=client.environment("srun"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        said = self._answers()
        self._where = {rank: one["node"] for one in said for rank in one["ranks"]}
        self.refused = next((one["refused"] for one in said if one["refused"]), "")

    def where(self) -> Mapping[int, str]:
        """The ranks that lived when it was started, with their nodes."""
        return self._where

    def tell(self, word: str, *what: Any) -> list[Any]:
        """Raises `ClusterError` where not all nodes answer."""
        pipe = cast("Any", self._process.stdin)
        try:
            pipe.write(json.dumps({"word": word, "what": what}).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError as error:
            raise self._silent() from error
        return [given for one in self._answers() for given in one["gives"]]

    def close(self) -> None:
        """What lasts is lifted, where the nodes still hear it."""
        if self._process.poll() is None:
            cast("Any", self._process.stdin).close()
            try:
                self._process.wait(3.0)
            except subprocess.TimeoutExpired:  # it waits for a node that is gone
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def _answers(self) -> list[dict[str, Any]]:
        """One line of each node."""
        pipe, found = cast("Any", self._process.stdout), list[dict[str, Any]]()
        deadline = time.monotonic() + ANSWER_S
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while len(found) < self._nodes:
                left = deadline - time.monotonic()
                content = os.read(pipe.fileno(), 65536) if selector.select(left) else b""
                if not content:
                    raise self._silent()
                *lines, self._unread = (self._unread + content).split(b"\n")
                found += [json.loads(line) for line in lines if line.startswith(b"{")]
        return found

    def _silent(self) -> ClusterError:
        self._process.kill()
        words = cast("Any", self._process.stderr).read().decode("utf-8", "replace").strip()
        return ClusterError(f"no hand on all nodes of the job: {words or 'srun does not answer'}")
