"""Exact gradient accumulation on many nodes: state a global batch, get provably its update.

The names listed here are the public interface, which follows the version; deeper modules may move.
Each name is imported when it is first used, so that `import orchestrator` costs next to nothing and
imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api import (
        Run,
        Sweep,
        compare,
        list_runs,
        open_run,
        open_sweep,
        plan_run,
        plan_sweep,
        start,
        start_sweep,
    )
    from orchestrator.client.run import current_run
    from orchestrator.data import ShardedDataset
    from orchestrator.engine.torch import (
        AccumulationOptions,
        Accumulator,
        AllGather,
        AllReduceMean,
        AllReduceSum,
        TorchGroup,
        all_gather,
        all_reduce_mean,
        all_reduce_sum,
        with_norms,
    )
    from orchestrator.errors import (
        ClusterError,
        ConfigError,
        DataError,
        JobError,
        OrchestratorError,
        RunFailed,
        RunFolderError,
        UsageError,
    )
    from orchestrator.health.doctor import check_machine
    from orchestrator.job import Job, Loss
    from orchestrator.local_ranks.threads import run_in_threads
    from orchestrator.plan.order import Shards

__version__ = "0.1.0"
__all__ = [
    "AccumulationOptions",
    "Accumulator",
    "AllGather",
    "AllReduceMean",
    "AllReduceSum",
    "ClusterError",
    "ConfigError",
    "DataError",
    "Job",
    "JobError",
    "Loss",
    "OrchestratorError",
    "Run",
    "RunFailed",
    "RunFolderError",
    "ShardedDataset",
    "Shards",
    "Sweep",
    "TorchGroup",
    "UsageError",
    "__version__",
    "all_gather",
    "all_reduce_mean",
    "all_reduce_sum",
    "check_machine",
    "compare",
    "current_run",
    "list_runs",
    "open_run",
    "open_sweep",
    "plan_run",
    "plan_sweep",
    "run_in_threads",
    "start",
    "start_sweep",
    "with_norms",
]
_HOMES = {
    "Job": "job",
    "Loss": "job",
    "current_run": "client.run",
    "ConfigError": "errors",
    "DataError": "errors",
    "JobError": "errors",
    "OrchestratorError": "errors",
    "ClusterError": "errors",
    "RunFailed": "errors",
    "RunFolderError": "errors",
    "UsageError": "errors",
    "Shards": "plan.order",
    "ShardedDataset": "data",
    "run_in_threads": "local_ranks.threads",
    "Run": "api",
    "Sweep": "api",
    "list_runs": "api",
    "open_run": "api",
    "open_sweep": "api",
    "start": "api",
    "start_sweep": "api",
    "plan_run": "api",
    "plan_sweep": "api",
    "compare": "api",
    "check_machine": "health.doctor",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'engine.torch')}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
