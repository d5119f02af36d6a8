"""Batch scripts: from a `Config` to the exact text for sbatch.

Pure: the text can be printed, compared with golden files, and given to `sbatch --test-only`.
submitit's own script has no --requeue, no --kill-on-bad-exit and no --cpus-per-task for srun,
always sets a wckey, and cannot run anything after srun; so submitit only places this script and
starts its task: one on each node, the parent of the node's agent (`task.py`).

The script survives signals, because it settles what the agents leave (`outcome.py`). If it is
killed itself, the coordinator or the next `resume` or `status` does that.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator import snapshot
from orchestrator.agent.topology import (
    BASE_ATTEMPT_VARIABLE,
    BATCH_COPY_VARIABLE,
    BATCH_PID_VARIABLE,
    COPIES_VARIABLE,
    INTERFACE_VARIABLE,
    OUTER_PATH_VARIABLE,
    OUTER_UMASK_VARIABLE,
)
from orchestrator.clusters.slurm.safe_values import Default, applicable, quoted, read_defaults
from orchestrator.config.program import short_name, target_of
from orchestrator.config.schema import SIGNAL_AHEAD_S, ClusterConfig, Config, gpu_count, node_range
from orchestrator.errors import START_AGAIN
from orchestrator.rundir.folder import RunDir
from orchestrator.start_from_copy import DISK, MEMORY, NAME

STOP_SIGNALS = "TERM INT HUP USR1 USR2"
OWN_SHELL = "set +eufC +o pipefail +o posix"
"""What a site's BASH_ENV, or SHELLOPTS and POSIXLY_CORRECT in the submitting shell, has switched on
would end the script where srun fails, or have it forget srun's code.
"""
SRUN_LOG = 9  # the descriptor of its log, opened before any user code runs


def signal_traps(*, held: bool = False) -> Iterator[str]:
    """Yield the traps that record signals and forward them to srun.

    A signal to the script alone (scancel --batch) is meant for the ranks. srun forwards USR2 to its
    tasks; on TERM it ends them, which only a launcher wants that holds the script
    (`CurrentAllocation`).
    """
    yield f"{BATCH_PID_VARIABLE}=$$"
    yield f"export {BATCH_PID_VARIABLE}"
    if not held:
        yield f'{BATCH_COPY_VARIABLE}="$SLURMD_NODENAME:${{TMPDIR-}}"'
        yield f"export {BATCH_COPY_VARIABLE}"
    yield "stop_signal= srun="
    yield "forward_stop() {"
    yield "    stop_signal=${stop_signal:-$1}"
    yield f'    [ -z "$srun" ] || kill -{"$1" if held else "USR2"} "$srun" 2>/dev/null'
    yield "}"
    yield f"for name in {STOP_SIGNALS}; do"
    yield '    trap "forward_stop $name" "$name"'
    yield "done"


def path_checks() -> Iterator[str]:
    """Yield the checks that refuse links and fifos in the run's folder."""
    yield "require_plain() {  # each path is missing, a file or a folder; no link"
    yield "    for place; do"
    yield '        if ! [ -L "$place" ]; then'
    yield '            ! [ -e "$place" ] || [ -f "$place" ] || [ -d "$place" ] && continue'
    yield "        fi"
    yield '        echo "error: $place is a link, or neither a file nor a folder" >&2'
    yield "        exit 1"
    yield "    done"
    yield "}"
    yield 'require_plain "$run/attempts" "$run/logs" "$run/code" "$run/submitit" "$run"/submitit/*'


def exit_if_ended(python: str, *, container: bool) -> Iterator[str]:
    """Yield the checks that end a job whose run has ended or cannot start."""
    yield 'if [ -e "$run/result.json" ]; then'
    yield '    echo "this run has ended already; to go on: python -m orchestrator resume $run"'
    yield "    exit 0"
    yield "fi"
    yield 'if ! [ -d "$run/submitit" ]; then'
    yield '    echo "error: $run/submitit is gone, and with it what the ranks are told to do" >&2'
    yield "    exit 1"
    yield "fi"
    if container:  # it has its own Python
        return
    yield f"if ! [ -x {quoted(python)} ]; then"
    yield f'    echo "error: there is no Python at "{quoted(python)}" on node $SLURMD_NODENAME" >&2'
    yield "    exit 1"
    yield "fi"


def exit_if_stopped() -> Iterator[str]:
    """Yield the first lines of srun's subshell: a stop may have come before it."""
    yield '[ ! -e "$run/cancel" ] || exit 0'
    yield '[ -z "$stop_signal" ] || exit 143'


def wait_for_srun(*, held: bool = False) -> Iterator[str]:
    """Yield the wait for srun's end, which signals do not interrupt.

    An unresponsive node would keep srun from ending, so srun is ended after the outcome is written.
    """
    yield "srun=$!"
    yield 'pause() { read -rt "$1" <> <(:); }'
    yield "("
    yield '    until [ -e "$run/attempts/$attempt/outcome.json" ]; do pause 1; done'
    yield '    : >"$run/attempts/$attempt/settling"  # the script lives, and settles the run'
    yield f'    for name in USR2 TERM KILL; do pause {LATE_S}; kill -$name "$srun"; done'
    yield f") {SRUN_LOG}>&- 2>/dev/null &"
    yield "watcher=$!"
    yield f'[ -z "$stop_signal" ] || kill -{"$stop_signal" if held else "USR2"} "$srun" 2>/dev/null'
    yield "# A signal ends the wait, not srun; bash keeps the code for whoever asks again."
    yield 'while wait "$srun"; [ $? -gt 128 ] && kill -0 "$srun" 2>/dev/null; do :; done'
    yield 'wait "$srun"'
    yield "code=$?"
    yield 'kill "$watcher" 2>/dev/null'


def settle(starter: Sequence[str]) -> Iterator[str]:
    """Yield the lines that settle the run after srun; their exit code is the script's."""
    yield f"trap '' {STOP_SIGNALS}"
    yield f'{_words(starter)} after "$run" "$attempt" "$code" "$stop_signal"'
    yield "code=$?"
    yield f"if [ $code = {START_AGAIN} ]; then  # only srun was killed: the allocation is there"
    yield f"    trap - {STOP_SIGNALS}"
    yield '    exec "$BASH" "$0"'
    yield "fi"
    yield "exit $code"


def _words(words: Sequence[str]) -> str:
    return " ".join(map(quoted, words))


AFTER_NODE = "after_node.sh"
STARTER = "clusters/slurm/node_entry.py"
KEPT = ("--kill-on-bad-exit=0", "--wait=0")
"""srun ends no node when another one has ended: the agents' coordinator decides that."""
LATE_S = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """The submitting side, as far as the script depends on it.

    Attributes:
        python: the interpreter that the ranks use.
        folder: the user's working folder; the job runs there too.
        package: folder of this package as the ranks import it: in the snapshot, or installed.
        path: folders that the ranks' PYTHONPATH begins with.
        unpacked: the folder that the code's archive, beside it, unpacks to, if any.
        defaults: options of sbatch that the user's SBATCH_* variables set, by option.
        copies: where each source folder's copy will be; None if the job is no program.
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
        """Return Python's arguments that run our part of a job."""
        program = self.package / STARTER
        if self.unpacked is None:
            return ["-u", str(program)]
        inside = program.relative_to(self.unpacked) if self.in_copy(program) else program
        return ["-I", f"{self.unpacked}.py", str(self.unpacked), str(inside)]


PER_TASK = (
    "SLURM_CPU_BIND", "SLURM_GPU_BIND", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU",
    "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION",
)  # fmt: skip


def here(config: Config, copy: Path) -> Here:
    """Return the submitting side as it is now.

    Args:
        copy: where the copy of the code goes, if there is to be one.
    """
    target = target_of(config.job)
    roots = snapshot.source_roots(target)
    if config.run.snapshot:
        places = snapshot.copies(target, copy)
    else:
        places = {root: root for root in roots}
    package = snapshot.PACKAGE
    own = places.get(package.parent)
    path = [*places.values(), Path.cwd()]
    return Here(
        python=sys.executable,
        folder=Path.cwd(),
        package=own / package.name if own else package,
        path=tuple(dict.fromkeys(path)),
        unpacked=copy if config.run.snapshot else None,
        defaults=read_defaults(os.environ),
        copies=None if isinstance(target, str) else places if config.run.snapshot else {},
    )


def cpus_per_node(cluster: ClusterConfig) -> int:
    """Return how many CPUs the ranks of a node take together."""
    return cluster.ranks_per_node * cluster.cpus_per_rank


def shape_of(asked: ClusterConfig) -> Iterator[str]:
    """Return the options of srun and salloc for a run's share of an allocation."""
    nodes = node_range(asked.nodes)[1]
    yield f"--nodes={nodes}"
    yield f"--ntasks={nodes}"
    yield "--ntasks-per-node=1"
    if gpu_count(asked.gpus_per_node):
        yield f"--gpus-per-node={asked.gpus_per_node}"
    if asked.memory_gib is not None:
        yield f"--mem={round(asked.memory_gib * 1024)}M"


def srun_lines(
    config: Config, here: Here, run: RunDir, shape: Sequence[str], end: str
) -> Iterator[str]:
    """Yield the shell lines of srun; the last is `end`."""
    yield from _lines(_srun(config, here, run, shape), end)


def _srun(config: Config, here: Here, run: RunDir, shape: Sequence[str]) -> list[list[str]]:
    """Yield srun and the ranks' program, a line a part."""
    cluster = config.cluster
    containers, python = _launcher(cluster, here, run)
    flags = {"mpi": "none", **cluster.srun_flags}
    return [
        ["exec", "srun"],
        ["--unbuffered"],
        *([option] for option in KEPT),
        *([["--no-kill"]] if config.run.survive else []),
        ["--export=ALL"],
        [f"--cpus-per-task={cpus_per_node(cluster)}"],
        *([option] for option in shape or ["--ntasks-per-node=1"]),
        [f"--output={run.logs}/node%n.log"],
        [f"--task-epilog={run.submitit / AFTER_NODE}"],
        *(
            [f"--{name}" if value is True else f"--{name}={value}"]
            for name, value in flags.items()
            if value is not False
        ),
        *([option] for option in containers),
        [*python, *here.starter[:2]],
        [*here.starter[2:], "node"],
        [str(run.submitit)],
    ]


def _launcher(cluster: ClusterConfig, here: Here, run: RunDir) -> tuple[list[str], list[str]]:
    """Return (srun's options, the command before the starter) for a container, or for none."""
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
    """Yield a long command, a line a part."""
    for number, words in enumerate(parts):
        indent = "    " if number else ""
        yield f"{indent}{' '.join(map(quoted, words))} \\"
    yield f"    {end}"


PREAMBLE = 8  # the descriptor of its text


def job_name(config: Config) -> str:
    """Return the job's name for squeue: `run.name`, or else the job class's or the program's."""
    return config.run.name or short_name(config.job)


def script_name(attempt: int) -> str:
    """Return the path of an attempt's batch script, without a suffix."""
    return f"{attempt:03d}"


def options(config: Config, run: RunDir) -> Iterator[tuple[str, object]]:
    """Yield the #SBATCH options in their usual order. True: no value."""
    cluster = config.cluster
    least, most = node_range(cluster.nodes)
    yield "job-name", job_name(config)
    for name in ("partition", "account", "qos", "reservation", "constraint", "exclude"):
        if getattr(cluster, name) is not None:
            yield name, getattr(cluster, name)
    yield "nodes", most if least == most else f"{least}-{most}"
    yield "ntasks-per-node", 1  # the agent, which starts the node's ranks
    yield "cpus-per-task", cpus_per_node(cluster)
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
    """Return the job's options: the configuration's, else the user's defaults."""
    stated = dict(options(config, run))
    return {**stated, **{d.option: d.value for d in applicable(here.defaults, stated)}}


def _from_environment(config: Config, run: RunDir, here: Here) -> Iterator[str]:
    """Yield the #SBATCH lines of the user's defaults, under a comment with their source."""
    taken = applicable(here.defaults, dict(options(config, run)))
    if taken:
        yield f"# as set in the environment: {', '.join(default.variable for default in taken)}"
    for default in taken:
        yield option_line(default.option, default.value)


def option_line(name: str, value: object) -> str:
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={quoted(value)}"


def _environment(config: Config) -> Iterator[str]:
    """Yield the user's variables. They hold for the preamble, for srun and for the ranks."""
    threads = str(config.cluster.cpus_per_rank)
    values = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **config.cluster.environment}
    for name, value in values.items():
        yield f"export {name}={quoted(value)}"


def _preamble(config: Config) -> Iterator[str]:
    """Yield the user's preamble, read as its own file, so that it cannot affect later lines."""
    lines = config.cluster.preamble
    if not lines:
        return
    end = "END_OF_PREAMBLE"
    while end in lines:
        end += "_"
    yield f". /dev/fd/{PREAMBLE} {PREAMBLE}<<'{end}'  # cluster.preamble"
    yield from lines
    yield end


def _our_environment(config: Config, here: Here) -> Iterator[str]:
    """Yield our variables for the ranks, set last."""
    if config.cluster.interface is not None:
        yield f"export {INTERFACE_VARIABLE}={quoted(config.cluster.interface)}"
    # They would give the one task of a node a rank's part of it.
    yield f"unset {' '.join(PER_TASK)}"
    yield "export SUBMITIT_EXECUTOR=slurm"
    yield f"export {BASE_ATTEMPT_VARIABLE}"
    if here.copies is not None:  # a program's path is the user's own, in the copies
        copies = json.dumps({str(root): copy.name for root, copy in here.copies.items()})
        yield f'export {OUTER_PATH_VARIABLE}="$PYTHONPATH"'
        yield f'export {OUTER_UMASK_VARIABLE}="$outer_umask"'
        yield f"export {COPIES_VARIABLE}={quoted(copies)}"
    yield from search_path(here)


def search_path(here: Here) -> Iterator[str]:
    """Yield PYTHONPATH: the run's own code first; its copy, if that is unpacked."""
    path = ":".join(str(folder) for folder in here.path if not here.in_copy(folder))
    if path:
        yield f'export PYTHONPATH={quoted(path)}"${{PYTHONPATH:+:$PYTHONPATH}}"'


def _sound_code(here: Here) -> Iterator[str]:
    """Yield the check that only the submitted code runs. Each node unpacks it afresh."""
    if here.unpacked is None:
        return
    yield f"snapshot={quoted(here.unpacked)}"
    yield 'require_plain "$snapshot.py" "$snapshot.tar" "$snapshot.sha256"'
    yield 'printf \'%s\\n\' "$snapshot" | cat - "$snapshot.py" "$snapshot.tar" |'
    yield '    sha256sum --check --strict --status "$snapshot.sha256" || {'
    yield '    echo "error: the code in $snapshot.tar is damaged: $snapshot.sha256 differs" >&2'
    yield "    exit 1"
    yield "}"


def batch_script(config: Config, run: RunDir, attempt: int, here: Here) -> str:
    """Return the text for sbatch. The values must have passed `check_values`.

    Args:
        attempt: number of the job's first start; a requeued job adds SLURM_RESTART_COUNT to it.
    """
    lines = [
        "#!/bin/bash",
        *(option_line(name, value) for name, value in options(config, run)),
        *_from_environment(config, run, here),
        "",
        *_step(config, run, attempt, here),
        *settle([here.python, *here.starter]),
    ]
    return "\n".join(lines) + "\n"


def step_script(config: Config, run: RunDir, attempt: int, here: Here, shape: Sequence[str]) -> str:
    """Return the script for an existing allocation, for a launcher that holds the script.

    Args:
        shape: options of srun for the ranks' part of the allocation.
    """
    step = _step(config, run, attempt, here, shape, held=True)
    return "\n".join(["#!/bin/bash", *step, "exit $code"]) + "\n"


def _step(
    config: Config,
    run: RunDir,
    attempt: int,
    here: Here,
    shape: Sequence[str] = (),
    *,
    held: bool = False,
) -> Iterator[str]:
    """Yield the lines from the node's checks to srun's `code`; no `shape` in the run's own job."""
    yield from (
        OWN_SHELL,
        *(["outer_umask=$(umask)"] if here.copies is not None else []),
        "umask 077",
        *signal_traps(held=held),
        f"run={quoted(run.path)}",
        *path_checks(),
        'if ! [ -w "$run/attempts" ]; then',
        '    echo "error: the run folder $run cannot be written on node $SLURMD_NODENAME" >&2',
        "    exit 1",
        "fi",
        *exit_if_ended(here.python, container=config.cluster.container is not None),
        'again="$run/attempts/again-$SLURM_JOB_ID"  # how often srun was started again',
        'require_plain "$again"',
        f'{BASE_ATTEMPT_VARIABLE}=$(({attempt} + $(cat "$again" 2>/dev/null || echo 0)))',
        f"attempt=$(printf %03d $(({BASE_ATTEMPT_VARIABLE} + ${{SLURM_RESTART_COUNT:-0}})))",
        'require_plain "$run/attempts/$attempt" "$run/attempts/$attempt/srun.log"',
        'mkdir -p "$run/attempts/$attempt"',
        f'exec {SRUN_LOG}>>"$run/attempts/$attempt/srun.log"',
        *_sound_code(here),
        *(["outer_path=${PYTHONPATH-}"] if here.copies is not None else []),
        *search_path(here),
        "(  # whatever is set, trapped or ended in here, what follows it is done",
        *exit_if_stopped(),
        *_environment(config),
        *(['export PYTHONPATH="$outer_path"'] if here.copies is not None else []),
        *_preamble(config),
        *_our_environment(config, here),
        *srun_lines(config, here, run, shape, f"2>&{SRUN_LOG} {SRUN_LOG}>&-"),
        ") &",
        *wait_for_srun(held=held),
    )


def after_node(run: RunDir) -> str:
    """Return the script that srun starts after a node's task (--task-epilog).

    It removes the run's unpacked code from the node, however the node's agent ended.
    """
    return f"""\
#!/bin/sh
# Started by the scheduler on each node whose task has ended.
exec >/dev/null 2>&1
run={quoted(run.path)}
mine={NAME}-$(id -u) start=$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}-$SLURMD_NODENAME
if [ "${BATCH_COPY_VARIABLE}" = "$SLURMD_NODENAME:${{TMPDIR-}}" ] &&
    kill -0 "${BATCH_PID_VARIABLE}"; then  # the batch script runs from it, and removes it
    exit
fi
for base in "${{TMPDIR:-{DISK}}}" {MEMORY} {DISK} "$run/{run.code.name}"; do
    for copy in "$base/$mine"-*-"$start"; do
        [ ! -d "$copy" ] || flock -n "$copy" rm -rf "$copy"
    done
done
"""
