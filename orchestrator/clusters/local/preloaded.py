"""The process that a run's pretended nodes are forks of: it has imported the framework.

A rank's start is mostly the import of its framework, the same for every rank; so it is done once,
here, while there is nothing yet that a fork would break: no thread, no group, no device, none of
the user's code. A node (`supervisor.py`) is a fork of this process, each of its ranks a fork of the
node, with a session, a log and an environment of its own. All have this process's command line;
`ps -o comm` and `top` call them `node1` and `rank 3`.

`python -m orchestrator.clusters.local.preloaded RUN`, with what the nodes are on standard input.
Afterwards it only waits for their ends, and writes them to standard output, a JSON line each.

A fork goes on where it was forked and comes back to `_live`, as `os.fork` does, so that a rank has
nothing of its node on its stack.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

from orchestrator.clusters.local.supervisor import serve
from orchestrator.lifecycle.forks import branch, ending
from orchestrator.lifecycle.prctl import die_with, name_process
from orchestrator.rank.preload import draw_other_numbers, preload
from orchestrator.rundir.files import APPENDING, open_nofollow
from orchestrator.rundir.folder import RunDir

Of = TypeVar("Of")


def _live(order: dict[str, Any]) -> int:
    """This process to its end, a node's and a rank's to theirs; gives the exit status."""
    run = RunDir(Path(order["run"]))
    die_with(order["launcher"])
    faulthandler.register(signal.SIGQUIT)  # when an import hangs, the launcher asks where
    preload(run)
    faulthandler.unregister(signal.SIGQUIT)
    gc.freeze()  # what was imported is no garbage; to look at it again would copy its pages
    node = _forked(order)
    if node is None:
        return 0
    _become(node, order, run)
    patience = {name: order[name] for name in ("silence_s", "hang_s")}
    rank = serve(node["first"], dict(node["processes"]), **patience, stays=order["replaces"])
    if rank is None:
        return 0
    from orchestrator.rank.entry import main_of

    name_process(f"rank {rank}")
    draw_other_numbers()
    return main_of(run.path)(run.path, order["attempt"])


def _forked(order: dict[str, Any]) -> dict[str, Any] | None:
    """Fork the nodes; gives each of them what it is. Here, once all have ended, None."""
    nodes: dict[int, dict[str, Any]] = {}
    for node in order["nodes"]:
        pid = branch()
        if not pid:
            return cast("dict[str, Any]", node)
        nodes[pid] = node
    for node in nodes.values():
        _close_pipes(node)
    # From now on nodes see for themselves that the launcher is gone, and leave nothing behind:
    # they could not if this process ended first, and they with it.
    die_with(None)
    signal.signal(signal.SIGCONT, lambda *_: _wake(nodes))
    if os.getppid() == order["launcher"]:
        die_with(order["launcher"], signal.SIGCONT)  # one that is stopped sees nothing
    for node, status in ends_of(nodes):
        end = {"node": node["name"], "status": status}
        print(json.dumps(end), flush=True)  # noqa: T201  # for the launcher
    return None


def ends_of(nodes: dict[int, Of]) -> Generator[tuple[Of, int]]:
    """What each of these children is, as it ends, and its exit code: the negative signal, or the
    status. It is in `nodes` as long as its pid is its own, for handlers of signals that look there.
    """
    while nodes:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None  # noqa: S101  # only with WNOHANG
        node = nodes.pop(ended.si_pid)
        _, status = os.waitpid(ended.si_pid, 0)  # from now on the pid may be another's
        yield node, os.waitstatus_to_exitcode(status)


def _wake(nodes: Iterable[int]) -> None:
    """Those that somebody has stopped: they are to obey."""
    for pid in list(nodes):
        os.kill(pid, signal.SIGCONT)


def _become(node: dict[str, Any], order: dict[str, Any], run: RunDir) -> None:
    """In a node's process: its pipes, log, environment and name."""
    for other in order["nodes"]:
        if other is not node:
            _close_pipes(other)
    log = open_nofollow(run.node_log(node["name"]), APPENDING)
    for standard, descriptor in enumerate((*node["pipes"], log)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.update(node["environment"])
    name_process(node["name"])


def _close_pipes(node: dict[str, Any]) -> None:
    for end in node["pipes"]:
        os.close(end)


def main() -> None:
    with ending() as end:
        end.code = _live(json.load(sys.stdin))


if __name__ == "__main__":
    main()
