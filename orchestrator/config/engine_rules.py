"""What an engine cannot do, refused before anything is queued: rules on values, nothing imported.

The workers check again what only they can know (devices, the model); what is here needs no
framework.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys

from orchestrator.config.schema import Config, ScheduleConfig, node_range
from orchestrator.errors import ConfigError, JobError

MINDSPORE = "2.10"
"""The version that was tested."""

SHARDABLE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
"""Optimizers of torch.optim whose state can be in pieces; an engine's own list, in words."""

TRANSPORTS = {
    "torch": ("auto", "gloo", "nccl", "hccl"),
    "mindspore": ("auto", "mccl", "nccl", "hccl"),
}


def refuse_unsupported(config: Config, framework: str | None, *, coupled: bool = False) -> None:
    """Raise for what the job's engine does not have. One message for all of it.

    Args:
        framework: what the job's class says; None when its source does not tell.
        coupled: the job's loss is one of all embeddings (`embed`, `loss_of_embeddings`).

    Raises:
        ConfigError: a key that the engine cannot honour, with the nearest value that it can.
        JobError: the job is written for another framework than the one asked for; the framework is
            not installed here, or with a NumPy that it fails with.
    """
    if framework is None:
        return
    if config.engine.framework not in ("auto", framework):
        raise JobError(
            f"engine.framework={config.engine.framework}, but the job is written for {framework}: "
            f"{config.job['_target_']}; leave engine.framework out, or choose another job"
        )
    wrong = _transport(config, framework)
    if framework == "mindspore":
        wrong += _mindspore(config)
        if coupled:
            wrong.append(
                "embed() and loss_of_embeddings() are not available with MindSpore; write the job "
                "for torch"
            )
        if config.engine.style == "framework":
            wrong += _framework_style(config)
    else:
        wrong += _torch(config, coupled=coupled)
    if wrong:
        raise ConfigError("\n".join(wrong))
    if config.cluster.kind == "local":
        check_installed(framework)


def refuse_schedule(job: str, schedule: ScheduleConfig) -> None:
    """Raise `ConfigError` for a schedule beside a job's own rates: one would be a lie."""
    plain = ScheduleConfig()
    stated = [
        f"schedule.{name}={value}"
        for name, value in vars(schedule).items()
        if value != getattr(plain, name)
    ]
    if stated:
        raise ConfigError(
            f"{job}.learning_rate(update) gives the rate of each update, so {', '.join(stated)} "
            f"would have no effect; leave {'it' if len(stated) == 1 else 'them'} out"
        )


def notes(config: Config, framework: str | None) -> list[str]:
    """What will happen on the nodes that a plan does not show: sentences for `plan`."""
    cluster, transport = config.cluster, config.transport
    found: list[str] = []
    if framework == "mindspore":
        found.append(
            "ranks meet in the run folder, then in MindSpore's dynamic cluster, whose scheduler is "
            "a child of rank 0: no msrun and no rank table; a dead rank is noticed within seconds "
            "by our own connections"
        )
    if transport == "hccl":
        last = cluster.ranks_per_node - 1
        found.append(
            f"each rank takes the Ascend NPU of its local rank (0 to {last}) before it makes any "
            f"tensor; a node without CANN refuses"
            + (", as does one without torch_npu" if framework == "torch" else "")
        )
        found.append(
            f"HCCL waits {cluster.rendezvous_timeout_s:g} s for connections and "
            f"{cluster.collective_timeout_s:g} s for a collective"
        )
    return found


def _transport(config: Config, framework: str) -> list[str]:
    known = TRANSPORTS.get(framework, (config.transport,))
    if config.transport in known:
        return []
    return [
        (
            f"transport={config.transport} is not one of {framework}'s, which are "
            f"{', '.join(known)}; try transport=auto"
        )
    ]


def _torch(config: Config, *, coupled: bool) -> list[str]:
    wrong: list[str] = []
    if config.engine.norm == "exact" and coupled:
        wrong.append(
            "engine.norm=exact is not available for a job with embed() and loss_of_embeddings(); "
            "try engine.norm=group or engine.norm=frozen"
        )
    if config.engine.norm == "exact" and config.train.precision == "float16":
        wrong.append(
            "engine.norm=exact is not available with train.precision=float16; try "
            "train.precision=bfloat16"
        )
    if config.engine.wire != "own":
        wrong += _narrow_wire(config)
    if config.engine.shard_optimizer:
        wrong += _shards(config)
    defaults = {"mode": "jit", "jit_level": "auto", "style": "own"}
    return wrong + [
        f"engine.{key} is MindSpore's, and this job is written for torch; leave it out"
        for key, value in defaults.items()
        if getattr(config.engine, key) != value
    ]


def _narrow_wire(config: Config) -> list[str]:
    wire, own = f"engine.wire={config.engine.wire}", "or engine.wire=own"
    wrong: list[str] = []
    if config.accumulation.reduction != "fast":
        wrong.append(
            f"{wire} rounds sums in an order that depends on the ranks; try "
            f"accumulation.reduction=fast, {own}"
        )
    if config.accumulation.sync != "boundary":
        wrong.append(
            f"{wire} would round what is summed already once more in every micro-step; try "
            f"accumulation.sync=boundary, {own}"
        )
    return wrong


def _shards(config: Config) -> list[str]:
    asked, sharded = config.accumulation, "engine.shard_optimizer=true"
    wrong: list[str] = []
    module, _, name = str(config.optimizer.get("_target_", "")).rpartition(".")
    if module == "torch.optim" and name not in SHARDABLE:
        wrong.append(
            f"{sharded} is not available with optimizer._target_={module}.{name}, which does not "
            f"treat each number by itself, from nothing; there are {', '.join(SHARDABLE)}"
        )
    if asked.reduction != "fast":
        wrong.append(
            f"{sharded} is not available with accumulation.reduction={asked.reduction}; try "
            f"accumulation.reduction=fast"
        )
    if asked.sync != "boundary":
        wrong.append(
            f"{sharded} is not available with accumulation.sync={asked.sync}; try "
            f"accumulation.sync=boundary"
        )
    if config.engine.wire != "own":
        wrong.append(
            f"{sharded} is not available with engine.wire={config.engine.wire}; try engine.wire=own"
        )
    return wrong


def _mindspore(config: Config) -> list[str]:
    wrong: list[str] = []
    if config.train.precision == "bfloat16" and config.transport not in ("hccl", "nccl"):
        wrong.append(
            "train.precision=bfloat16 cannot be computed by MindSpore on a CPU; try "
            "train.precision=float16, or say which devices there are: transport=hccl or nccl"
        )
    if config.accumulation.reduction != "fast":
        wrong.append(
            f"accumulation.reduction={config.accumulation.reduction} is not available with "
            f"MindSpore; try accumulation.reduction=fast"
        )
    if config.engine.norm == "exact":
        wrong.append(
            "engine.norm=exact is not available with MindSpore; try engine.norm=group or "
            "engine.norm=frozen"
        )
    if config.engine.wire != "own":
        wrong.append(
            f"engine.wire={config.engine.wire} is not available with MindSpore; try engine.wire=own"
        )
    if config.engine.shard_optimizer:
        wrong.append(
            "engine.shard_optimizer=true is not available with MindSpore; leave it out, or write "
            "the job for torch"
        )
    if config.engine.jit_level != "auto" and config.engine.mode == "pynative":
        wrong.append(
            f"engine.jit_level={config.engine.jit_level} means nothing with "
            f"engine.mode=pynative; try engine.mode=jit"
        )
    return wrong


def _framework_style(config: Config) -> list[str]:
    ranks = node_range(config.cluster.nodes)[1] * config.cluster.ranks_per_node
    style, own = "engine.style=framework", "or engine.style=own"
    wrong: list[str] = []
    if ranks > 1:
        wrong.append(
            f"{style} cannot use {ranks} ranks: MindSpore's AutoParallel needs Ascend or GPU for "
            f"more than one process; try cluster.nodes=1 cluster.ranks_per_node=1, {own}"
        )
    if config.engine.mode == "pynative":
        wrong.append(f"{style} needs a graph; try engine.mode=graph, {own}")
    if config.train.clip_norm is not None:
        wrong.append(
            f"{style} cannot clip the accumulated gradient; leave train.clip_norm out, {own}"
        )
    if config.accumulation.ragged != "drop":
        wrong.append(f"{style} needs windows of equal size; try accumulation.ragged=drop, {own}")
    if config.accumulation.sync != "boundary":
        wrong.append(f"{style} synchronises once an update; try accumulation.sync=boundary, {own}")
    if config.train.precision != "float32":
        wrong.append(f"{style} computes in float32; try train.precision=float32, {own}")
    if config.train.on_non_finite != "stop":
        wrong.append(f"{style} cannot skip an update; try train.on_non_finite=stop, {own}")
    return wrong


def check_installed(framework: str | None) -> None:
    """Raise `JobError` when this machine's MindSpore cannot run a job. Nothing is imported."""
    if framework != "mindspore":
        return
    try:
        version = importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install 'cluster-orchestrator[mindspore]'"
        if sys.version_info >= (3, 13):
            remedy += f" under Python 3.11 or 3.12: there is none for {platform.python_version()}"
        sentence = f"this job is written for MindSpore, which is not installed; {remedy}"
        raise JobError(sentence) from None
    if not version.startswith(f"{MINDSPORE}."):
        raise JobError(
            f"MindSpore {version} is installed, but {MINDSPORE} was tested here; "
            f"pip install 'cluster-orchestrator[mindspore]'"
        )
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".", maxsplit=1)[0]) >= 2:
        raise JobError(
            f"MindSpore fails with NumPy {numpy} at its first operator; pip install 'numpy<2'"
        )
