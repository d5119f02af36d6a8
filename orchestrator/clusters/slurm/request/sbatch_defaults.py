"""A person's own defaults for sbatch: the SBATCH_* variables that plain sbatch obeys.

In sbatch a variable wins over a line of the script. Here the configuration wins over a variable, so
what the variables say is written into the script where the configuration leaves an option open, and
sbatch itself gets none of them: `plan` shows all that holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

# sbatch(1), "INPUT ENVIRONMENT VARIABLES". Not here: what is ours in any case (output, export,
# requeueing, the shape and its signal, waiting; CPUS_PER_GPU beside our --cpus-per-task is refused
# by sbatch), and CLUSTERS, which says whom to ask.
OPTION_OF: Mapping[str, str] = {
    "SBATCH_PARTITION": "partition",
    "SBATCH_ACCOUNT": "account",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_WCKEY": "wckey",
    "SBATCH_ACCTG_FREQ": "acctg-freq",
    "SBATCH_BURST_BUFFER": "bb",
    "SBATCH_CLUSTER_CONSTRAINT": "cluster-constraint",
    "SBATCH_CORE_SPEC": "core-spec",
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
    "SBATCH_DELAY_BOOT": "delay-boot",
    "SBATCH_DISTRIBUTION": "distribution",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_GPU_BIND": "gpu-bind",
    "SBATCH_GPU_FREQ": "gpu-freq",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GRES": "gres",
    "SBATCH_GRES_FLAGS": "gres-flags",
    "SBATCH_HINT": "hint",
    "SLURM_HINT": "hint",
    "SBATCH_MEM_BIND": "mem-bind",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_NETWORK": "network",
    "SBATCH_OVERCOMMIT": "overcommit",
    "SBATCH_POWER": "power",
    "SBATCH_PROFILE": "profile",
    "SBATCH_REQ_SWITCH": "switches",
    "SBATCH_SPREAD_JOB": "spread-job",
    "SBATCH_THREAD_SPEC": "thread-spec",
    "SBATCH_THREADS_PER_CORE": "threads-per-core",
    "SBATCH_USE_MIN_NODES": "use-min-nodes",
}
BARE = frozenset({"overcommit", "spread-job", "use-min-nodes"})
# Of each of these only one may stand in a script.
EXCLUDE_EACH_OTHER = (
    frozenset({"mem", "mem-per-cpu", "mem-per-gpu"}),
    frozenset({"core-spec", "thread-spec"}),
    frozenset({"gres", "gpus-per-node"}),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Default:
    """One variable that sets an option: `value` is True for an option without one."""

    variable: str
    option: str
    value: str | bool


def read_defaults(environment: Mapping[str, str]) -> tuple[Default, ...]:
    """The defaults that an environment holds, in the order of `OPTION_OF`; empty ones are none."""
    return tuple(
        Default(variable=variable, option=option, value=_value(option, environment[variable]))
        for variable, option in OPTION_OF.items()
        if environment.get(variable, "").strip() or (option in BARE and variable in environment)
    )


def _value(option: str, text: str) -> str | bool:
    alone = option == "exclusive" and text not in ("user", "mcs", "topo")
    return True if option in BARE or alone else text


def obeyed(defaults: Iterable[Default], stated: Collection[str]) -> list[Default]:
    """Those that the configuration's options leave open, each option once."""
    taken = set(stated)
    found: list[Default] = []
    for default in defaults:
        rivals = {default.option}.union(*(g for g in EXCLUDE_EACH_OTHER if default.option in g))
        if not rivals & taken:
            taken.add(default.option)
            found.append(default)
    return found
