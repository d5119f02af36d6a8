"""Reference page of all configuration keys (docs/reference/configuration.md)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from orchestrator.config.schema import Bound, Config

MEANINGS = {
    "job": "`_target_`: dotted name of the job's class; the rest: its arguments ([your-own-job](../tutorial/your-own-job.md))",
    "optimizer": "`_target_` and its arguments; empty: the job builds its own",
    "transport": "How ranks communicate; `auto`: nccl or hccl with devices, else gloo (MindSpore: mccl)",
    "cluster.kind": "Simulated nodes on this machine, SLURM, or a kind of an installed package",
    "cluster.nodes": "Number of nodes, or `{min: 2, max: 4}` on SLURM",
    "cluster.ranks_per_node": "Ranks on each node",
    "cluster.cpus_per_rank": "Processors and threads of each rank",
    "cluster.gpus_per_node": "GPUs of each node: a number, or with their type (`a100:4`)",
    "cluster.rendezvous_timeout_s": "Longest wait for the other ranks at the start",
    "cluster.collective_timeout_s": "Longest collective",
    "cluster.heartbeat_timeout_s": "A rank without heartbeat, or stopped, for this long has failed",
    "cluster.hang_timeout_s": "A rank that uses no processor for this long has failed",
    "cluster.partition": "SLURM partition, or several with commas",
    "cluster.account": "Account to bill",
    "cluster.qos": "Quality of service",
    "cluster.constraint": "Required features of nodes",
    "cluster.exclude": "Nodes to avoid",
    "cluster.reservation": "Reservation",
    "cluster.comment": "Comment for readers of the queue",
    "cluster.memory_gib": "Memory of each node; null: the partition's default",
    "cluster.time_min": "Time limit in minutes; null: the partition's default",
    "cluster.signal_ahead_s": "Stop signal this long before the time limit",
    "cluster.requeue": "Requeue after preemption or a lost node; null: the cluster's default",
    "cluster.allocation": "`current`: start inside the existing allocation; `new`: submit a job ([slurm](../how-to/slurm.md))",
    "cluster.exclusive": "Use nodes exclusively",
    "cluster.interface": "Network interface on which ranks meet",
    "cluster.slurm_conf": "slurm.conf of another cluster",
    "cluster.slurm_flags": "Further options of sbatch by name, without dashes",
    "cluster.srun_flags": "Further options of srun",
    "cluster.environment": "Environment variables of ranks",
    "cluster.preamble": "Lines of shell before the ranks start: `module load …`",
    "cluster.container": "Container image of the ranks",
    "cluster.container_runtime": "Container runtime",
    "cluster.options": "Options of a cluster from an installed package",
    "accumulation.global_batch": "Samples of one update over all ranks (256 unless set otherwise)",
    "accumulation.steps": "Micro-steps of an update on each rank (4 unless set otherwise)",
    "accumulation.micro_batch": "Most samples of a micro-step; in `reproducible` mode the size of a chunk",
    "accumulation.ragged": "The smaller last window of an epoch: exactly weighted, left out, or filled from the next epoch",
    "accumulation.reduction": "`reproducible`: the same bits on any number of ranks",
    "schedule.base_lr": "Learning rate; null: 0.001, or that of the job's own optimizer",
    "schedule.base_batch": "Global batch for which `base_lr` was tuned",
    "schedule.scaling": "Growth of the rate with the global batch",
    "schedule.warmup_updates": "Updates of warm-up",
    "schedule.decay": "Decay of the rate",
    "train.updates": "Number of updates; takes precedence over `train.epochs`",
    "train.epochs": "Passes over the data set (one if neither is set)",
    "train.seed": "Seed of order, weights and dropout",
    "train.clip_norm": "Largest gradient norm of an update; null: no clipping",
    "train.precision": "Type of forward and backward",
    "train.evaluate_every": "Updates between evaluations; null: an epoch, 0: only at the end",
    "train.checkpoint_every": "Updates between checkpoints; null: an epoch, 0: only at the end",
    "train.keep_checkpoints": "Checkpoints to keep",
    "train.checkpoint_in_background": "A thread writes checkpoints from a copy in memory while training continues",
    "train.loader_workers": "Processes of each rank that load samples ahead",
    "train.on_non_finite": "After a non-finite loss or gradient all ranks stop, or skip the update",
    "train.initial_weights": "Run, or safetensors file, to start from",
    "engine.bucket_mib": "Gradients sent together; null: an eighth of them, 1 to 25 MiB",
    "engine.norm": "Replacement of batch norms ([your-own-job](../tutorial/your-own-job.md))",
    "engine.mode": "MindSpore: what is compiled ([mindspore](../how-to/mindspore.md))",
    "engine.jit_level": "MindSpore: compiler level",
    "engine.style": "MindSpore: our loop, or the framework's own accumulation",
    "engine.shard_optimizer": "Each rank keeps 1/R of the optimizer's state",
    "run.dir": "Run folder; null: `runs/` and the time",
    "run.name": "Part of the folder's name",
    "run.watch": "Follow the run to its end; null: local runs only",
    "run.snapshot": "Copy the code at submission and run the copy",
    "run.max_restarts": "Automatic restarts of a failed run",
    "run.survive": "Continue without a lost rank; null: on several nodes, where supported ([surviving](../explanation/surviving.md))",
    "run.max_replacements": "Processes started for lost ranks; null: 16 ([surviving](../explanation/surviving.md))",
    "sweep.parallel": "Most points at once; auto: what this machine has room for, on a scheduler its own limit",
    "sweep.force": "Also run finished points (as --force)",
    "sweep.objective": "Value of result.json that a search optimises; loss: the training's, at its end",
    "sweep.search": "Search method ([sweeps](../how-to/sweeps.md))",
    "sweep.trials": "Number of trials; null: all of a grid",
    "sweep.seed": "Seed of the search",
    "sweep.direction": "Direction of the objective; auto: minimize loss and seconds",
    "sweep.prune": "`median`: end trials that are worse than the median of the others",
    "tracker.kind": "Destination of scalars besides metrics.jsonl ([trackers](../how-to/trackers.md))",
    "tracker.options": "Options of the tracker",
    "facts.parameters": "For `plan`: number of the model's parameters",
    "facts.dataset_samples": "For `plan`: number of samples",
}  # fmt: skip


HEAD = """# Every key of the configuration

Set a key as `key=value` after `python -m orchestrator.launch`, or in a file of your own
(`--config-dir`). `python -m orchestrator.launch --cfg job` prints the resulting configuration.
Other keys and values are refused, with the nearest valid one. The groups `cluster=`, `job=`,
`optimizer=`, `tracker=` and `experiment=` set several keys at once, to defaults other than these.

`python -m orchestrator.config.reference > docs/reference/configuration.md` generates this page; a
test checks that it is current.

| key | values | default | meaning |
|---|---|---|---|
"""


def keys(schema: Any = Config, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Yield every key by its dotted name."""
    for item in fields(schema):
        section = item.default_factory
        if section is not MISSING and is_dataclass(section):
            yield from keys(section, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item


def markdown() -> str:
    """Return the page.

    Raises:
        KeyError: a key has no sentence.
    """
    return HEAD + "".join(_row(key, item) for key, item in keys())


def _row(key: str, item: Field[Any]) -> str:
    values = _values(str(item.type), item.metadata.get("bound", Bound()))
    return f"| `{key}` | {values} | {_default(item)} | {MEANINGS[key]} |\n"


def _default(item: Field[Any]) -> str:
    value = item.default
    if value is MISSING:
        return "empty"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _values(kind: str, bound: Bound) -> str:
    """Return the values of a field in words: its choices, or its type and range."""
    kind, nullable, _ = kind.partition(" | None")
    if bound.choice:
        values = ", ".join(bound.choice)
    elif bound.least is not None and bound.most is not None:
        values = f"{kind}, {bound.least:,.12g} to {bound.most:,.12g}"
    else:
        least = "" if bound.least is None else f" ≥ {bound.least:,.12g}"
        above = "" if bound.above is None else f" > {bound.above:,.12g}"
        most = "" if bound.most is None else f", at most {bound.most:,.12g}"
        values = f"{kind}{least}{above}{most}".replace("Any", "any")
    return f"{values} or null" if nullable else values


if __name__ == "__main__":
    sys.stdout.write(markdown())
