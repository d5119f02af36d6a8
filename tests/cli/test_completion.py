"""The console script completes verbs, and overrides from the configuration, in a real bash."""

import subprocess
import sys
import tomllib

import pytest

from tests.helpers import ROOT, environment

TABS = {
    ("orchestrator", "st"): {"status"},
    ("orchestrator", "launch", "job", "=", "di"): {"digits", "digits_mindspore"},
    ("orchestrator", "launch", "acc"): {"accumulation."},
    ("orchestrator", "plan", "cluster", "=", "slurm_"): {"slurm_ascend", "slurm_dev"},
}


@pytest.fixture
def script(tmp_path):
    """The console script as pip makes it of pyproject.toml."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = entry["orchestrator"].split(":")
    path = tmp_path / "orchestrator"
    path.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
    path.chmod(0o755)
    return path


def test_bash_completes_verbs_groups_choices_and_keys(script):
    tabs = "\n".join(f"tab {' '.join(words)}" for words in TABS)
    program = f"""
        eval "$(_ORCHESTRATOR_COMPLETE=source_bash orchestrator)"
        tab() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _orchestrator_completion orchestrator
                echo "${{COMPREPLY[*]}}"; }}
        {tabs}"""
    env = environment()
    done = subprocess.run(
        ["bash", "--norc", "-c", program], env={**env, "PATH": f"{script.parent}:{env['PATH']}"},
        capture_output=True, text=True, check=True, timeout=150,
    )  # fmt: skip
    assert [set(line.split()) for line in done.stdout.splitlines()] == list(TABS.values())


@pytest.mark.parametrize("command", ["launch --help", "plan --json", "plan"])
def test_a_reader_that_goes_away_ends_a_command_without_a_word(script, command):
    done = subprocess.run(
        ["bash", "-c", f"{script} {command} | head -c 1"],
        env=environment(), capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (len(done.stdout), done.stderr) == (1, "")
