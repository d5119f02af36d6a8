"""The callback of a replay: write down each micro-step, the gradients of one update, and stop.

It runs in the ranks of the replay, and may stop one of them in pdb.
"""

from __future__ import annotations

import inspect
import json
import pdb  # noqa: T100  # what --debug offers
import socket
import sys
import zlib
from pathlib import Path
from types import FrameType
from typing import Any

from orchestrator.callbacks import Callback
from orchestrator.client.loop import CompletedUpdate, Trained
from orchestrator.client.run import current_run

REQUEST = "replay.json"
"""In the replay's folder: the update to look at, the last one to compute, the leaf to debug."""
LEAVES = "replay-{:05d}.jsonl"
"""One rank's micro-steps, a line for each update."""
PACKAGE = str(Path(__file__).resolve().parents[1])


class Observer(Callback):
    """Write the replay's micro-steps into its folder; stop all ranks after the last update."""

    def on_start(self, trained: Trained) -> None:
        self._trained = trained
        self._file = current_run.folder / LEAVES.format(current_run.rank)
        self._request: dict[str, Any] = json.loads((current_run.folder / REQUEST).read_text())
        self._digests: list[dict[str, str]] = []  # of each micro-step, by parameter

    def wants_stop(self, update: int) -> bool:
        return update >= self._request["last"]

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        if update != self._request["update"]:
            return
        if done and self._request["gradients"]:
            named = self._trained.gradients()
            self._digests.append({name: _digest(value) for name, value in named.items()})
        debug = self._request.get("debug")
        if debug is not None and done == debug["step"] and done < steps:
            _stop_in_user_code(self._trained.job, debug["socket"])

    def on_boundary(self, done: CompletedUpdate) -> None:
        window, losses = done.window, done.report.losses
        line: dict[str, Any] = {"update": window.update, "leaves": []}
        is_asked = window.update == self._request["update"]
        # Of a coupled loss no micro-step has one of its own.
        if len(losses) == len(window.micro_batches):
            for micro_batch, (total, weight) in zip(window.micro_batches, losses, strict=True):
                leaf: dict[str, Any] = {
                    "leaf": micro_batch.number,
                    "total": total,
                    "weight": weight,
                }
                if is_asked:
                    leaf["samples"] = micro_batch.indices
                line["leaves"].append(leaf)
        if is_asked:
            line["norms"] = self._norms(done.report.gradient_norm)
            for leaf, digests in zip(line["leaves"], self._digests, strict=False):
                leaf["digests"] = digests
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _norms(self, whole: float | None) -> dict[str, float]:
        """Return the norm of the averaged gradient by parameter, before it was clipped.

        Args:
            whole: of all parameters; None if the update was skipped: then of the summed gradient.
        """
        norms = {name: float(g.double().norm()) for name, g in self._trained.gradients().items()}
        clipped = sum(norm**2 for norm in norms.values()) ** 0.5
        factor = whole / clipped if whole is not None and clipped else 1.0
        return {name: norm * factor for name, norm in norms.items()}


def _digest(tensor: Any) -> str:
    """Return a digest of a tensor's bits."""
    return f"{zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes()):08x}"


# ------------------------------------------------------------------ pdb
# A rank has no terminal: the command that replays relays its own through a socket.


def _stop_in_user_code(job: Any, path: str) -> None:
    """Stop in pdb at the start of the job's next `loss`, or in the user's own loop.

    Args:
        path: of the socket on which the command listens.
    """
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    debugger = pdb.Pdb(stdin=link.makefile("r"), stdout=link.makefile("w"), nosigint=True)
    if job is None:
        _stop_at_next_line(debugger, _user_frame())
        return
    name = "embed" if hasattr(job, "embed") and hasattr(job, "loss_of_embeddings") else "loss"
    method = getattr(job, name)

    def stop_once(*arguments: Any) -> Any:
        delattr(job, name)  # the class's own again
        return debugger.runcall(method, *arguments)

    setattr(job, name, stop_once)


def _stop_at_next_line(debugger: pdb.Pdb, target: FrameType) -> None:
    """Stop when `target` reaches its next line; `set_trace` would stop in this very function."""
    debugger.reset()
    frame: FrameType | None = target
    while frame is not None:
        frame.f_trace = debugger.trace_dispatch
        debugger.botframe = frame
        frame = frame.f_back
    debugger.set_next(target)
    sys.settrace(debugger.trace_dispatch)


def _user_frame() -> FrameType:
    """Return the innermost frame that is not of this package."""
    frame = inspect.currentframe()
    assert frame is not None  # noqa: S101  # CPython has frames
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame
