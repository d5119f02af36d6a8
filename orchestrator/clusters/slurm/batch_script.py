"""Batch scripts: from a `Config` to the exact text for sbatch.

Pure: the text can be printed, compared with golden files, and given to `sbatch --test-only`.
submitit's own script has no --requeue, no --kill-on-bad-exit and no --cpus-per-task for srun,
always sets a wckey, and cannot run anything after srun; so submitit only places this script and
starts its task: one on each node, the parent of the node's agent (`task.py`).

The script survives signals, because it finalizes what the agents leave (`finalize.py`). If it is
killed itself, the coordinator or the next `resume` or `status` does that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from orchestrator import snapshot
from orchestrator.agent.topology import (
    BASE_ATTEMPT_VARIABLE,
    BATCH_PID_VARIABLE,
    INTERFACE_VARIABLE,
    NODE_VARIABLE,
    OUTER_UMASK_VARIABLE,
    PATH_VARIABLE,
)
from orchestrator.clusters.api import rank_environment
from orchestrator.clusters.slurm.safe_values import quoted
from orchestrator.config.program import is_program, short_name, target_of
from orchestrator.config.schema import ClusterConfig, Config, gpu_count, node_range, notice_s
from orchestrator.errors import START_AGAIN
from orchestrator.rundir.files import DISK_PATIENCE_S
from orchestrator.rundir.folder import RunDir
from orchestrator.source.modules import PACKAGE

TRAPPED = "TERM INT HUP USR1 USR2"
SRUN_LOG = 9  # the descriptor of srun's log, opened before any user code runs
PREAMBLE = 8  # the descriptor of the preamble's text
NO_PREAMBLE = "error: cluster.preamble cannot be read; is ${TMPDIR:-/tmp} full on $SLURMD_NODENAME?"
STOPS = 7  # the descriptor of a pipe with the stop signals that come while the run is finalized
SRUN_GRACE_S = 10  # between the signals to an srun that does not end
ROOM_BYTES = 65536  # that a disk must have for the files of an attempt's start
STEPS_S = 20  # for which a controller that has just started may refuse steps
ANSWER_S = 60  # for which squeue may take to answer
RECORD_S = 20  # for a submission to record its job
STOPPED_S = 5  # for which a process of the script may be stopped
STARTER = "clusters/slurm/node_entry.py"
MOUNTS = "container-mounts"
PER_TASK = (
    "SLURM_CPU_BIND",
    "SLURM_GPU_BIND",
    "SLURM_GPUS_PER_TASK",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_TRES_PER_TASK",
    "SLURM_DISTRIBUTION",
)


class Shell(Template):
    """Shell text with values at `@{name}`."""

    delimiter = "@"

    def lines(self, **values: object) -> list[str]:
        """Return the text's lines with these values."""
        numbers = {
            "SRUN_LOG": SRUN_LOG,
            "STOPS": STOPS,
            "STOPPED_S": STOPPED_S,
            "STEPS_S": STEPS_S,
            "NODE_INDEX": NODE_VARIABLE,
        }
        return self.substitute(TRAPPED=TRAPPED, **numbers, **values).splitlines()


# What a site's BASH_ENV, or SHELLOPTS and POSIXLY_CORRECT in the submitting shell, has switched on
# would end the script where srun fails, or have it forget srun's code.
OWN_SHELL = "set +eufC +o pipefail +o posix"
# A signal to the script alone (scancel --batch) is meant for the ranks. srun forwards USR2 to its
# tasks; on TERM it ends them, which only a launcher wants that holds the script (allocation.py).
# $1 is a signal that came before the script started itself again.
TRAPS = Shell("""\
stop_signal=$1 srun=
forward_stop() {
    stop_signal=${stop_signal:-$1}
    [ -z "$srun" ] || kill -@{forwarded} "$srun" 2>/dev/null
}
for name in @{TRAPPED}; do
    trap "forward_stop $name" "$name"
done
""")
# "state": "finished" is searched for as `to_json_text` writes it.
CHECKS = Shell("""\
run=@{run}
refuse_links() {
    for path; do
        [ ! -L "$path" ] || { echo "error: $path is a link" >&2; exit 1; }
    done
}
refuse_links "$run/attempts" "$run/logs" "$run/code" "$run/submitit" "$run"/submitit/*
if ! [ -w "$run/attempts" ]; then
    echo "error: the run folder $run cannot be written on node $SLURMD_NODENAME" >&2
    exit 1
fi
if [ -e "$run/result.json" ]; then
    echo "this run has ended already; to go on: python -m orchestrator resume $run"
    grep -q '"state": "finished"' "$run/result.json"  # else it was stopped, or has failed
    exit
fi
if ! [ -d "$run/submitit" ]; then
    echo "error: $run/submitit is missing, and with it the task of the ranks" >&2
    exit 1
fi
""")
PYTHON_CHECK = Shell("""\
if ! [ -x @{python} ]; then
    echo "error: there is no Python at "@{python}" on node $SLURMD_NODENAME" >&2
    exit 1
fi
""")
JOB_ID = "job_id=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
# Where sbatch's answer was lost, the run may have been submitted again: of two jobs, the recorded
# one trains. One that has ended bars no other, as of a person who calls sbatch. During a submission
# the record is an old one; that command may have been killed. The id is read as `write_json`
# writes it.
OWN_JOB = Shell("""\
is_recorded() {
    own_job=$(sed -n 's/^ "job_id": "\\([0-9_]*\\)",$/\\1/p' "$run/handle.json" 2>/dev/null)
    [ "$own_job" = "$job_id" ]
}
is_being_submitted() {
    [ -e "$run/submitting.json" -o -e "$run/../submitting.json" ]
}
for _ in {1..@{RECORD_S}}; do
    if is_recorded || ! is_being_submitted; then break; fi
    read -rt 1 <> <(:)
done
if ! is_recorded && [ -n "$own_job" ] && ! is_being_submitted &&
    timeout @{ANSWER_S} squeue -ahr -t PD,CF,R,S,CG -o %i -j "$own_job" 2>/dev/null |
    grep -qxF "$own_job"
then
    echo "note: this job ($job_id) is not the run's: that is job $own_job, queued or running" >&2
    exit 1
fi
""")
# `read -rt 1 <> <(:)` sleeps, without a process that would hold back traps or outlive the script.
ATTEMPT = Shell("""\
restarts=$run/attempts/srun-restarts-$job_id  # how often srun was restarted
refuse_links "$restarts"
restarted=$(cat "$restarts" 2>/dev/null || echo 0)
@{BASE}=$((@{attempt} + restarted))
attempt=$(printf %03d $((@{BASE} + ${SLURM_RESTART_COUNT:-0})))
refuse_links "$run/attempts/$attempt" "$run/attempts/$attempt/srun.log"
# A disk that is full for some time ends no run. What starts now writes some small files.
make_attempt() (
    export LC_ALL=C
    mkdir -p "$run/attempts/$attempt" &&
        head -c @{ROOM_BYTES} /dev/zero >"$run/attempts/$attempt/room"
)
waited_s=0
until problem=$(make_attempt 2>&1) || [ -n "$stop_signal" ]; do
    if ! [[ $problem =~ "No space left"|quota && $waited_s -lt @{DISK_PATIENCE_S} ]]; then
        echo "error: $problem" >&2
        exit 1
    fi
    [ $waited_s != 0 ] || echo "$problem; waiting for space, for up to @{DISK_PATIENCE_S} s"
    waited_s=$((waited_s + 1))
    read -rt 1 <> <(:)
done
rm -f "$run/attempts/$attempt/room"
exec @{SRUN_LOG}>>"$run/attempts/$attempt/srun.log"
""")
# Called in the background, in a shell of its own: no variable, trap or exit in here affects the
# lines that follow the call.
RANKS = Shell("""\
start_ranks() {
local -r _step_options=("$@@")  # of a later step; a preamble may set others
[ ! -e "$run/cancel" ] || exit 0
[ -z "$stop_signal" ] || exit 143
""")
# Once a second. A script, srun or last step that was stopped (SIGSTOP) would hold all nodes until
# the time limit, so it is continued. SLURM itself stops all processes of a job, this watcher too.
SECOND = Shell("""\
stopped_s=0
second() {
    read -rt 1 <> <(:)
    kill -0 $$ || exit
    local pid stopped=
    for pid in $$ "$1"; do
        [[ $(<"/proc/$pid/stat") == *") T "* ]] || continue
        stopped=1
        [ $stopped_s -lt @{STOPPED_S} ] || kill -CONT "$pid"
    done
    stopped_s=$((stopped ? stopped_s + 1 : 0))
    [ $stopped_s != @{STOPPED_S} ] || echo "a process of the batch script was stopped; it continues"
}
""")
# Signals do not interrupt the wait for srun. An unresponsive node would keep srun from ending, so
# srun is ended after the outcome is written. The watcher ends with the script, however that ends,
# and by no signal to all processes of the job (scancel --full). It shows no
# errors but those of a lost agent's step, which go to that step's log.
WAIT = Shell("""\
}
# A node whose agent is lost, in a step that lives, gets another one (task.py asks for it).
start_lost_agents() {
    local request index node
    for request in "$run/attempts/$attempt"/start-agent-*; do
        [ -f "$request" ] && read -r node <"$request" && rm "$request" || continue
        index=${request##*-}
        {
            trap - @{TRAPPED}
            @{NODE_INDEX}=$index start_ranks --overlap --nodes=1 --ntasks=1 --nodelist="$node" \\
                --output="$run/logs/node$((10#$index)).log"
        } @{SRUN_LOG}>>"$run/attempts/$attempt/srun-$index.log" 2>&@{SRUN_LOG} &
    done
}
# slurmctld may not know for minutes that the step before has ended: the next one overlaps it. Where
# slurmctld itself has just started, it refuses steps for seconds, and srun asks again in a minute.
await_steps() {
    for _ in {1..@{STEPS_S}}; do
        timeout @{SRUN_GRACE_S} srun --overlap --immediate=1 --mpi=none --input=none \\
            --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 true 2>/dev/null && return
    done
}
if [ "$restarted" = 0 ]; then
    start_ranks &
else
    { [ -n "$stop_signal" ] || await_steps; start_ranks --overlap; } &
fi
srun=$!
(
    trap '' @{TRAPPED}
    until [ -e "$run/attempts/$attempt/outcome.json" ]; do
        second "$srun"
        start_lost_agents
    done
    : >"$run/attempts/$attempt/finalizing"  # the script lives, and finalizes the run
    for name in USR2 TERM KILL; do
        for _ in {1..@{SRUN_GRACE_S}}; do second "$srun"; done
        kill -$name "$srun"
        echo "sent srun SIG$name" >>"$run/attempts/$attempt/finalizing"
    done
    while :; do second "$srun"; done
) @{SRUN_LOG}>&- 2>/dev/null &
watcher=$!
disown "$watcher"  # its end is no message
[ -z "$stop_signal" ] || kill -@{first} "$srun" 2>/dev/null
# A signal ends the wait, not srun; bash keeps the code for the next wait.
while wait "$srun"; [ $? -gt 128 ] && kill -0 "$srun" 2>/dev/null; do :; done
wait "$srun"
code=$?
kill -KILL "$watcher" 2>/dev/null
""")
# The last step must not end by a signal that SLURM sends to all processes of the job. A stop ends
# its pause before another attempt, which then starts no rank and is finalized as stopped.
# $0 is SLURM's copy of the script, whose count of restarts is one higher by then.
FINALIZE = Shell("""\
exec @{STOPS}<> <(:)
forward_stop() {
    stop_signal=${stop_signal:-$1}
    echo "$1" >&@{STOPS}
}
(
    trap '' @{TRAPPED}
    exec @{starter} after "$run" "$attempt" "$code" "$stop_signal"
) <&@{STOPS} &
step=$!
(trap '' @{TRAPPED}; while :; do second "$step"; done) 2>/dev/null &
watcher=$!
disown "$watcher"
while wait "$step"; [ $? -gt 128 ] && kill -0 "$step" 2>/dev/null; do :; done
wait "$step"
code=$?
kill -KILL "$watcher" 2>/dev/null
if [ $code = @{START_AGAIN} ]; then  # the allocation is there: its nodes serve another attempt
    exec "$BASH" "$0" "$stop_signal" @{STOPS}>&-
fi
exit $code
""")


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitHost:
    """The submitting side, as far as the script depends on it.

    Attributes:
        python: the interpreter that the ranks use.
        folder: the user's working folder; the job runs there too.
        package: folder of this package as the ranks import it: in the copy, or installed.
        path: folders that the ranks' PYTHONPATH begins with.
        code: the copy of the code, if any.
    """

    python: str
    folder: Path
    package: Path
    path: tuple[Path, ...] = ()
    code: Path | None = None

    @property
    def starter(self) -> list[str]:
        """Return Python's arguments that run our part of a job; -P: no other module is in reach."""
        return ["-u", "-P", str(self.package / STARTER)]


def submit_host(config: Config, copy: Path) -> SubmitHost:
    """Return the submitting side as it is now.

    Args:
        copy: where the copy of the code goes, if there is to be one.
    """
    target, package = target_of(config.job), PACKAGE
    if config.run.snapshot:
        roots = snapshot.copies(target, copy)
    else:
        roots = {root: root for root in snapshot.source_roots(target)}
    own = roots.get(package.parent)
    return SubmitHost(
        python=sys.executable,
        folder=Path.cwd(),
        package=own / package.name if own else package,
        path=tuple(dict.fromkeys([*roots.values(), Path.cwd()])),
        code=copy if config.run.snapshot else None,
    )


def cpus_per_node(cluster: ClusterConfig) -> int:
    """Return how many CPUs the ranks of a node take together."""
    return cluster.ranks_per_node * cluster.cpus_per_rank


def _mebibytes(gibibytes: float) -> int:
    return max(1, round(gibibytes * 1024))  # to SLURM 0 is all memory of a node


def shape_of(cluster: ClusterConfig) -> Iterator[str]:
    """Return the options of srun and salloc for a run's share of an allocation."""
    nodes = node_range(cluster.nodes)[1]
    yield f"--nodes={nodes}"
    yield f"--ntasks={nodes}"
    yield "--ntasks-per-node=1"
    if gpu_count(cluster.gpus_per_node):
        yield f"--gpus-per-node={cluster.gpus_per_node}"
    if cluster.memory_gib is not None:
        yield f"--mem={_mebibytes(cluster.memory_gib)}M"


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
    for name in ("partition", "account", "qos", "constraint", "exclude"):
        if value := getattr(cluster, name):  # an empty one is an empty variable of the user's
            yield name, value
    yield "nodes", most if least == most else f"{least}-{most}"
    yield "ntasks-per-node", 1  # the agent, which starts the node's ranks
    yield "cpus-per-task", cpus_per_node(cluster)
    if gpu_count(cluster.gpus_per_node):
        yield "gpus-per-node", cluster.gpus_per_node
    if cluster.memory_gib is not None:
        yield "mem", f"{_mebibytes(cluster.memory_gib)}M"
    if cluster.time_min is not None:
        yield "time", cluster.time_min
    if cluster.exclusive:
        yield "exclusive", cluster.exclusive
    yield ("no-requeue" if cluster.requeue is False else "requeue"), True
    if config.run.survive:
        yield "no-kill", True
    limit_s = None if cluster.time_min is None else 60.0 * cluster.time_min
    yield "signal", f"USR2@{notice_s(cluster.signal_ahead_s, limit_s)}"
    for name, value in cluster.slurm_flags.items():
        if value is not False:
            yield name, value
    yield "output", run.batch_log
    yield "open-mode", "append"


def option_line(name: str, value: object) -> str:
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={quoted(value)}"


def batch_script(config: Config, run: RunDir, attempt: int, host: SubmitHost) -> str:
    """Return the text for sbatch. The values must have passed `check_values`.

    Args:
        attempt: number of the job's first start; a requeued job adds SLURM_RESTART_COUNT to it.
    """
    lines = ["#!/bin/bash", *(option_line(name, value) for name, value in options(config, run))]
    lines += ["", *_step(config, run, attempt, host)]
    starter = _quoted([host.python, *host.starter])
    lines += FINALIZE.lines(starter=starter, START_AGAIN=START_AGAIN)
    return "\n".join(lines) + "\n"


def step_script(
    config: Config, run: RunDir, attempt: int, host: SubmitHost, shape: Sequence[str]
) -> str:
    """Return the script for an existing allocation, for a launcher that holds the script.

    Args:
        shape: options of srun for the ranks' part of the allocation.
    """
    step = _step(config, run, attempt, host, shape, attended=True)
    return "\n".join(["#!/bin/bash", *step, "exit $code"]) + "\n"


def _step(
    config: Config,
    run: RunDir,
    attempt: int,
    host: SubmitHost,
    shape: Sequence[str] = ("--ntasks-per-node=1",),
    *,
    attended: bool = False,
) -> Iterator[str]:
    """Yield the lines from the node's checks to srun's `code`."""
    yield OWN_SHELL
    if is_program(config.job):  # its own files get the user's umask
        yield f"export {OUTER_UMASK_VARIABLE}=${{{OUTER_UMASK_VARIABLE}:-$(umask)}}"
    yield "umask 077"
    yield f"export {BATCH_PID_VARIABLE}=$$"
    yield from TRAPS.lines(forwarded="$1" if attended else "USR2")
    yield from CHECKS.lines(run=quoted(run.path))
    # A container has its own, but the last line of a job's script runs outside.
    if config.cluster.container is None or not attended:
        yield from PYTHON_CHECK.lines(python=quoted(host.python))
    yield JOB_ID
    if not attended:
        yield from OWN_JOB.lines(ANSWER_S=ANSWER_S, RECORD_S=RECORD_S)
    yield from ATTEMPT.lines(
        BASE=BASE_ATTEMPT_VARIABLE,
        attempt=attempt,
        ROOM_BYTES=ROOM_BYTES,
        DISK_PATIENCE_S=int(DISK_PATIENCE_S),
    )
    yield f"export {PATH_VARIABLE}={quoted(':'.join(map(str, host.path)))}"
    if host.code is not None:
        yield f"export {snapshot.CODE_VARIABLE}={quoted(host.code)}"
    yield from SECOND.lines()
    yield from RANKS.lines()
    # For the preamble, for srun and for the ranks.
    for name, value in rank_environment(config.cluster).items():
        yield f"export {name}={quoted(value)}"
    yield from _preamble(config)
    if config.cluster.interface is not None:
        yield f"export {INTERFACE_VARIABLE}={quoted(config.cluster.interface)}"
    # They would give the one task of a node a rank's part of it.
    yield f"unset {' '.join(PER_TASK)}"
    yield "export SUBMITIT_EXECUTOR=slurm"
    yield f"export {BASE_ATTEMPT_VARIABLE}"
    *srun, python, entry = _srun(config, host, run, shape)
    for number, argv in enumerate(srun):
        yield f"{'    ' if number else ''}{_quoted(argv)} \\"
    yield '    ${_step_options[@]+"${_step_options[@]}"} \\'  # none in old shells is no error
    for argv in (python, entry):
        yield f"    {_quoted(argv)} \\"
    yield f"    2>&{SRUN_LOG} {SRUN_LOG}>&-"
    yield from WAIT.lines(SRUN_GRACE_S=SRUN_GRACE_S, first="$stop_signal" if attended else "USR2")


def _quoted(argv: Sequence[str]) -> str:
    return " ".join(map(quoted, argv))


def _preamble(config: Config) -> Iterator[str]:
    """Yield the user's preamble, read as its own file, so that it cannot affect later lines."""
    lines = config.cluster.preamble
    if not lines:
        return
    end = "END_OF_PREAMBLE"
    while end in lines:
        end += "_"
    # Bash keeps a long text in a file, before 5.1 any: without one, none of it would be executed.
    yield "local _preamble_begun="
    yield f". /dev/fd/{PREAMBLE} {PREAMBLE}<<'{end}'  # cluster.preamble"
    yield "_preamble_begun=1"
    yield from lines
    yield end
    yield f'[ -n "$_preamble_begun" ] || {{ echo "{NO_PREAMBLE}" >&2; exit 1; }}'


def _srun(config: Config, host: SubmitHost, run: RunDir, shape: Sequence[str]) -> list[list[str]]:
    """Return srun and the ranks' program, the arguments of a line each."""
    cluster = config.cluster
    containers, python = _container(cluster, host, run)
    flags = {"mpi": "none", **cluster.srun_flags}
    if cluster.container_runtime == "pyxis":
        flags.pop(MOUNTS, None)  # joined with ours: of an option given twice one may be lost
    srun_options = [
        "--unbuffered",
        # srun ends no node when another one has ended: the agents' coordinator decides that
        "--kill-on-bad-exit=0",
        "--wait=0",
        *(["--no-kill"] if config.run.survive else []),
        "--export=ALL",
        f"--chdir={host.folder}",  # the preamble may have changed it
        f"--cpus-per-task={cpus_per_node(cluster)}",
        *shape,
        f"--output={run.logs}/node%n.log",
        *(
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in flags.items()
            if value is not False
        ),
        *containers,
    ]
    return [
        ["exec", "srun"],
        *([option] for option in srun_options),
        [*python, *host.starter],
        ["node", str(run.submitit)],
    ]


def _container(
    cluster: ClusterConfig, host: SubmitHost, run: RunDir
) -> tuple[list[str], list[str]]:
    """Return (srun's options, the command before the starter) for a container, or for none."""
    folders = {run.path, host.folder, *host.path, *([host.code] if host.code else [])}
    inner = {f for f in folders if any(f != other and f.is_relative_to(other) for other in folders)}
    shared = sorted(str(folder) for folder in folders - inner)
    if cluster.container_runtime == "pyxis":
        own = [f"{folder}:{folder}" for folder in shared]
        mounts = ",".join([*own, *map(str, filter(None, [cluster.srun_flags.get(MOUNTS)]))])
        return [
            f"--container-image={cluster.container}",
            f"--{MOUNTS}={mounts}",
            f"--container-workdir={host.folder}",
        ], ["python3"]
    if cluster.container_runtime == "apptainer":
        # by a flag: gres=gpu:4, say
        in_flags = any("gpu" in f"{name}={value}" for name, value in cluster.slurm_flags.items())
        on_gpus = gpu_count(cluster.gpus_per_node) or in_flags
        gpus = ["--nv"] if on_gpus else []
        binds = "--bind=" + ",".join(shared)
        return [], ["apptainer", "exec", *gpus, binds, str(cluster.container), "python3"]
    return [], [host.python]
