"""Reference page of all configuration keys (docs/configuration.md)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from orchestrator.config.schema import Bound, Config

MEANINGS = {
    "job": "The job: `_target_` is the dotted name of its class, the rest its own arguments ([your-own-job](../tutorial/your-own-job.md))",
    "optimizer": "`_target_` and its arguments; empty: the job builds its own",
    "transport": "How ranks talk; `auto`: nccl or hccl where there are devices, else gloo (MindSpore: mccl)",
    "cluster.kind": "Pretended nodes on this machine, SLURM, or a kind of an installed package",
    "cluster.nodes": "How many nodes: a number, or `{min: 2, max: 4}` under SLURM",
    "cluster.ranks_per_node": "Ranks on each of them",
    "cluster.cpus_per_rank": "Processors, and threads, of each rank",
    "cluster.gpus_per_node": "GPUs of each node: a number, or with their type (`a100:4`)",
    "cluster.rendezvous_timeout_s": "How long ranks wait for each other at the start",
    "cluster.collective_timeout_s": "How long one collective may take",
    "cluster.heartbeat_timeout_s": "After how long a silent or stopped rank counts as failed",
    "cluster.hang_timeout_s": "After how long a rank that uses no processor has failed",
    "cluster.partition": "SLURM's partition, or several with commas",
    "cluster.account": "Who is billed",
    "cluster.qos": "SLURM's quality of service",
    "cluster.constraint": "Features that nodes must have",
    "cluster.exclude": "Nodes that are not wanted",
    "cluster.reservation": "A reservation of yours",
    "cluster.comment": "For people who read the queue",
    "cluster.memory_gib": "Memory of each node; null: as the partition says",
    "cluster.time_min": "The time limit in minutes; null: the partition's",
    "cluster.signal_ahead_s": "How long before the time limit ranks are told to stop",
    "cluster.requeue": "Queued again after preemption or a lost node; null: as the cluster does",
    "cluster.allocation": "`current`: at once in the allocation that one has; `new`: as a job of its own ([slurm](../how-to/slurm.md))",
    "cluster.exclusive": "Nodes for this job alone",
    "cluster.interface": "The network interface on which ranks meet",
    "cluster.slurm_conf": "Another cluster than the machine's own",
    "cluster.slurm_flags": "Further options of sbatch by name, without dashes",
    "cluster.srun_flags": "Further options of srun",
    "cluster.environment": "Variables that ranks are given",
    "cluster.preamble": "Lines of shell before the ranks start: `module load …`",
    "cluster.container": "An image that ranks run in",
    "cluster.container_runtime": "What runs it",
    "cluster.options": "Of a kind of an installed package",
    "accumulation.global_batch": "Samples of one update over all ranks (256 where nothing says otherwise)",
    "accumulation.steps": "Micro-steps of an update on each rank (4 where nothing says otherwise)",
    "accumulation.micro_batch": "Samples of a micro-step on a rank: at most; in `reproducible` the chunk's size",
    "accumulation.ragged": "The smaller last window of an epoch: an exactly weighted update, left out, or filled from the next",
    "accumulation.reduction": "`reproducible`: the same bits on any number of ranks",
    "schedule.base_lr": "The learning rate",
    "schedule.base_batch": "The global batch that it is meant for",
    "schedule.scaling": "How it grows with the global batch",
    "schedule.warmup_updates": "Updates until it is reached",
    "schedule.decay": "How it falls to the end",
    "train.updates": "How many updates; wins over `train.epochs`",
    "train.epochs": "How often the data set is gone through (once, where neither is said)",
    "train.seed": "Of the order of samples, weights and dropout",
    "train.clip_norm": "The largest norm of an update's gradient; null: not clipped",
    "train.precision": "What forward and backward compute in",
    "train.evaluate_every": "Updates between two evaluations; null: an epoch, 0: at the end alone",
    "train.checkpoint_every": "Updates between two checkpoints; null: an epoch, 0: at the end alone",
    "train.keep_checkpoints": "How many of them are kept",
    "train.checkpoint_in_background": "Whether a thread writes them, from a copy in memory, while training goes on",
    "train.loader_workers": "Processes of each rank that fetch samples ahead",
    "train.on_non_finite": "What a loss or gradient that is not finite does: all ranks stop, or skip that update",
    "train.initial_weights": "A run, or a safetensors file, whose weights this one starts from",
    "engine.framework": "PyTorch or MindSpore; `auto`: what the job's class says",
    "engine.bucket_mib": "Gradients sent together; null: an eighth of them, but 1 to 25 MiB",
    "engine.wire": "What gradients travel in: their own type, or rounded ([mathematics](../explanation/mathematics.md))",
    "engine.norm": "What a model's batch norms become ([your-own-job](../tutorial/your-own-job.md))",
    "engine.mode": "MindSpore's: what is compiled ([mindspore](../how-to/mindspore.md))",
    "engine.jit_level": "MindSpore's compiler level",
    "engine.style": "MindSpore's: our loop, or the framework's own",
    "engine.shard_optimizer": "Each rank keeps 1/R of the optimizer's state",
    "run.dir": "The run's folder; null: `runs/` and the time",
    "run.name": "A part of that folder's name",
    "run.watch": "Followed to its end; null: a local run is, one on SLURM is not",
    "run.snapshot": "The code is copied at submission, and the copy runs",
    "run.max_restarts": "How often a run that failed begins again by itself",
    "run.survive": "When a rank dies in mid-window, the others redo it and go on; null: on more than one node, where it can be had ([surviving](../explanation/surviving.md))",
    "run.max_replacements": "How many lost ranks are started again while the others go on; null: 16 on pretended nodes ([surviving](../explanation/surviving.md))",
    "sweep.parallel": "Points of a sweep at once, at the most; auto: as many as this machine has cores, memory "
    "and GPUs for, on a scheduler as it likes",
    "sweep.pack": "Points that share an allocation on SLURM, each on its share of it; true: as many as a node has "
    "room for, or a number, at the most ([sweeps](../how-to/sweeps.md))",
    "sweep.force": "Run also those points of a sweep that are done (as --force does)",
    "sweep.objective": "The figure of result.json that a search is told of a point; loss is the training's, at its end",
    "sweep.search": "Our own search: how it chooses the next trial by what came of earlier ones ([sweeps](../how-to/sweeps.md))",
    "sweep.trials": "How many trials a search makes; null: all there are, of a grid",
    "sweep.seed": "What a search draws by",
    "sweep.direction": "Whether a search wants the objective small or large; auto: small, for loss and seconds",
    "sweep.prune": "Which trials a search ends early: those worse than the median of the others, or none",
    "budget.gpu_hours": "A sweep whose plans come to more GPU-hours is refused",
    "tracker.kind": "Where scalars go beside metrics.jsonl ([trackers](../how-to/trackers.md))",
    "tracker.options": "Of that tracker",
    "facts.parameters": "For `plan`: how many the model has, before it is built",
    "facts.dataset_samples": "For `plan`: how many samples there are",
    "facts.update_s": "How long an update takes, as an earlier run measured it",
}  # fmt: skip


HEAD = """# Every key of the configuration

Set a key as `key=value` after `python -m orchestrator.launch`, or in a file of your own
(`--config-dir`). `python -m orchestrator.launch --cfg job` prints the resulting configuration.
Other keys and values are refused, with the nearest valid one. The groups `cluster=`, `job=`,
`optimizer=`, `tracker=` and `experiment=` set several keys at once, to defaults other than these.

`python -m orchestrator.config.reference > docs/reference/configuration.md` generates this page; a
test checks that it is current.

| key | type | default | may be | what it does |
|---|---|---|---|---|
"""


def keys(schema: Any = Config, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Every key by its dotted name, sections opened."""
    for item in fields(schema):
        section = item.default_factory
        if section is not MISSING and is_dataclass(section):
            yield from keys(section, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item


def markdown() -> str:
    """The page. Raises `KeyError` for a key without a sentence."""
    return HEAD + "".join(_row(key, item) for key, item in keys())


def _row(key: str, item: Field[Any]) -> str:
    bound: Bound = item.metadata.get("bound", Bound())
    kind = str(item.type).replace(" | None", " or null").replace("Any", "any")
    return f"| `{key}` | {kind} | {_default(item)} | {_allowed(bound)} | {MEANINGS[key]} |\n"


def _default(item: Field[Any]) -> str:
    value = item.default
    if value is MISSING:
        return "empty"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _allowed(bound: Bound) -> str:
    if bound.choice:
        return ", ".join(bound.choice)
    least = "" if bound.least is None else f"{bound.least:,.12g} or more"
    above = "" if bound.above is None else f"above {bound.above:,.12g}"
    most = "" if bound.most is None else f"at most {bound.most:,.12g}"
    return ", ".join(filter(None, (least, above, most)))


if __name__ == "__main__":
    sys.stdout.write(markdown())
