"""Facts about the framework of `toy_framework.py`, and a launcher. Submitting imports this."""

import socket

from orchestrator.config.frameworks import FrameworkFacts, Limit
from orchestrator.config.launchers import Launcher


class NumpyFacts(FrameworkFacts):
    """Facts about `numpy`; it sends its gradient at the boundary."""

    limits = (
        Limit("accumulation.reduction", ("fast",)),
        Limit("train.precision", ("float32",)),
        Limit("engine.shard_optimizer", (False,)),
    )
    sends_early = False


class Postman(Launcher):
    """`job.style=letters`: each rank writes to a letterbox of the first node's agent."""

    title = "letterrun"
    rank_0_listens = False

    def serve(self, address, ranks, timeout_s):
        box = socket.create_server((address, 0), backlog=ranks)
        return box.getsockname()[1], box.close

    def variables(self, start):
        return {"LETTERBOX": f"{start.address}:{start.port}", "SENDER": f"{start.rank}"}
