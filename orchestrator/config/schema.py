"""The configuration: a schema that Hydra fills in, and the checks that need no plan.

The dataclasses are mutable because OmegaConf fills them; nothing changes them after `check`.
`compose.composer` turns a command line into a `Config`; `conf/` holds the values people choose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.config.optimizer_rules import problems
from orchestrator.config.upper_bounds import refuse_beyond, too_many_ranks
from orchestrator.errors import ConfigError, did_you_mean

GPUS = re.compile(r"(?:[A-Za-z][A-Za-z0-9_.+-]*:)?([0-9]{1,6})")
SIGNAL_AHEAD_S = 60
"""`cluster.signal_ahead_s` where nobody says otherwise."""
TRANSPORTS = ("auto", "nccl", "hccl", "gloo", "mccl")
CHOICES: dict[str, tuple[str, ...]] = {
    "cluster.kind": ("local", "slurm"),
    "accumulation.ragged": ("update", "drop", "carry"),
    "accumulation.sync": ("boundary", "every_step"),
    "accumulation.reduction": ("fast", "reproducible"),
    "accumulation.balance": ("even",),
    "schedule.scaling": ("linear", "sqrt", "none"),
    "schedule.decay": ("cosine", "linear", "none"),
    "train.precision": ("float32", "bfloat16", "float16", "float64"),
    "train.on_non_finite": ("stop", "skip"),
    "engine.framework": ("auto", "torch", "mindspore"),
    "engine.mode": ("pynative", "jit", "graph"),
    "engine.jit_level": ("auto", "O0", "O1", "O2"),
    "engine.style": ("own", "framework"),
    "engine.norm": ("warn", "frozen", "group", "exact"),
    "engine.wire": ("own", "bfloat16"),
    "tracker.kind": ("tensorboard", "none"),
    "transport": TRANSPORTS,
}


@dataclass
class ClusterConfig:
    """Where the ranks run. The fields under "SLURM" are refused for a local cluster."""

    kind: str = "local"
    nodes: Any = 2
    ranks_per_node: int = 2
    cpus_per_rank: int = 1
    gpus_per_node: Any = None
    rendezvous_timeout_s: float = 120.0
    collective_timeout_s: float = 1800.0
    heartbeat_timeout_s: float = 20.0
    hang_timeout_s: float = 300.0
    # SLURM
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    comment: str | None = None
    memory_gib: float | None = None
    time_min: int | None = None
    signal_ahead_s: int | None = None
    requeue: bool | None = None
    exclusive: bool | None = None
    interface: str | None = None
    slurm_conf: str | None = None
    slurm_flags: dict[str, Any] = field(default_factory=dict[str, Any])
    srun_flags: dict[str, Any] = field(default_factory=dict[str, Any])
    environment: dict[str, str] = field(default_factory=dict[str, str])
    preamble: list[str] = field(default_factory=list[str])
    container: str | None = None
    container_runtime: str | None = None


SLURM_ONLY = (
    "partition", "account", "qos", "constraint", "exclude", "reservation", "comment", "memory_gib",
    "time_min", "signal_ahead_s", "requeue", "exclusive", "interface", "slurm_conf", "slurm_flags",
    "srun_flags", "preamble", "container", "container_runtime",
)  # fmt: skip


@dataclass
class AccumulationConfig:
    """How the samples of one update are cut. Any two of the first three give the third.

    balance: `even`; `measured` (in proportion to each rank's speed) is not there yet.
    """

    global_batch: int | None = None
    steps: int | None = None
    micro_batch: int | None = None
    ragged: str = "update"
    sync: str = "boundary"
    reduction: str = "fast"
    balance: str = "even"


@dataclass
class ScheduleConfig:
    """Learning rate in updates: base_lr x scaling(G / base_batch) x warm-up and decay."""

    base_lr: float = 1e-3
    base_batch: int = 256
    scaling: str = "none"
    warmup_updates: int = 0
    decay: str = "none"


@dataclass
class TrainConfig:
    """The training. `evaluate_every` and `checkpoint_every` count updates; null: each epoch.

    initial_weights: a run, or a safetensors file, whose weights this run starts from; the optimizer
    and the updates begin anew.
    """

    updates: int | None = None
    epochs: float | None = None
    seed: int = 0
    clip_norm: float | None = None
    precision: str = "float32"
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    loader_workers: int = 0
    on_non_finite: str = "stop"
    initial_weights: str | None = None


@dataclass
class EngineConfig:
    """Which framework computes ("auto": what the job's class says), and the size of its buckets.

    bucket_mib: null is an eighth of the gradient, but 1 to 25 MiB, and all of one up to 3 MiB;
    under MindSpore, where none leaves before the boundary, 25 MiB.
    wire: gradients travel in their own type, or rounded; shard_optimizer: each rank keeps 1/R of
    the optimizer's state and steps 1/R of the weights (docs/mathematics.md has what both cost).
    norm is what a model's batch norms become (docs/your-own-job.md). mode, jit_level and style are
    MindSpore's (docs/mindspore.md); log_every counts micro-steps.
    """

    framework: str = "auto"
    bucket_mib: float | None = None
    wire: str = "own"
    norm: str = "warn"
    mode: str = "jit"
    jit_level: str = "auto"
    style: str = "own"
    log_every: int = 0
    shard_optimizer: bool = False

    @property
    def bucket_bytes(self) -> int | None:
        return None if self.bucket_mib is None else int(self.bucket_mib * 2**20)


@dataclass
class RunConfig:
    """Where the run is kept and how it is followed. `watch` null: local yes, SLURM no.

    max_restarts: how often a run that failed begins again by itself, from its newest checkpoint.
    """

    dir: str | None = None
    name: str | None = None
    watch: bool | None = None
    snapshot: bool = True
    max_restarts: int = 0


@dataclass
class TrackerConfig:
    """Where scalars go beside metrics.jsonl."""

    kind: str = "tensorboard"


@dataclass
class FactsConfig:
    """What the planner may know of job and data before either is loaded; null: not known.

    The workers check both and say so when one is wrong.
    """

    parameters: int | None = None
    dataset_samples: int | None = None
    update_s: float | None = None  # how long an update takes, as an earlier run measured it


@dataclass
class Config:
    """The whole configuration, as in config.yaml of a run folder.

    An empty `optimizer` is the job's own.
    """

    job: dict[str, Any] = field(default_factory=dict[str, Any])
    optimizer: dict[str, Any] = field(default_factory=dict[str, Any])
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    facts: FactsConfig = field(default_factory=FactsConfig)
    transport: str = "auto"


FREE_SECTIONS = ("job", "optimizer")
NOT_YET = {("accumulation.balance", "measured"): "is not there yet; leave it out"}
"""Values that have a meaning in the documentation's plans, and none in the code."""


def node_range(nodes: Any) -> tuple[int, int]:
    """The (least, most) nodes that `cluster.nodes` asks for: an int, or `{min: a, max: b}`.

    >>> node_range(3), node_range({"min": 2, "max": 4})
    ((3, 3), (2, 4))
    """
    if isinstance(nodes, int) and not isinstance(nodes, bool):
        least = most = nodes
    elif isinstance(nodes, Mapping) and set(nodes) == {"min", "max"}:  # type: ignore[reportUnknownArgumentType]
        least, most = nodes["min"], nodes["max"]
    else:
        raise ConfigError(f"cluster.nodes must be a number or {{min: a, max: b}}, but is {nodes!r}")
    if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most):
        raise ConfigError(
            f"cluster.nodes must be at least 1, but is {nodes!r}; try cluster.nodes=1"
        )
    return least, most


def gpu_count(gpus: Any) -> int:
    """How many GPUs `cluster.gpus_per_node` asks of a node: 4, `a100:4` or `a100:2,h100:1`.

    >>> gpu_count(None), gpu_count(4), gpu_count("a100:4"), gpu_count("a100:2,h100:1")
    (0, 4, 4, 3)
    """
    counts = [0]
    if isinstance(gpus, int) and not isinstance(gpus, bool):
        counts = [gpus]
    elif gpus is not None:
        counts = [
            int(found[1]) if (found := GPUS.fullmatch(part)) else -1
            for part in str(gpus).split(",")
        ]
    if min(counts) < 0:
        raise ConfigError(
            f"cluster.gpus_per_node must be a number of GPUs, or a type and a number as in a100:4, "
            f"but is {gpus!r}"
        )
    return sum(counts)


def unknown_keys(found: Mapping[str, Any], schema: Any = Config, prefix: str = "") -> list[str]:
    """A sentence for every key of `found` that the schema does not have, at any level."""
    known = {f.name: getattr(schema(), f.name) for f in fields(schema)}
    sentences: list[str] = []
    for key, value in found.items():
        if key not in known:
            sentences.append(f"there is no key '{prefix}{key}'{did_you_mean(str(key), known)}")
        elif is_dataclass(known[key]) and isinstance(value, Mapping):
            sentences += unknown_keys(value, type(known[key]), f"{prefix}{key}.")
    return sentences


def _value(config: Config, dotted: str) -> Any:
    node: Any = config
    for part in dotted.split("."):
        node = getattr(node, part)
    return node


def check(config: Config) -> None:
    """Refuse what no plan and no cluster can use. Raises one `ConfigError` for all of it."""
    refuse_beyond(asdict(config))  # before anything is computed from such numbers
    wrong: list[str] = []
    for dotted, allowed in CHOICES.items():
        value = _value(config, dotted)
        if later := NOT_YET.get((dotted, value)):
            wrong.append(f"{dotted}={value} {later}, or set {dotted}={allowed[0]}")
        elif value not in allowed:
            wrong.append(
                f"{dotted} must be one of {', '.join(allowed)}, but is {value!r}"
                + did_you_mean(str(value), allowed).replace(
                    "; known are: " + ", ".join(sorted(allowed)), ""
                )
            )
    wrong += too_many_ranks(node_range(config.cluster.nodes)[1], config.cluster.ranks_per_node)
    gpu_count(config.cluster.gpus_per_node)
    at_least: Sequence[tuple[str, float]] = (
        ("cluster.ranks_per_node", 1), ("cluster.cpus_per_rank", 1), ("accumulation.steps", 1),
        ("accumulation.global_batch", 1), ("accumulation.micro_batch", 1), ("train.updates", 1),
        ("train.evaluate_every", 0), ("train.checkpoint_every", 0), ("train.keep_checkpoints", 1),
        ("train.loader_workers", 0), ("train.seed", 0), ("schedule.warmup_updates", 0),
        ("schedule.base_batch", 1), ("cluster.time_min", 1),
        ("cluster.signal_ahead_s", 1),
        ("engine.log_every", 0), ("facts.parameters", 1), ("facts.dataset_samples", 1),
        ("run.max_restarts", 0),
    )  # fmt: skip
    for dotted, least in at_least:
        value = _value(config, dotted)
        if value is not None and value < least:
            wrong.append(f"{dotted} must be at least {least}, but is {value}; try {dotted}={least}")
    positive = (
        "schedule.base_lr", "train.epochs", "train.clip_norm", "cluster.memory_gib",
        "cluster.rendezvous_timeout_s", "cluster.collective_timeout_s",
        "cluster.heartbeat_timeout_s", "cluster.hang_timeout_s", "engine.bucket_mib",
        "facts.update_s",
    )  # fmt: skip
    for dotted in positive:
        value = _value(config, dotted)
        if value is not None and not (value > 0 and math.isfinite(value)):
            wrong.append(f"{dotted} must be a number above 0, but is {value}")
    if config.accumulation.reduction == "reproducible" and config.accumulation.micro_batch is None:
        wrong.append(
            "accumulation.reduction=reproducible needs accumulation.micro_batch: the size of a "
            "leaf, the atom of work; try accumulation.micro_batch=16"
        )
    if config.cluster.kind == "local":
        wrong += [
            f"cluster.{name} means nothing on a local cluster; add +cluster=slurm, or leave it out"
            for name in SLURM_ONLY
            if _value(config, f"cluster.{name}") not in (None, {}, [])
        ]
    if config.run.max_restarts and config.cluster.requeue is False:
        wrong.append(
            "run.max_restarts needs cluster.requeue=true: on SLURM a run begins again by being "
            "handed back to the queue"
        )
    if not isinstance(config.job.get("_target_"), str):
        wrong.append(
            "job._target_ must be the dotted name of a job class, as in jobs.digits.Digits"
        )
    wrong += problems(config.optimizer)
    if wrong:
        raise ConfigError("\n".join(wrong))


def read_config(values: Any) -> Config:
    """A `Config` from plain values, as in a run folder's config.yaml; checked.

    Raises:
        ConfigError: unknown keys, wrong types, values that cannot be used.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(values))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"{error.full_key or 'the configuration'}: {reason}") from error
    assert isinstance(config, Config)  # noqa: S101  # what a structured merge gives, by construction
    check(config)
    return config


def to_yaml(config: Config) -> str:
    """The text of config.yaml; `read_config` of it is the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
