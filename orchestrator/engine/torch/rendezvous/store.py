"""The store that ranks meet at: rank 0 hosts it and gives the verdict, the others join and wait.

See `rendezvous.py` for the whole. The store holds `rank-<n>` (who arrived), `stop` when somebody
was asked to, the counters `arrived` and `read`, and at last `verdict`.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.common.listening import listen
from orchestrator.engine.common.published_notice import Backoff, Notice
from orchestrator.engine.torch.comm.transports import Presence, choose
from orchestrator.engine.torch.rendezvous.decision import obey
from orchestrator.engine.torch.rendezvous.secret_store import SecretStore
from orchestrator.errors import RanksMissing, RendezvousError, StopRequested, TransportError
from orchestrator.rundir.files import open_nofollow, read_text

POLL_S = 0.02
HERE = "here"
MOST_BYTES = 1 << 20
LINGER_S = 5.0  # how long rank 0 keeps the store for those who have not read a bad verdict yet
_STORE_TIMEOUT_S = 10.0
_CONNECT_S = 2.0
"""For a store that somebody listened for a moment ago; so long it waits where nobody does now."""


def rendezvous_file(folder: Path, generation: int) -> Path:
    """Where the address of a generation's store is published."""
    return folder / f"rendezvous-{generation}.json"


def _stop_file(spec: GroupSpec) -> Path:
    """Left by a rank that was asked to stop before rank 0 could be told."""
    return spec.folder / f"rendezvous-{spec.generation}.stop"


def _notice(spec: GroupSpec, *, first: bool) -> Notice:
    return Notice(rendezvous_file(spec.folder, spec.generation), node=spec.node, first=first)


def _arrive(store: SecretStore, me: Presence) -> None:
    store.tell(f"rank-{me.rank}", asdict(me))
    store.count("arrived", 1)


# ------------------------------------------------------------------ rank 0


def host(spec: GroupSpec) -> tuple[SecretStore, Notice]:
    """Open the store, and publish where it is; a bad verdict will take that one's place."""
    notice = _notice(spec, first=True)
    try:
        listener = listen(spec.address)
    except OSError as error:
        raise RendezvousError(
            f"rank 0 on {spec.node} cannot listen at {spec.address}: {error.strerror}; "
            "it must be an address of this node"
        ) from error
    port = int(listener.getsockname()[1])
    # A TCPStore of its own would listen on every interface; this one takes over our socket.
    store = TCPStore(
        spec.address,
        port,
        None,
        is_master=True,
        timeout=timedelta(seconds=_STORE_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    token = secrets.token_hex(16)
    ours = SecretStore(store, token)
    ours.tell(HERE, True)
    notice.publish(
        {
            "address": spec.address,
            "port": port,
            "generation": spec.generation,
            "size": spec.size,
            "node": spec.node,
            "token": token,
        }
    )
    return ours, notice


def decide(
    spec: GroupSpec, store: SecretStore, notice: Notice, me: Presence, until: float
) -> dict[str, Any]:
    """Wait for everybody, or for a reason not to; tell all, and see that they have read it."""
    _arrive(store, me)
    backoff, look = Backoff(), 0.0
    while True:
        told = bool(store.told("stop"))
        if time.monotonic() >= look:
            look = time.monotonic() + backoff.next()
            told = told or os.path.lexists(_stop_file(spec))
        if told or spec.stop_requested():
            verdict: dict[str, Any] = {"verdict": "stop"}
            break
        # the count, which anybody could raise, only says when it is worth asking for all
        if store.count("arrived") >= spec.size and None not in (notes := _notes(spec, store)):
            verdict = _choose_transport(notes)
            break
        if time.monotonic() > until:
            missing = [rank for rank, note in enumerate(_notes(spec, store)) if note is None]
            verdict = {"verdict": "missing", "ranks": missing}
            break
        time.sleep(POLL_S)
    if verdict["verdict"] != "go":  # ranks that come later still, read it here
        notice.publish({"generation": spec.generation, **verdict})
    store.tell("verdict", verdict)
    if verdict["verdict"] != "go":
        arrived = store.count("arrived")
        give_up = time.monotonic() + LINGER_S
        while store.count("read") < arrived - 1 and time.monotonic() < give_up:
            time.sleep(POLL_S)
    return verdict


def _notes(spec: GroupSpec, store: SecretStore) -> list[Any]:
    """What each rank said of itself; None for one that did not come."""
    return store.all_told([f"rank-{rank}" for rank in range(spec.size)])


def _choose_transport(notes: list[Any]) -> dict[str, Any]:
    try:
        return {"verdict": "go", "transport": choose([Presence(**note) for note in notes])}
    except TransportError as error:
        return {"verdict": "transport", "message": str(error)}


# ------------------------------------------------------------------ the others


def join(spec: GroupSpec, until: float) -> SecretStore:
    """Connect to the store as soon as its address is there and somebody answers at it."""
    path = rendezvous_file(spec.folder, spec.generation)
    notice = _notice(spec, first=spec.reads_for_node)
    backoff, published = Backoff(), False
    while True:
        content = notice.wait()
        if content is not None:
            if "verdict" in content:
                obey(spec, content)
            published = True
            store = _connect(content)
            if store is not None:
                return store
            time.sleep(backoff.next())
        if spec.stop_requested():
            os.close(open_nofollow(_stop_file(spec), os.O_WRONLY | os.O_CREAT))
            raise StopRequested(f"rank {spec.rank} was asked to stop while it waited for rank 0")
        if time.monotonic() > until:
            raise RanksMissing(
                f"rank {spec.rank} on {spec.node} waited {spec.timeout_s:g} s for rank 0, which "
                + (
                    f"published an address in {path} but does not answer at it ({_at(path)}); "
                    f"cluster.interface=eth0, say, chooses the network that nodes meet on"
                    if published
                    else f"never published its address in {path}: rank 0 did not start, or does "
                    "not see the same folder"
                )
            )


def _at(path: Path) -> str:
    content = _read(path) or {}
    return f"{content.get('address')} port {content.get('port')} of node {content.get('node')}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(read_text(path, at_most=MOST_BYTES))
    except FileNotFoundError:
        return None


def _connect(content: dict[str, Any]) -> SecretStore | None:
    """A client of the published store; None when nobody, or somebody else, answers there."""
    address, port = str(content["address"]), int(content["port"])
    try:
        # TCPStore would wait on a refused connection, and warn; a plain socket knows at once.
        socket.create_connection((address, port), timeout=1.0).close()
        store = TCPStore(
            address, port, None, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False
        )
        store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        ours = SecretStore(store, str(content["token"]))
        return ours if ours.told(HERE) else None
    except (OSError, DistError):
        return None  # an earlier attempt's address, or rank 0 is gone: the caller asks again


def await_verdict(
    spec: GroupSpec, store: SecretStore, me: Presence, until: float
) -> dict[str, Any]:
    try:
        _arrive(store, me)
        told, backoff = False, Backoff()
        while (verdict := store.told("verdict")) is None:
            if not told and spec.stop_requested():
                store.tell("stop", True)
                told = True
            if time.monotonic() > until + LINGER_S:  # rank 0 gives one at `until` if it can at all
                raise RendezvousError(
                    f"rank {spec.rank} on {spec.node} waited {spec.timeout_s:g} s for a verdict of "
                    "rank 0, which is there but does not answer"
                )
            time.sleep(backoff.next())
        store.count("read", 1)
    except DistError as error:
        published = _read(rendezvous_file(spec.folder, spec.generation)) or {}
        if "verdict" in published:  # it had not heard of this rank, so it did not wait for it
            return published
        raise RanksMissing(
            f"rank 0 went away while rank {spec.rank} on {spec.node} waited for the others"
        ) from error
    return verdict
