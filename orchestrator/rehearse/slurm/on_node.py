"""A hand on a node of a SLURM job, as a task of a step beside the ranks: `on_node.py RUN`'s module.

It says which ranks it has, then does what it is told, line by line, until nobody tells it anything
any more: {"word": …, "what": [...]} comes, {"node": …, "gives": [...]} goes.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Mapping

import psutil

from orchestrator.errors import UsageError
from orchestrator.rehearse.connections import check_lending, connections
from orchestrator.rehearse.hand import WORDS, Hand

RENEW_S = 0.02


def ranks_here(run: str) -> Mapping[int, int]:
    """The ranks of a run on this node that live, and are not stopped, with their processes."""
    job, node = os.environ["SLURM_JOB_ID"], os.environ["SLURMD_NODENAME"]
    found: dict[int, int] = {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = process.info["cmdline"] or []
        if not any(word.endswith("node_entry.py") for word in words) or "rank" not in words:
            continue
        try:
            environment, state = process.environ(), process.status()
        except psutil.Error:  # it has ended, or is somebody else's
            continue
        ours = (environment.get("SLURM_JOB_ID"), environment.get("SLURMD_NODENAME"))
        alive = state not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
        if ours == (job, node) and alive and any(word.startswith(run) for word in words):
            rank = int(environment["SLURM_PROCID"])
            if found.get(rank) != process.info["ppid"]:  # no fork of a rank's
                found[rank] = process.pid
    return found


def serve(run: str) -> None:
    """Do what comes on standard input, to its end; then nothing that was done lasts."""
    hand = Hand(lambda: ranks_here(run))
    try:
        check_lending(one for pid in ranks_here(run).values() for one in connections(pid))
        refused = ""
    except UsageError as error:
        refused = str(error)
    _say({"ranks": hand.ranks(), "refused": refused})
    unread = b""
    try:
        while True:
            if not select.select([0], [], [], RENEW_S)[0]:
                hand.renew()
                continue
            content = os.read(0, 65536)
            if not content:
                return
            *lines, unread = (unread + content).split(b"\n")
            for line in lines:
                told = json.loads(line)
                if told["word"] not in WORDS:
                    raise UsageError(f"no hand can {told['word']}")
                _say({"gives": getattr(hand, told["word"])(*told["what"]) or []})
    finally:
        hand.lift()


def _say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({"node": os.environ["SLURMD_NODENAME"], **what}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
