"""How ranks come together before MindSpore is asked to: arrivals and one verdict, as files.

MindSpore's own dynamic cluster says nothing until its time-out and never who is missing, so the
ranks meet in the run folder first. Every rank leaves an arrival file; rank 0 alone decides (go,
stop or missing) and publishes the decision; the others wait for it. No framework is imported here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.common.published_notice import Backoff, Notice
from orchestrator.errors import RanksMissing, RendezvousError, StopRequested, spans
from orchestrator.rundir.files import write_atomically

LINGER_S = 5.0
"""How much longer than rank 0 the others wait: it decides, they only guard against its absence."""

Endpoint = dict[str, Any]


def _folder(spec: GroupSpec) -> Path:
    return spec.folder / f"mindspore-{spec.generation:03d}"


def arrival_file(spec: GroupSpec, rank: int) -> Path:
    """Where `rank` says that it is there."""
    return _folder(spec) / f"arrived-{rank:05d}.json"


def _arrive(spec: GroupSpec) -> None:
    _folder(spec).mkdir(mode=0o700, parents=True, exist_ok=True)
    note = {"node": spec.node, "address": spec.address}
    write_atomically(arrival_file(spec, spec.rank), json.dumps(note))


def _notice(spec: GroupSpec) -> Notice:
    """Of the verdict."""
    path = _folder(spec) / "verdict.json"
    return Notice(path, node=spec.node, first=spec.local_rank == 0)


def _arrived(spec: GroupSpec) -> set[int]:
    return {int(path.stem.rpartition("-")[2]) for path in _folder(spec).glob("arrived-*.json")}


def ranks_in_words(numbers: list[int]) -> str:
    """Ranks in words, ranges joined.

    >>> ranks_in_words([3]), ranks_in_words([1, 2, 3, 7])
    ('rank 3', 'ranks 1-3, 7')
    """
    words = ", ".join(spans(numbers))
    return f"rank {words}" if len(numbers) == 1 else f"ranks {words}"


def _refusal(spec: GroupSpec, verdict: Endpoint) -> Exception | None:
    if verdict["verdict"] == "stop":
        return StopRequested("the run was asked to stop while its ranks came together")
    if verdict["verdict"] == "missing":
        return RanksMissing(
            f"{ranks_in_words(verdict['ranks'])} of {spec.size} did not come within "
            f"{spec.timeout_s:g} s"
        )
    if verdict["verdict"] == "failed":
        return RendezvousError(str(verdict["message"]))
    return None


def decide(spec: GroupSpec, ready: Callable[[], Endpoint | None]) -> Endpoint:
    """Rank 0's part: wait for all, or for a reason not to; tell everybody.

    Args:
        ready: asked until it gives what the others need to connect. It may raise `RendezvousError`.

    Returns:
        The verdict, which is "go".

    Raises:
        StopRequested, RendezvousError: on all ranks alike.
    """
    _arrive(spec)
    until = time.monotonic() + spec.timeout_s
    notice = _notice(spec)
    endpoint: Endpoint | None = None
    verdict: Endpoint
    backoff = Backoff()
    while True:
        there = _arrived(spec)
        if spec.stop_requested() or (_folder(spec) / "stop").exists():
            verdict = {"verdict": "stop"}
            break
        try:
            endpoint = endpoint or ready()
        except RendezvousError as error:
            verdict = {"verdict": "failed", "message": str(error)}
            break
        if endpoint is not None and len(there) == spec.size:
            verdict = {"verdict": "go", **endpoint}
            break
        if time.monotonic() > until:
            missing = sorted(set(range(spec.size)) - there)
            verdict = {"verdict": "missing", "ranks": missing}
            if not missing:
                message = f"MindSpore's scheduler did not start within {spec.timeout_s:g} s"
                verdict = {"verdict": "failed", "message": message}
            break
        time.sleep(backoff.next())
    notice.publish(verdict)
    refusal = _refusal(spec, verdict)
    if refusal is not None:
        raise refusal
    return verdict


def obey(spec: GroupSpec) -> Endpoint:
    """The other ranks' part: arrive, and wait for rank 0's verdict. Raises what it calls for."""
    _arrive(spec)
    until = time.monotonic() + spec.timeout_s
    notice = _notice(spec)
    while (verdict := notice.wait()) is None:
        if spec.stop_requested():
            (_folder(spec) / "stop").touch()
            # Written before looking: either rank 0 sees the stop, or it has arrived and is seen.
            if not arrival_file(spec, 0).exists():
                raise StopRequested(f"rank {spec.rank} was asked to stop while waiting for rank 0")
        late = time.monotonic() - until
        if late > 0 and not arrival_file(spec, 0).exists():
            raise RanksMissing(f"rank 0 of {spec.size} did not come within {spec.timeout_s:g} s")
        if late > LINGER_S:
            raise RendezvousError(
                f"rank {spec.rank} on {spec.node} waited {spec.timeout_s:g} s for a verdict of "
                f"rank 0, which came but does not answer"
            )
    refusal = _refusal(spec, verdict)
    if refusal is not None:
        raise refusal
    return verdict
