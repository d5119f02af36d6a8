"""What `doctor` says of machines and clusters, of settings that hurt and those that do not."""

import json
import os
import re
import tomllib

import pytest

from orchestrator.doctor import machine, network, slurm
from orchestrator.doctor.findings import BAD, NOTE
from orchestrator.doctor.trial import measured
from tests.helpers import ROOT, call
from tests.report.conftest import record, result

KIND = {
    "JobRequeue": "1", "AuthInfo": "cred_expire=5", "EnforcePartLimits": "ALL",
    "SlurmdTimeout": "30 sec", "PreemptType": "preempt/none", "TaskPlugin": "task/cgroup",
    "AccountingStorageType": "accounting_storage/slurmdbd", "ProctrackType": "proctrack/cgroup",
    "MinJobAge": "3600 sec", "KillWait": "30 sec", "SLURM_VERSION": "22.05.8",
}  # fmt: skip
HURTFUL = {
    "JobRequeue": "0", "AuthInfo": "(null)", "EnforcePartLimits": "NO",
    "SlurmdTimeout": "300 sec", "PreemptType": "preempt/partition_prio", "TaskPlugin": "task/none",
    "AccountingStorageType": "accounting_storage/none", "ProctrackType": "proctrack/linuxproc",
    "MinJobAge": "200 sec", "KillWait": "5 sec",
}  # fmt: skip


def test_a_cluster_that_hurts_nobody_has_nothing_to_do():
    assert [one.do for one in slurm.from_settings(KIND)] == ["", ""]


@pytest.mark.parametrize("setting", HURTFUL)
def test_each_setting_that_hurts_is_told_with_what_to_do(setting):
    found = [one for one in slurm.from_settings({**KIND, setting: HURTFUL[setting]}) if one.do]
    assert len(found) == 1
    assert found[0].state in (NOTE, BAD)
    assert len(slurm.HURTING) == len(HURTFUL), "each has a row here"


def test_a_machine_without_slurm_gets_one_note(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    [found] = slurm.slurm()
    assert (found.state, "python -m slurm up" in found.do) == (NOTE, True)


def test_a_controller_that_does_not_answer_is_bad_and_said(monkeypatch, tmp_path):
    for name in slurm.COMMANDS:
        (tmp_path / name).write_text(
            "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n"
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    [found] = slurm.slurm()
    assert (found.state, "does not answer" in found.found, bool(found.do)) == (BAD, True, True)


def test_a_variable_that_names_an_interface_that_is_not_there_is_bad(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nowhere0")
    [found] = [one for one in network.network() if "NCCL_SOCKET_IFNAME" in one.found]
    assert (found.state, "unset NCCL_SOCKET_IFNAME" in found.do) == (BAD, True)


def test_what_is_called_tested_is_what_the_tests_run_with():
    pins = dict(
        re.findall(r"^([\w-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    assert machine.TESTED.items() <= pins.items()
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert all(any(one.startswith(name) for one in needed) for name in machine.NEEDED)


def test_a_wrong_sum_and_a_failed_run_are_bad(made):
    figures = {"mib": 1.0, "seconds": 0.5, "gigabytes_per_s": 2.0}
    run = made("wrong", records=[record(0, loss=1.0, metrics=figures)])
    assert [one.state for one in measured(run, 0)] == ["good", BAD]
    culprit = {"rank": 1, "node": "n1", "cause": "no route", "log_tail": []}
    failed = made("failed", ended=result(state="failed", culprit=culprit))
    [found] = measured(failed, 1)
    assert (found.state, "no route" in found.found) == (BAD, True)


def test_here_it_sums_on_two_pretended_nodes(tmp_path):
    asked = ("--run", "--json", "cluster.ranks_per_node=1", f"run.dir={tmp_path / 'run'}")
    done = call("doctor", *asked, module="orchestrator")
    told = json.loads(done.stdout)
    assert done.returncode == any(one["state"] == BAD for one in told), done.stderr
    assert [one["state"] for one in told if one["about"] == "collective"] == ["good"] * 2, told
    nodes = [one["found"].partition(":")[0] for one in told if one["about"] == "nodes"]
    assert nodes == ["node0", "node1"]
    assert all(one["do"] for one in told if one["state"] == BAD)
