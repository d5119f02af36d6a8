"""The step that is the ranks: srun, its options, and what each of its tasks starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.clusters.slurm.request.safe_values import quoted
from orchestrator.clusters.slurm.request.sbatch_defaults import Default
from orchestrator.config.schema import ClusterConfig, Config, gpu_count, node_range
from orchestrator.lifecycle.signs.last_word import SCRIPT
from orchestrator.rundir.folder import RunDir

STARTER = "clusters/slurm/node_entry.py"
ENDED_TOGETHER = ("--kill-on-bad-exit=1",)
SURVIVING = ("--kill-on-bad-exit=0", "--no-kill", "--wait=0")
"""srun ends nobody, whoever is gone; `losses.py` ends what nobody survives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """The submitting side, as far as the script depends on it.

    Attributes:
        python: the interpreter that the ranks use.
        folder: where the person stands; the job runs there too.
        package: folder of this package as the ranks import it: in the snapshot, or installed.
        path: folders that the ranks' PYTHONPATH begins with.
        unpacked: the folder that the code's archive, which lies beside it, stands for, if any.
        defaults: options of sbatch that the person's SBATCH_* variables set, by option.
        copies: where each source folder's copy will be; None where the job is no program.
    """

    python: str
    folder: Path
    package: Path
    path: tuple[Path, ...] = ()
    unpacked: Path | None = None
    defaults: tuple[Default, ...] = ()
    copies: Mapping[Path, Path] | None = None

    def in_copy(self, place: Path) -> bool:
        return self.unpacked is not None and place.is_relative_to(self.unpacked)

    @property
    def starter(self) -> list[str]:
        """What Python is given, so that it runs our part of a job."""
        program = self.package / STARTER
        if self.unpacked is None:
            return ["-u", str(program)]
        inside = program.relative_to(self.unpacked) if self.in_copy(program) else program
        return ["-I", f"{self.unpacked}.py", str(self.unpacked), str(inside)]


def shape_of(asked: ClusterConfig) -> Iterator[str]:
    """Options of srun, and of salloc, that say what a run's ranks take of an allocation."""
    nodes = node_range(asked.nodes)[1]
    yield f"--nodes={nodes}"
    yield f"--ntasks={nodes * asked.ranks_per_node}"
    yield f"--ntasks-per-node={asked.ranks_per_node}"
    if gpu_count(asked.gpus_per_node):
        yield f"--gpus-per-node={asked.gpus_per_node}"
    if asked.memory_gib is not None:
        yield f"--mem={round(asked.memory_gib * 1024)}M"


def srun_lines(
    config: Config, here: Here, run: RunDir, shape: Sequence[str], end: str
) -> Iterator[str]:
    """The lines of shell; the last is `end`."""
    yield from _lines(_srun(config, here, run, shape), end)


def _srun(config: Config, here: Here, run: RunDir, shape: Sequence[str]) -> list[list[str]]:
    """A line a part: srun, and the ranks' program."""
    cluster = config.cluster
    containers, python = _launcher(cluster, here, run)
    flags = {"mpi": "none", **cluster.srun_flags}
    return [
        ["exec", "srun"],
        ["--unbuffered"],
        *([option] for option in (SURVIVING if config.run.survive else ENDED_TOGETHER)),
        ["--export=ALL"],
        [f"--cpus-per-task={cluster.cpus_per_rank}"],
        *([option] for option in shape),
        [f"--output={run.logs}/node%n.log"],
        [f"--task-epilog={run.submitit / SCRIPT}"],
        *(
            [f"--{name}" if value is True else f"--{name}={value}"]
            for name, value in flags.items()
            if value is not False
        ),
        *([option] for option in containers),
        [*python, *here.starter[:2]],
        [*here.starter[2:], "rank"],
        [str(run.submitit)],
    ]


def _launcher(cluster: ClusterConfig, here: Here, run: RunDir) -> tuple[list[str], list[str]]:
    """(srun's options, the command before the starter) for a container, or for none."""
    folders = {run.path, here.folder, *here.path}
    inner = {f for f in folders if any(f != other and f.is_relative_to(other) for other in folders)}
    shared = sorted(str(folder) for folder in folders - inner)
    if cluster.container_runtime == "pyxis":
        mounts = ",".join(f"{folder}:{folder}" for folder in shared)
        return [
            f"--container-image={cluster.container}",
            f"--container-mounts={mounts}",
            f"--container-workdir={here.folder}",
        ], ["python3"]
    if cluster.container_runtime == "apptainer":
        gpus = ["--nv"] if gpu_count(cluster.gpus_per_node) else []
        binds = "--bind=" + ",".join(shared)
        return [], ["apptainer", "exec", *gpus, binds, str(cluster.container), "python3"]
    return [], [here.python]


def _lines(parts: list[list[str]], end: str) -> Iterator[str]:
    """A long command, a part of it a line."""
    for number, words in enumerate(parts):
        indent = "    " if number else ""
        yield f"{indent}{' '.join(map(quoted, words))} \\"
    yield f"    {end}"
