"""How many points of a sweep would share an allocation, how many be queued at first, and how many
in turn: `plan -m`, which asks the scheduler as a launch does, and submits nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.clusters.slurm.queue.arrays import LIMITED_BY, largest_array
from orchestrator.clusters.slurm.queue.in_turn import SPARE, refusal, room_for, tightest, turns
from orchestrator.clusters.slurm.queue.laid_out import Placed
from orchestrator.clusters.slurm.queue.packing.submit import packed, told
from orchestrator.errors import ClusterError
from orchestrator.scheduler.client import SlurmClient


def foreseen(placed: Sequence[Placed], at_once: int | None) -> list[str]:
    """A sentence on those that share allocations, if any do, and one for each limit that leaves
    less room than these points take.

    Raises:
        ClusterError: there is not even enough for one after another, or the scheduler is silent.
    """
    alike: dict[object, list[Placed]] = {}
    packs, alone = packed(placed)
    for cluster, request in alone:
        options: Mapping[str, str] = request.details["options"]
        key = (cluster.config.cluster.slurm_conf, *(options.get(name) for name in LIMITED_BY))
        alike.setdefault(key, []).append((cluster, request))
    said = [told(packs, alone)] if packs else []
    for members in alike.values():
        (cluster, request), total = members[0], len(members)
        conf = cluster.config.cluster.slurm_conf
        client, most = SlurmClient(conf), min(total, *largest_array(conf))
        if most < 2 or (room := room_for(client, request.text, most)) >= most:
            continue
        if (why := refusal(client, request.text, total)) is not None:
            raise ClusterError(why)
        first = min(room - SPARE, at_once or total)
        said.append(turns(tightest(client), first, total))
    return said
