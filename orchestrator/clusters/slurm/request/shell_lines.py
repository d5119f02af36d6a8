"""The batch script's own part in a stop, a restart and an end: lines of shell around srun.

The script must outlive what is sent to it, because what the ranks leave is its to settle (see
`after_srun`). What it cannot settle, since it was killed itself, rank 0 does, or the next `resume`
or `status` (see `ending/settle.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.clusters.slurm.request.safe_values import quoted
from orchestrator.lifecycle.topology import BATCH_COPY_VARIABLE, BATCH_PID_VARIABLE

STOP_SIGNALS = "TERM INT HUP USR1 USR2"
OWN_SHELL = "set +eufC +o pipefail +o posix"
"""What a site's BASH_ENV, or SHELLOPTS and POSIXLY_CORRECT in the submitting shell, has switched on
would end the script where srun fails, or have it forget srun's code.
"""
SRUN_LOG = 9  # the descriptor of its log, open before anything of the person's runs


def heeding(*, held: bool = False, shared: bool = False) -> Iterator[str]:
    """Signals are noted and passed on: one that the script alone gets (scancel --batch) is meant
    for the ranks. srun takes USR2 for its tasks; of TERM it ends them, which only a launcher wants
    that holds the script (`allocation.py`).

    Args:
        shared: the job is not the run's own, and its script says which process it is.
    """
    if not shared:
        yield f"{BATCH_PID_VARIABLE}=$$"
        yield f"export {BATCH_PID_VARIABLE}"
    if not held:
        yield f'{BATCH_COPY_VARIABLE}="$SLURMD_NODENAME:${{TMPDIR-}}"'
        yield f"export {BATCH_COPY_VARIABLE}"
    yield "told= srun="
    yield "heed() {"
    yield "    told=${told:-$1}"
    yield f'    [ -z "$srun" ] || kill -{"$1" if held else "USR2"} "$srun" 2>/dev/null'
    yield "}"
    yield f"for name in {STOP_SIGNALS}; do"
    yield '    trap "heed $name" "$name"'
    yield "done"


def owning() -> Iterator[str]:
    """What keeps the script from what a link would lead to, and from waiting at a fifo for ever."""
    yield "own() {  # each is nothing yet, or a file or folder that lies right there"
    yield "    for place; do"
    yield '        if ! [ -L "$place" ]; then'
    yield '            ! [ -e "$place" ] || [ -f "$place" ] || [ -d "$place" ] && continue'
    yield "        fi"
    yield '        echo "error: $place is a link, or neither a file nor a folder" >&2'
    yield "        exit 1"
    yield "    done"
    yield "}"
    yield 'own "$run/attempts" "$run/logs" "$run/code" "$run/submitit" "$run"/submitit/*'


def unless_ended(python: str, *, container: bool) -> Iterator[str]:
    """What keeps a job that the scheduler starts once more, or in vain, from asking for ranks."""
    yield 'if [ -e "$run/result.json" ]; then'
    yield '    echo "this run has ended already; to go on: python -m orchestrator resume $run"'
    yield "    exit 0"
    yield "fi"
    yield 'if ! [ -d "$run/submitit" ]; then'
    yield '    echo "error: $run/submitit is gone, and with it what the ranks are told to do" >&2'
    yield "    exit 1"
    yield "fi"
    if container:  # it brings a Python of its own
        return
    yield f"if ! [ -x {quoted(python)} ]; then"
    yield f'    echo "error: there is no Python at "{quoted(python)}" on node $SLURMD_NODENAME" >&2'
    yield "    exit 1"
    yield "fi"


def unless_stopped() -> Iterator[str]:
    """The first lines of the subshell that becomes srun: a stop may have come before it."""
    yield '[ ! -e "$run/cancel" ] || exit 0'
    yield '[ -z "$told" ] || exit 143'


def waiting(*, held: bool = False, beside: Sequence[str] = ()) -> Iterator[str]:
    """Wait for it to its end, whatever is signalled meanwhile.

    Args:
        beside: starts what ends srun when it has to be (`losses.py`), where srun does not know.
    """
    yield "srun=$!"
    if beside:
        yield f'{_words(beside)} beside "$run" "$attempt" "$srun" {SRUN_LOG}>&- &'
        yield "beside=$!"
    yield f'[ -z "$told" ] || kill -{"$told" if held else "USR2"} "$srun" 2>/dev/null'
    yield "# A signal ends the wait, not srun; bash keeps the code for whoever asks again."
    yield 'while wait "$srun"; [ $? -gt 128 ] && kill -0 "$srun" 2>/dev/null; do :; done'
    yield 'wait "$srun"'
    yield "code=$?"
    if beside:  # it ends with srun, and must not hold the code that is removed after it
        yield 'wait "$beside"'


def settling(starter: Sequence[str], *, survive: bool) -> Iterator[str]:
    """What is done once it has ended; the code stays srun's, but where losses were survived."""
    yield f"trap '' {STOP_SIGNALS}"
    after = f'{_words(starter)} after "$run" "$attempt" "$code" "$told"'
    yield f"{after} && code=0" if survive else after


def settling_a_share(starter: Sequence[str]) -> Iterator[str]:
    """The same in a job that others share; the code says whether this run is to start again."""
    yield f"trap '' {STOP_SIGNALS}"
    yield f'{_words(starter)} share "$run" "$attempt" "$code" "$told"'
    yield "code=$?"


def _words(words: Sequence[str]) -> str:
    return " ".join(map(quoted, words))
