"""The batch script of an allocation that runs share: it starts each run's own script, beside each
other, hands on what it is sent, and once all have ended hands the job back to the queue for those
that are to start again.

What the scheduler sends to a job's ranks (a notice, a preemption) reaches the ranks of all runs by
itself; what the script alone gets is handed on to the runs' scripts, which hand it to theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.clusters.slurm.queue.scripts import script_name
from orchestrator.clusters.slurm.request.batch_script import option_line, search_path
from orchestrator.clusters.slurm.request.safe_values import quoted
from orchestrator.clusters.slurm.request.shell_lines import OWN_SHELL, STOP_SIGNALS
from orchestrator.clusters.slurm.request.srun_lines import Here
from orchestrator.errors import START_AGAIN
from orchestrator.lifecycle.topology import BATCH_PID_VARIABLE

BODY = """\
outer_umask=$(umask)
umask 077
{pid}=$$
export {pid}
told= points= again= killed= code=0
declare -A name_of
heed() {{  # a run's script that is started in the background is deaf to INT
    told=${{told:-$1}}
    [ -z "$points" ] || kill -"${{1/#INT/TERM}}" $points 2>/dev/null
}}
for name in {signals}; do
    trap "heed $name" "$name"
done
is_here() {{  # in a later start: a run that was submitted anew meanwhile is another job's
    [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] ||
        grep -qsF "\\"job_id\\": \\"$SLURM_JOB_ID\\"" "$sweep/$1/handle.json"
}}
for name in {names}; do
    is_here "$name" || continue
    (umask "$outer_umask"; exec bash "$sweep/$name/submitit/{script}.sh") \\
        >>"$sweep/$name/logs/batch.log" 2>&1 &
    points="$points $!"
    name_of[$!]=$name
done
[ -z "$told" ] || heed "$told"
for point in $points; do
    # A signal ends the wait, not the point; bash keeps the code for whoever asks again.
    while wait "$point"; [ $? -gt 128 ] && kill -0 "$point" 2>/dev/null; do :; done
    wait "$point"
    ended=$?
    case $ended in
        0) ;;
        {again}) again="$again ${{name_of[$point]}}" ;;
        *) code=1 ;;
    esac
    [ $ended -le 128 ] || killed="$killed ${{name_of[$point]}}"
done
trap '' {signals}
[ -n "$again$killed" ] || exit $code
"""


def pack_script(
    runs: Sequence[Path], attempt: int, options: Mapping[str, object], here: Here
) -> str:
    """The text that sbatch gets for runs that share a job.

    Args:
        runs: their folders, side by side, called by their numbers.
        options: of sbatch, for all together.
        here: the submitting side, with the code that they share.
    """
    body = BODY.format(
        pid=BATCH_PID_VARIABLE,
        signals=STOP_SIGNALS,
        names=" ".join(quoted(run.name) for run in runs),
        script=script_name(attempt),
        again=START_AGAIN,
    )
    starter = " ".join(map(quoted, [here.python, *here.starter]))
    return "\n".join([
        "#!/bin/bash",
        *(option_line(name, value) for name, value in options.items()),
        "",
        OWN_SHELL,
        f"sweep={quoted(runs[0].parent)}",
        body + "\n".join(search_path(here)),
        f'{starter} again "$sweep" {attempt} "$again" "$killed"',
        "exit $code",
        "",
    ])  # fmt: skip
