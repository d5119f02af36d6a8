"""How ranks find each other: a store on rank 0, its address in the run folder, one verdict for all.

1. Rank 0 listens on a port that the kernel chooses, at its node's own address only, and publishes
   `rendezvous-<generation>.json` in the folder that all ranks see.
2. Every rank notes its arrival in the store and waits for the verdict.
3. Rank 0 gives it once: go (everybody is there), stop (somebody was asked to), or missing (the time
   is over). Nobody leaves without it, so no rank is ever left alone, and all say the same.
"""

from __future__ import annotations

import time
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.comm.process_group import TorchGroup
from orchestrator.engine.torch.comm.transports import choose, presence, transport_of
from orchestrator.engine.torch.rendezvous.decision import obey
from orchestrator.engine.torch.rendezvous.store import await_verdict, decide, host, join
from orchestrator.errors import RendezvousError, StopRequested
from orchestrator.plugins import TRANSPORTS


def form_group(spec: GroupSpec) -> BaseGroup:
    """Form one generation of a group. Collective; every rank gets a group, or the same error.

    Raises:
        RendezvousError: ranks are missing after `spec.timeout_s` (their numbers are in the
            message).
        StopRequested: some rank was asked to stop meanwhile.
        TransportError: the transport that was asked for cannot be had.
    """
    me = presence(spec)
    if spec.size == 1:
        if spec.stop_requested():
            raise StopRequested("the run was asked to stop before it began")
        transport = choose([me])
        device = transport_of(transport).device(spec.local_rank)
        return TorchGroup.alone(transport=transport, device=device, generation=spec.generation)
    until = time.monotonic() + spec.timeout_s
    if spec.rank == 0:
        store, notice = host(spec)
        verdict = decide(spec, store, notice, me, until)
    else:
        store = join(spec, until)
        verdict = await_verdict(spec, store, me, until)
    obey(spec, verdict)
    transport = str(verdict["transport"])
    with TRANSPORTS.told(transport, "to form a group"):
        group = _formed(transport, spec, PrefixStore(f"group-{spec.generation}", store.below))
    group.kept, group.node = store, spec.node
    return group


def _formed(transport: str, spec: GroupSpec, store: Store) -> BaseGroup:
    try:
        group: Any = transport_of(transport).form(spec, store)
    except RuntimeError as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RendezvousError(
            f"rank {spec.rank} on {spec.node} could not connect to the others over {transport}, "
            f"after all {spec.size} had arrived: {first_line}"
        ) from error
    if not isinstance(group, BaseGroup):
        raise TypeError(f"form() gave {group!r:.60}, which is no BaseGroup")
    return group
