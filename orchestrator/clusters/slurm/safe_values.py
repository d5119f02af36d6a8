"""Checks of the values in a batch script.

SLURM reads the #SBATCH lines, bash reads the rest. Every value is quoted, but a value that would be
hard to quote for both readers is refused here, with the key's name, before anything is written.
Only `cluster.preamble` is shell, by definition.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.schema import ClusterConfig, Config
from orchestrator.errors import ConfigError, expand_user

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")
NAMES = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*")
NODES = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*")
FEATURES = re.compile(r"[A-Za-z0-9_(\[][A-Za-z0-9_.,@+&|*:()\[\]-]*")
IMAGE = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./:@+#-]*")
INTERFACES = re.compile(r"[A-Za-z0-9_*?][A-Za-z0-9_.,@*?-]*")
FLAG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
QUOTING = frozenset("'\"\\`$")
PATTERNS: Mapping[str, tuple[re.Pattern[str], str]] = {
    "partition": (NAMES, "a partition's name, or several with commas"),
    "account": (NAME, "an account's name"),
    "qos": (NAME, "the name of a quality of service"),
    "constraint": (FEATURES, "features of nodes, as in gpu&ib"),
    "exclude": (NODES, "node names, as in n[1-3],n7"),
    "interface": (INTERFACES, "names of network interfaces, as in ib0 or ib*,eth0"),
    "container": (IMAGE, "a path or an address of an image"),
}
EXCLUSIVE = (None, True, False, "user", "mcs")
# Options that the batch script sets itself.
OWN_FLAGS = (
    "account",
    "array",
    "chdir",
    "clusters",
    "constraint",
    "cpus-per-gpu",
    "cpus-per-task",
    "error",
    "exclude",
    "exclusive",
    "export",
    "export-file",
    "gid",
    "gpu-bind",
    "gpus-per-node",
    "gpus-per-task",
    "input",
    "job-name",
    "mem",
    "no-kill",
    "no-requeue",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "parsable",
    "partition",
    "qos",
    "quiet",
    "requeue",
    "signal",
    "test-only",
    "time",
    "uid",
    "wait",
    "wrap",
)
OWN_SRUN_FLAGS = (
    "bcast",
    "chdir",
    "cpu-bind",
    "cpus-per-gpu",
    "cpus-per-task",
    "error",
    "export",
    "gid",
    "gpu-bind",
    "gpus-per-task",
    "het-group",
    "immediate",
    "input",
    "jobid",
    "kill-on-bad-exit",
    "mpi",
    "multi-prog",
    "no-kill",
    "nodelist",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "output",
    "pty",
    "relative",
    "signal",
    "task-prolog",
    "test-only",
    "time",
    "uid",
    "unbuffered",
    "wait",
)
OF_THE_AGENT = (
    "srun starts one agent on each node, which starts and binds the ranks, so this would hold for "
    "the agent"
)
OUTPUT = "output goes into the run folder"
# The advice for a refused option; one without an entry has no setting in its place.
INSTEAD: Mapping[str, str] = {
    **{
        name: f"use cluster.{name}"
        for name in (
            "account",
            "constraint",
            "exclude",
            "partition",
            "qos",
            "requeue",
            "nodes",
        )
    },
    "clusters": "cluster.slurm_conf chooses the cluster",
    "cpu-bind": OF_THE_AGENT,
    "cpus-per-gpu": "use cluster.cpus_per_rank",
    "cpus-per-task": "use cluster.cpus_per_rank",
    "error": OUTPUT,
    "exclusive": "use cluster.exclusive=true, or =user, or =mcs",
    "export": "use cluster.environment",
    "export-file": "use cluster.environment",
    "gpu-bind": OF_THE_AGENT,
    "gpus-per-node": "use cluster.gpus_per_node",
    "gpus-per-task": "use cluster.gpus_per_node",
    "job-name": "use run.name",
    "mem": "use cluster.memory_gib",
    "mpi": f"{OF_THE_AGENT}; for MPI a script of one's own is the way",
    "no-kill": "use run.survive",
    "no-requeue": "use cluster.requeue",
    "ntasks": "use cluster.nodes and cluster.ranks_per_node",
    "ntasks-per-node": "use cluster.ranks_per_node",
    "open-mode": OUTPUT,
    "output": OUTPUT,
    "signal": "use cluster.signal_ahead_s",
    "task-prolog": f"{OF_THE_AGENT}; use cluster.preamble",
    "time": "use cluster.time_min",
}
WHOLE_OPTIONS = frozenset({"gpus"})  # begins like one of ours, but is a separate option
RESERVED = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SUBMITIT|ORCHESTRATOR)_.*")
READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})


def quoted(value: object) -> str:
    """Return the value quoted for bash, as one word.

    >>> quoted("a b"), quoted("/runs/x")
    ("'a b'", '/runs/x')
    """
    return shlex.quote(str(value))


def _unprintable(text: str) -> str | None:
    """Return the first character that a line must not contain, printably; None if all may."""
    character = next((c for c in text if not c.isprintable()), None)
    return None if character is None else repr(character).strip("'\"")


def _line(key: str, text: str) -> Iterator[str]:
    """Return why a text is not one printable line."""
    bad = _unprintable(text)
    if bad is not None:
        yield f"{key} must be one printable line, but has the character {bad}"


def _plain(key: str, text: str) -> Iterator[str]:
    """Return why a text cannot be on an #SBATCH line."""
    bad = _unprintable(text) or next((c for c in text if c in QUOTING), None)
    if bad is not None:
        yield f"{key} must not have quotes, $, ` or \\ in it, nor line feeds, but has {bad}"
    elif not text.strip() or text.startswith("-"):
        yield f"{key} must not be empty nor begin with a dash, but is {text!r}"


def _path(key: str, path: str) -> Iterator[str]:
    """Return why a path cannot be in SLURM's file name patterns and in PYTHONPATH."""
    bad = _unprintable(path) or next((c for c in path if c in QUOTING or c in "%:,"), None)
    if bad is not None:
        yield (
            f"{key}={path!r} cannot be used with SLURM: it has {bad}; "
            f"choose a path without quotes, $, `, \\, %, : and commas"
        )


def _flags(section: str, flags: Mapping[str, Any], own: Sequence[str]) -> Iterator[str]:
    """Return why options cannot be passed on. Args: own: our options."""
    command = section.removeprefix("cluster.").removesuffix("_flags").replace("slurm", "sbatch")
    for name, value in flags.items():
        key = f"{section}.{name!s}" if str(name).isprintable() else section
        # An option may be shortened (--wra is --wrap), so a prefix of one of ours is ours, too.
        own_options = [o for o in own if o.startswith(str(name)) and str(name) not in WHOLE_OPTIONS]
        if not FLAG.fullmatch(str(name)):
            yield f"{key} must be a long option of {command} without dashes in front, as in hint"
        elif own_options:
            reason = INSTEAD.get(min(own_options, key=len), "the batch script decides it")
            yield f"{key} cannot be set: {reason}"
        elif isinstance(value, str):
            yield from _plain(key, value)
        elif not isinstance(value, bool | int | float):
            yield f"{key} must be a text, a number, or true, but is {value!r}"


def _environment(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if not VARIABLE.fullmatch(str(name)):
            yield f"cluster.environment: {str(name)!r} is no name of a variable"
        elif RESERVED.fullmatch(str(name)):
            yield (
                f"cluster.environment.{name} cannot be set: a job's own variables say where each "
                f"rank is; options of srun go into cluster.srun_flags, the network interface into "
                f"cluster.interface"
            )
        elif name in READ_ONLY:
            yield f"cluster.environment.{name} cannot be set: it is bash's own"
        else:
            yield from _line(f"cluster.environment.{name}", str(value))


def check_preamble(lines: Sequence[str]) -> None:
    """Refuse a preamble that bash cannot read to its end. Raises `ConfigError`; starts bash."""
    if not lines:
        return
    done = subprocess.run(
        ["bash", "-O", "extglob", "-n"],
        input="\n".join([*lines, ""]),
        capture_output=True,
        text=True,
        errors="replace",
        env={"PATH": os.environ.get("PATH", os.defpath)},
        check=False,
    )
    if done.returncode:
        first = done.stderr.strip().splitlines()[0].removeprefix("bash: ")
        raise ConfigError(f"cluster.preamble is no shell that bash can read: {first}")


def without_effect(cluster: ClusterConfig, environment: Mapping[str, str]) -> list[str]:
    """Return the user's variables for sbatch that decide nothing here.

    >>> without_effect(ClusterConfig(qos="long"), {"SBATCH_QOS": "long", "SBATCH_GRES": "gpu"})
    ['SBATCH_GRES']
    """
    if "SLURM_JOB_ID" in environment:  # sbatch sets some for a job
        return []
    # conf/cluster/slurm.yaml takes these; a site's file may not.
    keys = ("partition", "account", "qos", "constraint")
    taken = {f"SBATCH_{key.upper()}" for key in keys if getattr(cluster, key)}
    variables = {
        k for k, v in environment.items() if v and k.startswith(("SBATCH_", "SLURM_CLUSTERS"))
    }
    return sorted(variables - taken)


def check_values(config: Config, run: Path, folder: Path | None = None) -> None:
    """Refuse every value that could mean more than itself. Raises one `ConfigError` for all.

    Args:
        folder: the user's working folder, where the job will run.
    """
    wrong: list[str] = []
    if folder is not None:
        wrong += _path("the current folder", str(folder))
    cluster = config.cluster
    for name, (pattern, meaning) in PATTERNS.items():
        value = getattr(cluster, name)
        if value and not pattern.fullmatch(value):
            wrong.append(f"cluster.{name} must be {meaning}, but is {value!r}")
    if config.run.name is not None:
        wrong += _plain("run.name", config.run.name)
    if cluster.gpus_per_node is not None:
        wrong += _plain("cluster.gpus_per_node", str(cluster.gpus_per_node))
    wrong += _flags("cluster.slurm_flags", cluster.slurm_flags, OWN_FLAGS)
    wrong += _flags("cluster.srun_flags", cluster.srun_flags, OWN_SRUN_FLAGS)
    wrong += _environment(cluster.environment)
    for number, line in enumerate(cluster.preamble):
        wrong += _line(f"cluster.preamble[{number}]", line.replace("\t", " "))
    wrong += _path("run.dir", str(run))
    if (conf := cluster.slurm_conf) is not None:
        wrong += _path("cluster.slurm_conf", conf)
        if not expand_user(conf).is_absolute():
            wrong.append(
                f"cluster.slurm_conf={conf} must be an absolute path, since the run is followed "
                f"from any folder; try cluster.slurm_conf={Path(conf).absolute()}"
            )
    is_number = isinstance(cluster.exclusive, int) and not isinstance(cluster.exclusive, bool)
    if is_number or cluster.exclusive not in EXCLUSIVE:  # 1 equals True
        wrong.append(
            f"cluster.exclusive must be true, false, user (no node is shared with jobs of others) "
            f"or mcs, but is {cluster.exclusive!r}"
        )
    if cluster.container_runtime not in (None, "pyxis", "apptainer"):
        wrong.append(
            f"cluster.container_runtime must be pyxis or apptainer, "
            f"but is {cluster.container_runtime!r}"
        )
    if (cluster.container is None) != (cluster.container_runtime is None):
        wrong.append("cluster.container and cluster.container_runtime belong together; set both")
    if wrong:
        raise ConfigError("\n".join(wrong))
