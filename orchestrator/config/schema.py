"""The configuration's schema: every key with its type, default and bounds.

docs/reference/configuration.md says what each key means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from orchestrator.errors import ConfigError, did_you_mean, shortened
from orchestrator.plugins import CLUSTERS, SEARCHES, TRACKERS, TRANSPORTS, PluginKind

LARGEST_INT = 2**63 - 1  # what the files, the random numbers' seeds and the frameworks can hold
LONGEST_S = 10 * 365 * 24 * 3600.0
LONGEST_NAME = 4096
END_S = 60.0
UNUSABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Allowed values of one field, besides null where its type has that.

    Attributes:
        choice: the values that it may have.
        elsewhere: other tools' names of such values, each with ours.
        plugin_kind: where installed packages may add such values.
        least, most: the smallest and largest number.
        above: a finite number that it must be above.
    """

    choice: tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict[str, str])
    plugin_kind: PluginKind | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None

    def refusal(self, dotted: str, value: Any) -> str | None:
        """Return a sentence if `value` is no choice, too little or too much."""
        if self.plugin_kind is not None:
            return self.plugin_kind.refusal(value)
        if self.choice and value not in self.choice:
            meant = did_you_mean(self.elsewhere.get(str(value), str(value)), self.choice)
            meant = meant.partition("; known are: ")[0]
            return f"{dotted} must be one of {', '.join(self.choice)}, but is {value!r}{meant}"
        if value is not None and self.least is not None and value < self.least:
            return (
                f"{dotted} must be at least {self.least}, but is {value}; try {dotted}={self.least}"
            )
        numeric = isinstance(value, int | float)
        if numeric and self.above is not None and not self.above < value < math.inf:
            return f"{dotted} must be a number above {self.above}, but is {value}"
        if numeric and self.most is not None and value > self.most:
            most = f"{self.most:g}"
            return f"{dotted} must be at most {most}, but is {value}; try {dotted}={most}"
        return None


def choice(
    *allowed: str, default: str | None = None, elsewhere: Mapping[str, str] | None = None
) -> Any:
    """Define a field that is one of these values; the first by default."""
    bound = Bound(choice=allowed, elsewhere=elsewhere or {})
    return field(default=allowed[0] if default is None else default, metadata={"bound": bound})


def registered(plugin_kind: PluginKind, default: str) -> Any:
    """Define a field that is the name of one of ours, or of an installed package's."""
    bound = Bound(choice=(*plugin_kind.besides, *plugin_kind.ours), plugin_kind=plugin_kind)
    return field(default=default, metadata={"bound": bound})


def number(
    default: float | None,
    *,
    least: int | None = None,
    above: int | None = None,
    most: float | None = None,
) -> Any:
    """Define a number from `least`, or above `above`, to `most`."""
    bound = Bound(least=least, above=above, most=most)
    return field(default=default, metadata={"bound": bound})


def bounds_of(schema: Any, prefix: str = "") -> dict[str, Bound]:
    """Return the bound of each field that has one, by its dotted name."""
    bounds: dict[str, Bound] = {}
    for item in fields(schema):
        if "bound" in item.metadata:
            bounds[prefix + item.name] = item.metadata["bound"]
        elif is_dataclass(section := item.default_factory):
            bounds |= bounds_of(section, f"{prefix}{item.name}.")
    return bounds


def out_of_bounds(config: Config, keys: Iterable[str] = ()) -> list[str]:
    """Return a sentence for each of these keys (of all that have bounds) whose value is no choice,
    too little or too much.
    """
    sentences = [BOUNDS[key].refusal(key, value_of(config, key)) for key in keys or BOUNDS]
    return [sentence for sentence in sentences if sentence is not None]


def unrepresentable_values(values: Any, dotted: str = "") -> Iterator[str]:
    """Yield a sentence for every value in nested dicts and lists that no file or seed can hold, or
    that no file name, shell or terminal can take.

    >>> list(unrepresentable_values({"train": {"seed": 2**64}}))
    ['train.seed must lie between -(2**63 - 1) and 2**63 - 1, but is 18446744073709551616']
    """
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from unrepresentable_values(value, f"{dotted}.{key}" if dotted else str(key))
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            yield from unrepresentable_values(value, f"{dotted}[{index}]")
    elif isinstance(values, int) and abs(values) > LARGEST_INT:
        yield f"{dotted} must lie between -(2**63 - 1) and 2**63 - 1, but is {shortened(values)}"
    elif isinstance(values, str) and len(values) > LONGEST_NAME:
        yield f"{dotted} must have at most {LONGEST_NAME} characters, but has {len(values)}"
    elif isinstance(values, str) and (match := UNUSABLE.search(values)):
        number = ord(match[0])
        odd = f"the control character {number:#04x}" if number < 128 else "bytes that are not UTF-8"
        yield f"{dotted} must not contain {odd}, but is {shortened(repr(values))}"


def value_of(config: Any, dotted: str) -> Any:
    """Return the value of a dotted key in dataclasses."""
    for part in dotted.split("."):
        config = getattr(config, part)
    return config


def non_default_values(section: Any, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the keys of a section (of these `names`) that are not at their defaults."""
    usual = vars(type(section)())
    changed = {name: value for name, value in vars(section).items() if value != usual[name]}
    return {name: v for name, v in changed.items() if names is None or name in names}


def plain(config: Any) -> Any:
    """Convert like `asdict`, but share lists and tables, which are only to be read."""
    if not is_dataclass(config):
        return config
    return {name: plain(value) for name, value in vars(config).items()}


GPUS = re.compile(r"(?:[A-Za-z][A-Za-z0-9_.+-]*:)?([0-9]{1,6})")


@dataclass
class ClusterConfig:
    """Place and shape of a run; other kinds of clusters refuse the keys of `SLURM_ONLY`."""

    kind: str = registered(CLUSTERS, "local")
    nodes: Any = 2
    ranks_per_node: int = number(2, least=1, most=4096)
    cpus_per_rank: int = number(1, least=1, most=65_536)
    gpus_per_node: Any = number(None, most=4096)
    rendezvous_timeout_s: float = number(120.0, above=0, most=LONGEST_S)
    collective_timeout_s: float | None = number(None, above=0, most=LONGEST_S)
    heartbeat_timeout_s: float = number(20.0, above=0, most=LONGEST_S)
    hang_timeout_s: float = number(1800.0, above=0, most=LONGEST_S)
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    memory_gib: float | None = number(None, above=0, most=2**30)
    time_min: int | None = number(None, least=1, most=2**31 - 2)
    signal_ahead_s: int = number(60, least=1, most=65_535)  # sbatch's own limit
    requeue: bool | None = None
    allocation: str = choice("new", "current")
    exclusive: Any = None
    interface: str | None = None
    slurm_conf: str | None = None
    slurm_flags: dict[str, Any] = field(default_factory=dict[str, Any])
    srun_flags: dict[str, Any] = field(default_factory=dict[str, Any])
    environment: dict[str, str] = field(default_factory=dict[str, str])
    preamble: list[str] = field(default_factory=list[str])
    container: str | None = None
    container_runtime: str | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])


SLURM_ONLY = (
    "partition",
    "account",
    "qos",
    "constraint",
    "exclude",
    "memory_gib",
    "time_min",
    "signal_ahead_s",
    "requeue",
    "allocation",
    "exclusive",
    "interface",
    "slurm_conf",
    "slurm_flags",
    "srun_flags",
    "preamble",
    "container",
    "container_runtime",
)


@dataclass
class AccumulationConfig:
    """Split of the samples of one update. Any two of the first three numbers give the third;
    micro_tokens takes the place of steps and micro_batch.
    """

    global_batch: int | None = number(None, least=1)
    batch_schedule: list[Any] = field(default_factory=list[Any])
    steps: int | None = number(None, least=1)
    micro_batch: int | None = number(None, least=1)
    micro_tokens: int | None = number(None, least=1)
    pad_to: int = number(1, least=1, most=2**20)
    balance: str = "even"
    ragged: str = choice("update", "drop", "carry")
    reduction: str = choice("fast", "reproducible")
    sentinel_every: int | None = number(None, least=1)
    sentinel: str = choice("warn", "stop", "exclude")


DEFAULT_BASE_LR = 1e-3


@dataclass
class ScheduleConfig:
    """Learning rate in updates: base_lr x scaling(G / base_batch) x warm-up and decay, where G is
    that of the update.
    """

    base_lr: float | None = number(None, above=0)
    base_batch: int = number(256, least=1)
    scaling: str = choice("linear", "sqrt", "none", default="none")
    warmup_updates: int = number(0, least=0)
    decay: str = choice("cosine", "linear", "none", default="none")


PRECISIONS_ELSEWHERE = {
    **dict.fromkeys(("bf16-mixed", "bf16"), "bfloat16"),
    **dict.fromkeys(("16-mixed", "16", "fp16", "half"), "float16"),
    **dict.fromkeys(("32-true", "32", "fp32"), "float32"),
    **dict.fromkeys(("64-true", "64", "fp64", "double"), "float64"),
}


@dataclass
class TrainConfig:
    """Length, precision, evaluations and checkpoints of the training."""

    updates: int | None = number(None, least=1)
    epochs: float | None = number(None, above=0, most=1e12)
    samples: int | None = number(None, least=1)
    seed: int = number(0, least=0)
    clip_norm: float | None = number(None, above=0)
    precision: str = choice(
        "float32", "bfloat16", "float16", "float64", elsewhere=PRECISIONS_ELSEWHERE
    )
    evaluate_every: int | None = number(None, least=0)
    checkpoint_every: int | None = number(None, least=0)
    keep_checkpoints: int = number(2, least=1, most=10**6)
    keep_every: int | None = number(None, least=1)
    keep_best: str | None = None
    patience: int | None = number(None, least=1)
    checkpoint_in_background: bool = False
    loader_workers: int = number(0, least=0, most=4096)
    on_non_finite: str = choice("stop", "skip")
    initial_weights: str | None = None
    initial_state: str | None = None


@dataclass
class EngineConfig:
    """Settings of the job's framework. mode, jit_level and style are MindSpore's."""

    bucket_mib: float | None = number(None, above=0, most=2**20)
    norm: str = choice("warn", "frozen", "group", "layer")
    mode: str = choice("pynative", "jit", "graph", default="jit")
    jit_level: str = choice("auto", "O0", "O1", "O2")
    style: str = choice("own", "framework")
    shard_optimizer: bool = False
    shard_by: str = choice("auto", "parameters")
    shard_model: str = choice("none", "node", "all")

    @property
    def bucket_bytes(self) -> int | None:
        return None if self.bucket_mib is None else int(self.bucket_mib * 2**20)


@dataclass
class RunConfig:
    """Folder, restarts and following of a run."""

    dir: str | None = None
    name: str | None = None
    tags: list[str] = field(default_factory=list[str])
    callbacks: list[str] = field(default_factory=list[str])
    note: str | None = None
    watch: bool | None = None
    snapshot: bool = True
    max_restarts: int = number(0, least=0, most=10**6)
    survive: bool | None = None
    max_replacements: int = number(16, least=0, most=10**6)


@dataclass
class SweepConfig:
    """Settings that all points of a sweep share. From `search` on they are those of a search."""

    parallel: Any = "auto"
    force: bool = False
    objective: str = "auto"
    search: str = registered(SEARCHES, "none")
    trials: int | None = number(None, least=1, most=10_000)
    seed: int = number(0, least=0)
    direction: str = choice("auto", "minimize", "maximize")
    prune: str = choice("none", "median")


@dataclass
class TrackerConfig:
    """Destination of scalars besides metrics.jsonl. `options`: of a kind from another package."""

    kind: str = registered(TRACKERS, "tensorboard")
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class NotifyConfig:
    """Recipients of messages at the first update, a requeue, a failure and the end of a run."""

    command: str | None = None
    webhook: str | None = None


@dataclass
class FactsConfig:
    """Facts about job and data for the planner, which the workers check; null: not known."""

    parameters: int | None = number(None, least=1)
    dataset_samples: int | None = number(None, least=1)
    lengths: str | None = None


@dataclass
class Config:
    """The whole configuration, as in config.yaml of a run folder. An empty optimizer: the job's."""

    job: dict[str, Any] = field(default_factory=dict[str, Any])
    optimizer: dict[str, Any] = field(default_factory=dict[str, Any])
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    run: RunConfig = field(default_factory=RunConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    facts: FactsConfig = field(default_factory=FactsConfig)
    transport: str = registered(TRANSPORTS, "auto")


FREE_SECTIONS = ("job", "optimizer")
FREE_TABLES = (
    *FREE_SECTIONS,
    "cluster.slurm_flags",
    "cluster.srun_flags",
    "cluster.environment",
    "cluster.options",
    "tracker.options",
)
"""Tables that take any key: what reads them refuses those that it does not have."""
BOUNDS = bounds_of(Config)


def node_range(nodes: Any) -> tuple[int, int]:
    """Return the (least, most) nodes of `cluster.nodes`: an int, or `{min: a, max: b}`.

    >>> node_range(3), node_range({"min": 2, "max": 4})
    ((3, 3), (2, 4))
    """
    if isinstance(nodes, int) and not isinstance(nodes, bool):
        least = most = nodes
    elif isinstance(nodes, Mapping) and set(nodes) == {"min", "max"}:
        least, most = nodes["min"], nodes["max"]
    else:
        raise ConfigError(f"cluster.nodes must be a number or {{min: a, max: b}}, but is {nodes!r}")
    if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most):
        raise ConfigError(
            f"cluster.nodes must be at least 1, but is {nodes!r}; try cluster.nodes=1"
        )
    return least, most


def batch_stages(schedule: Any) -> tuple[tuple[int, int], ...]:
    """Return the stages of `accumulation.batch_schedule`: (update, global batch) pairs.

    >>> batch_stages([[1000, 512], [5000, 3072]])
    ((1000, 512), (5000, 3072))

    Raises:
        ConfigError: no such pairs, batches of 0, or updates that do not increase from 1 on.
    """
    key, example = "accumulation.batch_schedule", "[[1000,512],[5000,3072]]"
    rows: list[Any] = list(schedule) if isinstance(schedule, list | tuple) else [schedule]
    stages: list[tuple[int, int]] = []
    for row in rows:
        pair: list[Any] = list(row) if isinstance(row, list | tuple) else []
        if len(pair) != 2 or not all(type(number) is int for number in pair):
            raise ConfigError(
                f"{key} must be a list of [update, global batch] pairs of whole numbers, as in "
                f"{example}, but holds {shortened(repr(row))}"
            )
        update, batch = pair
        if update < 1:
            raise ConfigError(
                f"{key}: [{update}, {batch}] is no later update; the batch from update 0 on is "
                f"accumulation.global_batch"
            )
        if batch < 1:
            raise ConfigError(
                f"{key}: the batch from update {update} on must be at least 1 sample, but is "
                f"{batch}"
            )
        if stages and update <= stages[-1][0]:
            raise ConfigError(
                f"{key} must increase in updates, but {update} follows {stages[-1][0]}; try "
                f"{key}={sorted([*stages, (update, batch)])}".replace("(", "[").replace(")", "]")
            )
        stages.append((update, batch))
    return tuple(stages)


def notice_s(signal_ahead_s: int, limit_s: float | None) -> int:
    """Return how long before its time limit a job is signalled: for half of it at most.

    Args:
        limit_s: None: it is not known, or there is none.

    >>> notice_s(60, None), notice_s(60, 3600.0), notice_s(3600, 600.0)
    (60, 60, 300)
    """
    return signal_ahead_s if limit_s is None else min(signal_ahead_s, max(1, int(limit_s / 2)))


def end_s(limit_s: float) -> float:
    """Return the time to keep for the end of a job, from its last checkpoint to its time limit."""
    return min(END_S, limit_s / 4)


def gpu_count(gpus: Any) -> int:
    """Return the GPUs of `cluster.gpus_per_node`: 4, `a100:4` or `a100:2,h100:1`.

    >>> gpu_count(None), gpu_count(4), gpu_count("a100:4"), gpu_count("a100:2,h100:1")
    (0, 4, 4, 3)
    """
    counts = [0]
    if isinstance(gpus, int) and not isinstance(gpus, bool):
        counts = [gpus]
    elif gpus is not None:
        counts = [
            int(match[1]) if (match := GPUS.fullmatch(part)) else -1
            for part in str(gpus).split(",")
        ]
    if min(counts) < 0:
        raise ConfigError(
            f"cluster.gpus_per_node must be a number of GPUs, or a type and a number as in a100:4, "
            f"but is {gpus!r}"
        )
    return sum(counts)
