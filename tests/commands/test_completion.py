"""Completion in real shells: bash by its own function, zsh by what its function asks for."""

import subprocess
from pathlib import Path

import pytest

from orchestrator.plugins import COMMANDS
from tests.helpers import ROOT, environment

SCRIPT = ROOT / ".venv" / "bin" / "orchestrator"


def in_bash(folder, *words):
    """Return what bash's function answers for words as bash splits them, the last unfinished."""
    script = f"""
    source <({SCRIPT} --show-completion bash)
    COMP_WORDS=({" ".join(words)})
    COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    function=$(complete -p orchestrator | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
    $function {SCRIPT}
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env=environment(),
    )
    return done.stdout.split()


def in_zsh(folder, line):
    """Return what zsh's function is answered for the line up to the cursor."""
    asks = {"_ORCHESTRATOR_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}
    done = subprocess.run(
        [SCRIPT], capture_output=True, text=True, check=False, cwd=folder, env=environment(**asks)
    )
    return [part.strip('"') for part in done.stdout.split('"') if part.strip(" ()'\n")][1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("here")
    for name in ("runs/2026-11-29_a", "runs/2026-11-30_b", "runs/.replaced", "mine/job"):
        (folder / name).mkdir(parents=True)
    (folder / "mine" / "job" / "own.yaml").write_text("_target_: a.B\n")
    return folder


def test_keys_their_choices_and_groups(folder):
    keys = in_bash(folder, "orchestrator", "launch", "accumulation.micro")
    assert keys == ["accumulation.micro_batch=", "accumulation.micro_tokens="]
    assert in_bash(folder, "orchestrator", "launch", "train.prec")[:2] == [
        "train.precision=float32",
        "train.precision=bfloat16",
    ]
    assert in_bash(folder, "orchestrator", "launch", "train.precision", "=", "bf") == ["bfloat16"]
    assert {"digits", "line"} <= {*in_bash(folder, "orchestrator", "plan", "job", "=")}
    own = ("--config-dir", "mine", "job", "=")
    assert "own" in in_bash(folder, "orchestrator", "launch", *own)
    own = ("--config-dir", "=", "mine", "job", "=")
    assert "own" in in_bash(folder, "orchestrator", "launch", *own)
    assert in_zsh(folder, "orchestrator plan --config-dir=mine job=ow") == ["job=own"]
    missing = "orchestrator plan --config-dir nowhere +cluster=slurm_d"
    assert in_zsh(folder, missing) == ["+cluster=slurm_dev"]
    assert in_zsh(folder, "orchestrator launch +cluster=slurm_d") == ["+cluster=slurm_dev"]
    assert in_zsh(folder, "orchestrator launch job=digits train.checkpoint_in") == [
        "train.checkpoint_in_background=true",
        "train.checkpoint_in_background=false",
    ]


VERBS = ["status", "resume", "logs", "cancel", "wait", "attach", *{"report"} & {*COMMANDS.names()}]


@pytest.mark.parametrize("verb", VERBS)
def test_run_folders(folder, verb):
    runs = in_bash(folder, "orchestrator", verb, "ru")
    assert sorted(map(Path, runs)) == [Path("runs/2026-11-29_a"), Path("runs/2026-11-30_b")]


def test_what_follows_a_run_is_an_override_or_a_run(folder):
    assert in_bash(folder, "orchestrator", "resume", "runs/x", "train.upd")[0] == "train.updates="
    both = in_bash(folder, "orchestrator", "compare", "runs/2026-11-29_a", "runs/2026-11-30")
    assert both == ["runs/2026-11-30_b"]
