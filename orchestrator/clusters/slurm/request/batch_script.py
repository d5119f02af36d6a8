"""A submission to SLURM as a value: from a `Config` to the exact text of the batch script.

Pure: nothing is read but the arguments, so the text can be printed, compared with golden files, and
handed to `sbatch --test-only`. It is a script of our own rather than submitit's, because submitit's
has no --requeue, no --kill-on-bad-exit and no --cpus-per-task for srun, always sets a wckey, and
has no place after srun that keeps its exit code. submitit places it and starts the task in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from orchestrator.clusters.slurm.request.safe_values import quoted
from orchestrator.clusters.slurm.request.sbatch_defaults import obeyed
from orchestrator.clusters.slurm.request.shell_lines import (
    OWN_SHELL,
    SRUN_LOG,
    heeding,
    owning,
    settling,
    settling_a_share,
    unless_ended,
    unless_stopped,
    waiting,
)
from orchestrator.clusters.slurm.request.srun_lines import Here, srun_lines
from orchestrator.config.program import short_name
from orchestrator.config.schema import SIGNAL_AHEAD_S, Config, gpu_count, node_range
from orchestrator.lifecycle.address import INTERFACE_VARIABLE
from orchestrator.lifecycle.topology import (
    BASE_ATTEMPT_VARIABLE,
    COPIES_VARIABLE,
    OUTER_PATH_VARIABLE,
    OUTER_UMASK_VARIABLE,
)
from orchestrator.rundir.folder import RunDir

PREAMBLE = 8  # the descriptor of its text


def job_name(config: Config) -> str:
    """The job's name for squeue: `run.name`, or else the job class's or the program's."""
    return config.run.name or short_name(config.job)


def options(config: Config, run: RunDir) -> Iterator[tuple[str, object]]:
    """The #SBATCH options in the order in which a person would look for them. True: no value."""
    cluster = config.cluster
    least, most = node_range(cluster.nodes)
    yield "job-name", job_name(config)
    for name in ("partition", "account", "qos", "reservation", "constraint", "exclude"):
        if getattr(cluster, name) is not None:
            yield name, getattr(cluster, name)
    yield "nodes", most if least == most else f"{least}-{most}"
    yield "ntasks-per-node", cluster.ranks_per_node
    yield "cpus-per-task", cluster.cpus_per_rank
    if gpu_count(cluster.gpus_per_node):
        yield "gpus-per-node", cluster.gpus_per_node
    if cluster.memory_gib is not None:
        yield "mem", f"{round(cluster.memory_gib * 1024)}M"
    if cluster.time_min is not None:
        yield "time", cluster.time_min
    if cluster.exclusive:
        yield "exclusive", True
    yield ("no-requeue" if cluster.requeue is False else "requeue"), True
    if config.run.survive:
        yield "no-kill", True
    yield "signal", f"USR2@{cluster.signal_ahead_s or SIGNAL_AHEAD_S}"
    if cluster.comment is not None:
        yield "comment", cluster.comment
    for name, value in cluster.slurm_flags.items():
        if value is not False:
            yield name, value
    yield "output", run.batch_log
    yield "open-mode", "append"


def all_options(config: Config, run: RunDir, here: Here) -> dict[str, object]:
    """What holds for the job: the configuration, and the person's defaults where it is silent."""
    stated = dict(options(config, run))
    return {**stated, **{d.option: d.value for d in obeyed(here.defaults, stated)}}


def _from_environment(config: Config, run: RunDir, here: Here) -> Iterator[str]:
    """The #SBATCH lines of the person's defaults, under a line that says whose they are."""
    taken = obeyed(here.defaults, dict(options(config, run)))
    if taken:
        yield f"# as set in the environment: {', '.join(default.variable for default in taken)}"
    for default in taken:
        yield option_line(default.option, default.value)


def option_line(name: str, value: object) -> str:
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={quoted(value)}"


def _environment(config: Config) -> Iterator[str]:
    """What the person sets. It holds for the preamble, for srun and for the ranks."""
    threads = str(config.cluster.cpus_per_rank)
    values = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **config.cluster.environment}
    for name, value in values.items():
        yield f"export {name}={quoted(value)}"


def _preamble(config: Config) -> Iterator[str]:
    """The person's shell, read as a file of its own: whatever it holds, it ends where it ends."""
    lines = config.cluster.preamble
    if not lines:
        return
    end = "END_OF_PREAMBLE"
    while end in lines:
        end += "_"
    yield f". /dev/fd/{PREAMBLE} {PREAMBLE}<<'{end}'  # cluster.preamble"
    yield from lines
    yield end


def _our_environment(config: Config, here: Here, attempt: int) -> Iterator[str]:
    """What ranks need from us, set last."""
    if config.cluster.interface is not None:
        yield f"export {INTERFACE_VARIABLE}={quoted(config.cluster.interface)}"
    yield "export SUBMITIT_EXECUTOR=slurm"
    yield f"export {BASE_ATTEMPT_VARIABLE}={attempt}"
    if here.copies is not None:  # a program's path is the user's own, in the copies
        copies = json.dumps({str(root): copy.name for root, copy in here.copies.items()})
        yield f'export {OUTER_PATH_VARIABLE}="$PYTHONPATH"'
        yield f'export {OUTER_UMASK_VARIABLE}="$outer_umask"'
        yield f"export {COPIES_VARIABLE}={quoted(copies)}"
    yield from search_path(here)


def search_path(here: Here) -> Iterator[str]:
    """The run's own code comes before any other; what is in its copy, where that is unpacked."""
    path = ":".join(str(folder) for folder in here.path if not here.in_copy(folder))
    if path:
        yield f'export PYTHONPATH={quoted(path)}"${{PYTHONPATH:+:$PYTHONPATH}}"'


def _sound_code(here: Here) -> Iterator[str]:
    """Only what was submitted, for this run. Each node unpacks it for itself, afresh."""
    if here.unpacked is None:
        return
    yield f"snapshot={quoted(here.unpacked)}"
    yield 'own "$snapshot.py" "$snapshot.tar" "$snapshot.sha256"'
    yield 'printf \'%s\\n\' "$snapshot" | cat - "$snapshot.py" "$snapshot.tar" |'
    yield '    sha256sum --check --strict --status "$snapshot.sha256" || {'
    yield '    echo "error: the code in $snapshot.tar is damaged: $snapshot.sha256 differs" >&2'
    yield "    exit 1"
    yield "}"


def batch_script(config: Config, run: RunDir, attempt: int, here: Here) -> str:
    """The text that sbatch gets. The values must have passed `check_values`.

    Args:
        attempt: number of the job's first start; a requeued job adds SLURM_RESTART_COUNT to it.
    """
    lines = [
        "#!/bin/bash",
        *(option_line(name, value) for name, value in options(config, run)),
        *_from_environment(config, run, here),
        "",
        *_step(config, run, attempt, here),
        *settling([here.python, *here.starter], survive=bool(config.run.survive)),
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def step_script(config: Config, run: RunDir, attempt: int, here: Here, shape: Sequence[str]) -> str:
    """The same in an allocation that is there already, for a launcher that holds the script.

    Args:
        shape: options of srun that say which part of the allocation the ranks take.
    """
    step = _step(config, run, attempt, here, shape, held=True)
    return "\n".join(["#!/bin/bash", *step, "exit $code"]) + "\n"


def share_script(
    config: Config, run: RunDir, attempt: int, here: Here, shape: Sequence[str]
) -> str:
    """The same in an allocation that the run shares with others, for the script of that (see
    `packing/script.py`), which heeds this one's code.
    """
    lines = [
        "#!/bin/bash",
        *_step(config, run, attempt, here, shape),
        *settling_a_share([here.python, *here.starter]),
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _step(
    config: Config,
    run: RunDir,
    attempt: int,
    here: Here,
    shape: Sequence[str] = (),
    *,
    held: bool = False,
) -> Iterator[str]:
    """From the checks on the node to srun's `code`; no `shape` where the job is the run's own."""
    yield from (
        OWN_SHELL,
        *(["outer_umask=$(umask)"] if here.copies is not None else []),
        "umask 077",
        *heeding(held=held, shared=bool(shape) and not held),
        f"run={quoted(run.path)}",
        *owning(),
        'if ! [ -w "$run/attempts" ]; then',
        '    echo "error: the run folder $run cannot be written on node $SLURMD_NODENAME" >&2',
        "    exit 1",
        "fi",
        *unless_ended(here.python, container=config.cluster.container is not None),
        f"attempt=$(printf %03d $(({attempt} + ${{SLURM_RESTART_COUNT:-0}})))",
        'own "$run/attempts/$attempt" "$run/attempts/$attempt/srun.log"',
        'mkdir -p "$run/attempts/$attempt"',
        f'exec {SRUN_LOG}>>"$run/attempts/$attempt/srun.log"',
        *_sound_code(here),
        *(["outer_path=${PYTHONPATH-}"] if here.copies is not None else []),
        *search_path(here),
        "(  # whatever is set, trapped or ended in here, what follows it is done",
        *unless_stopped(),
        *_environment(config),
        *(['export PYTHONPATH="$outer_path"'] if here.copies is not None else []),
        *_preamble(config),
        *_our_environment(config, here, attempt),
        *srun_lines(config, here, run, shape, f"2>&{SRUN_LOG} {SRUN_LOG}>&-"),
        ") &",
        *waiting(held=held, beside=[here.python, *here.starter] if config.run.survive else []),
    )
