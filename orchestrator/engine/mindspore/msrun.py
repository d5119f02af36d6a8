"""`job.style=mindspore` for programs. Importing it imports no MindSpore."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.config.launchers import Launcher, ProgramRank


class Msrun(Launcher):
    """Variables that MindSpore's parallel/cluster/process_entity sets."""

    title = "msrun"
    rank_0_listens = False
    device_variable = "ASCEND_RT_VISIBLE_DEVICES"

    def serve(self, address: str, ranks: int, timeout_s: float) -> tuple[int, Callable[[], None]]:
        # Where a plan is printed, the title alone is needed.
        from orchestrator.engine.mindspore.rendezvous import Scheduler

        scheduler = Scheduler(address, ranks, timeout_s)
        return scheduler.port, scheduler.end

    def variables(self, start: ProgramRank) -> dict[str, str]:
        return {
            "MS_ROLE": "MS_WORKER",
            "MS_WORKER_NUM": str(start.size),
            "MS_NODE_ID": str(start.rank),
            "MS_SCHED_HOST": start.address,
            "MS_SCHED_PORT": str(start.port),
            "MS_TOPO_TIMEOUT": str(max(1, round(start.timeout_s))),
            "RANK_ID": str(start.rank),
            "RANK_SIZE": str(start.size),
            "DEVICE_ID": "0" if start.owns_device else str(start.local_rank),
        }
