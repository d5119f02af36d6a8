"""Rendezvous of torch ranks: a store on rank 0, its address in the run folder, one verdict.

1. Rank 0 listens on a port that the kernel chooses, at its node's own address only, and publishes
   `rendezvous-<generation>.json` in the run folder.
2. Every rank writes its arrival into the store and waits for the verdict.
3. Rank 0 decides once: go (all ranks arrived), stop (a rank was asked to stop), or missing (time
   out). No rank leaves without the verdict, so all ranks report the same error.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError
from torch.torch_version import TorchVersion

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.common.rendezvous import (
    backoff,
    listen,
    publish,
    raise_for_verdict,
    read_published,
)
from orchestrator.engine.common.waiting import PatientDeadline
from orchestrator.engine.torch.group import BaseGroup
from orchestrator.engine.torch.transports import (
    RankCapabilities,
    TorchGroup,
    choose,
    read_capabilities,
    transport_of,
)
from orchestrator.errors import RanksMissing, RendezvousError, StopRequested, TransportError
from orchestrator.plugins import TRANSPORTS
from orchestrator.rundir.files import await_disk_space, open_nofollow

log = logging.getLogger(__name__)

# ------------------------------------------------------------------ Authenticated store
# torch's TCPStore obeys any client that reaches its port. The secret of one start is in the
# rendezvous file, in the private run folder: all keys are below a prefix derived from it, and
# every value that matters is signed with it. Unsigned values are ignored.


DIGITS = 64


class SecretStore:
    """Signed values by name, and counters, which are unsigned and thus hints only."""

    def __init__(self, store: TCPStore, secret: str) -> None:
        self._secret = secret.encode()
        self._whole = store  # lives as long as this does
        self.below = PrefixStore(self._sign("prefix", b"")[:32], store)

    def set(self, name: str, value: Any) -> None:
        content = json.dumps(value)  # ASCII
        self.below.set(name, self._sign(name, content.encode()) + content)

    def get(self, name: str) -> Any | None:
        """Return the value that a process with the secret set under this name, or None."""
        if not self.below.check([name]):
            return None
        content = bytes(self.below.get(name))
        sign, value = content[:DIGITS], content[DIGITS:]
        if not hmac.compare_digest(sign, self._sign(name, value).encode()):
            return None
        return json.loads(value)

    def count(self, name: str, more: int = 0) -> int:
        return self.below.add(name, more)

    def _sign(self, name: str, content: bytes) -> str:
        return hmac.new(self._secret, name.encode() + b"\n" + content, hashlib.sha256).hexdigest()


# ------------------------------------------------------------------ Host and client of the store
# Keys: `rank-<n>` (ranks that have arrived at rank 0), the counters `arrived` and `read`, and at
# last `verdict`. A rank that is asked to stop creates a file, since it may not have reached the
# store yet.


POLL_S = 0.02
HERE = "here"
LINGER_S = 5.0  # how long rank 0 keeps the store for those who have not read a bad verdict yet
_STORE_TIMEOUT_S = 10.0
_CONNECT_S = 2.0  # to a store that listened a moment ago


def rendezvous_file(spec: GroupSpec) -> Path:
    """Return the file with the address of the generation's store."""
    return spec.folder / f"rendezvous-{spec.generation}.json"


def _stop_file(spec: GroupSpec) -> Path:
    """Return the file that a rank creates which is asked to stop."""
    return spec.folder / f"rendezvous-{spec.generation}.stop"


def _ask_to_stop(spec: GroupSpec) -> None:
    os.close(open_nofollow(_stop_file(spec), os.O_WRONLY | os.O_CREAT))


def host(spec: GroupSpec) -> SecretStore:
    """Open the store on rank 0, and publish its address."""
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
        use_libuv=torch.__version__ >= TorchVersion("2.8"),  # before, it took no socket
    )
    token = secrets.token_hex(16)
    secret_store = SecretStore(store, token)
    secret_store.set(HERE, True)
    where = {"address": spec.address, "port": port, "node": spec.node, "token": token}
    here = {"generation": spec.generation, "size": spec.size, **where}
    await_disk_space(lambda: publish(rendezvous_file(spec), here), log.warning)
    return secret_store


def decide(
    spec: GroupSpec, store: SecretStore, me: RankCapabilities, deadline: PatientDeadline
) -> dict[str, Any]:
    """Wait for all ranks, a stop or the timeout; publish the verdict and wait until it is read."""
    names = [f"rank-{rank}" for rank in range(1, spec.size)]
    pauses, look = backoff(), 0.0
    verdict: dict[str, Any] | None = None
    while verdict is None:
        now = time.monotonic()
        stopped = spec.stop_requested()
        if now >= look:
            look = now + next(pauses)
            stopped = stopped or os.path.lexists(_stop_file(spec))
        if stopped:
            verdict = {"verdict": "stop"}
        # The count is unsigned, so it only says when it is worth reading all notes.
        elif store.count("arrived") >= len(names) or deadline.passed:
            notes = [store.get(name) for name in names]
            there = [RankCapabilities(**note) for note in notes if note is not None]
            if len(there) == len(names):
                try:
                    verdict = {"verdict": "go", "transport": choose([me, *there])}
                except TransportError as error:
                    verdict = {"verdict": "transport", "message": str(error)}
            elif deadline.passed:
                missing = [rank for rank, note in enumerate(notes, start=1) if note is None]
                verdict = {"verdict": "missing", "ranks": missing}
        if verdict is None:
            time.sleep(POLL_S)
    good = verdict["verdict"] == "go"
    if not good:  # ranks that come later still, read it here
        publish(rendezvous_file(spec), {"generation": spec.generation, **verdict})
    store.set("verdict", verdict)
    give_up = time.monotonic() + LINGER_S
    while not good and store.count("read") < store.count("arrived") and time.monotonic() < give_up:
        time.sleep(POLL_S)
    return verdict


def join(spec: GroupSpec, deadline: PatientDeadline) -> SecretStore:
    """Connect to the store as soon as its address is published and it answers."""
    path, pauses = rendezvous_file(spec), backoff()
    while True:
        content = read_published(path)
        if content is not None:
            raise_for_verdict(spec, content)
            if (store := _connect(content)) is not None:
                return store
        if spec.stop_requested():
            _ask_to_stop(spec)
            raise StopRequested(f"rank {spec.rank} was asked to stop while it waited for rank 0")
        if deadline.passed:
            raise RanksMissing(
                f"rank {spec.rank} on {spec.node} waited {spec.timeout_s:g} s for rank 0, which "
                + (
                    f"never published its address in {path}: rank 0 did not start, or does not see "
                    "the same folder"
                    if content is None
                    else f"published an address in {path} but does not answer at it "
                    f"({content['address']} port {content['port']} of node {content.get('node')}); "
                    "cluster.interface=eth0, say, chooses the network that nodes meet on"
                )
            )
        time.sleep(next(pauses))


def _connect(content: dict[str, Any]) -> SecretStore | None:
    """Return a client of the published store; None if no server, or another one, answers."""
    address, port = str(content["address"]), int(content["port"])
    try:
        # TCPStore would wait on a refused connection, and warn; a plain socket knows at once.
        socket.create_connection((address, port), timeout=1.0).close()
        store = TCPStore(
            address, port, None, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False
        )
        store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        secret_store = SecretStore(store, str(content["token"]))
        return secret_store if secret_store.get(HERE) else None
    except (OSError, DistError):
        return None  # an earlier attempt's address, or rank 0 is gone: the caller asks again


def await_verdict(
    spec: GroupSpec, store: SecretStore, me: RankCapabilities, deadline: PatientDeadline
) -> dict[str, Any]:
    """Arrive, and wait for the verdict of rank 0."""
    try:
        store.set(f"rank-{me.rank}", asdict(me))
        store.count("arrived", 1)
        stopped, pauses = False, backoff()
        while (verdict := store.get("verdict")) is None:
            if not stopped and spec.stop_requested():
                _ask_to_stop(spec)
                stopped = True
            if deadline.over_s > LINGER_S:  # rank 0 gives one in time if it can at all
                raise RendezvousError(
                    f"rank {spec.rank} on {spec.node} waited {spec.timeout_s:g} s for a verdict of "
                    "rank 0, which is there but does not answer"
                )
            time.sleep(next(pauses))
        store.count("read", 1)
    except DistError as error:
        published = read_published(rendezvous_file(spec)) or {}
        if "verdict" in published:  # rank 0 did not know of this rank, so it did not wait for it
            return published
        raise RanksMissing(
            f"rank 0 went away while rank {spec.rank} on {spec.node} waited for the others"
        ) from error
    return verdict


def meet(spec: GroupSpec) -> tuple[SecretStore | None, str]:
    """Wait for all ranks of a group. Collective; every rank returns, or gets the same error.

    Returns:
        A store that these ranks share, None for a lone one, and the transport that rank 0 chose.

    Raises:
        RendezvousError: ranks are missing after `spec.timeout_s` (their numbers are in the
            message).
        StopRequested: some rank was asked to stop meanwhile.
        TransportError: the transport that was asked for cannot be had.
    """
    me = read_capabilities(spec)
    if spec.size == 1:
        if spec.stop_requested():
            raise StopRequested("the run was asked to stop before it began")
        return None, choose([me])
    deadline = PatientDeadline(spec.timeout_s)
    if spec.rank == 0:
        store = host(spec)
        verdict = decide(spec, store, me, deadline)
    else:
        store = join(spec, deadline)
        verdict = await_verdict(spec, store, me, deadline)
    raise_for_verdict(spec, verdict)
    return store, str(verdict["transport"])


def form_group(spec: GroupSpec) -> BaseGroup:
    """Form one generation of a group. Collective; every rank gets a group, or the same error.

    Raises:
        RendezvousError: see `meet`; or ranks that met cannot connect.
        StopRequested, TransportError: see `meet`.
    """
    store, transport = meet(spec)
    if store is None:
        # Also for the groups to come, whose forming thread cannot set this thread's device.
        transport_of(transport).prepare(spec)
        device = transport_of(transport).device(spec.local_rank)
        alone = TorchGroup.alone(transport=transport, device=device, generation=spec.generation)
        alone.spec = spec
        return alone
    with TRANSPORTS.wrap_errors(transport, "to form a group"):
        try:
            below = PrefixStore(f"group-{spec.generation}", store.below)
            group: Any = transport_of(transport).form(spec, below)
        except RuntimeError as error:
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RendezvousError(
                f"rank {spec.rank} on {spec.node} could not connect to the others over "
                f"{transport}, after all {spec.size} had arrived: {first_line}"
            ) from error
        if not isinstance(group, BaseGroup):
            raise TypeError(f"form() gave {group!r:.60}, which is no BaseGroup")
    group.store, group.spec = store, spec
    return group
