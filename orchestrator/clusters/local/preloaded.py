"""The process that a run's pretended nodes are forks of: it has imported the framework.

A rank's start is mostly the import of its framework, the same for every rank; so it is done once,
here, while there is nothing yet that a fork would break: no thread, no group, no device, none of
the user's code. A node (`supervisor.py`) is a fork of this process, each of its ranks a fork of the
node, with a session, a log and an environment of its own. All have this process's command line;
`ps -o comm` and `top` call them `node1` and `rank 3`.

`python -m orchestrator.clusters.local.preloaded RUN`, with what the nodes are on standard input.
Afterwards it only waits for their ends, and writes them to standard output, a JSON line each.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.clusters.local.supervisor import serve
from orchestrator.lifecycle.forks import fork
from orchestrator.lifecycle.prctl import die_with, name_process
from orchestrator.rank.preload import draw_other_numbers, preload
from orchestrator.run_folder.files import APPENDING, open_regular
from orchestrator.run_folder.rundir import RunDir


def _be_node(order: dict[str, Any], node: dict[str, Any]) -> int:
    run = RunDir(Path(order["run"]))
    for other in order["nodes"]:
        if other is not node:
            _close_pipes(other)
    log = open_regular(run.node_log(node["name"]), APPENDING)
    for standard, descriptor in enumerate((*node["pipes"], log)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.update(node["environment"])
    name_process(node["name"])
    be = partial(_be_rank, run.path, order["attempt"])
    serve(node["ranks"], be, silence_s=order["silence_s"], hang_s=order["hang_s"])
    return 0


def _be_rank(run: Path, attempt: int, rank: int) -> int:
    from orchestrator.rank.entry import be_rank

    name_process(f"rank {rank}")
    draw_other_numbers()
    return be_rank(run, attempt)


def _close_pipes(node: dict[str, Any]) -> None:
    for end in node["pipes"]:
        os.close(end)


def main() -> None:
    order: dict[str, Any] = json.load(sys.stdin)
    die_with(order["launcher"])
    faulthandler.register(signal.SIGQUIT)  # when an import hangs, the launcher asks where
    preload(RunDir(Path(order["run"])))
    faulthandler.unregister(signal.SIGQUIT)
    gc.freeze()  # what was imported is no garbage; to look at it again would copy its pages
    nodes = {fork(partial(_be_node, order, node)): node for node in order["nodes"]}
    for node in nodes.values():
        _close_pipes(node)
    # From now on nodes see for themselves that the launcher is gone, and leave nothing behind:
    # they could not if this process ended first, and they with it.
    die_with(None)
    while nodes:
        pid, status = os.wait()
        end = {"node": nodes.pop(pid)["name"], "status": os.waitstatus_to_exitcode(status)}
        print(json.dumps(end), flush=True)  # noqa: T201  # for the launcher


if __name__ == "__main__":
    main()
