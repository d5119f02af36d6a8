"""Findings of `doctor` on machines, clusters, nodes and links."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

from orchestrator.health import doctor
from orchestrator.health.doctor import BAD, NOTE, node_faults, trial_findings
from orchestrator.health.exchange import NODES_FILE
from orchestrator.rundir.files import write_json
from tests import warm
from tests.helpers import ROOT, call
from tests.programs import script
from tests.run_folders import record, result

KIND = {
    "JobRequeue": "1",
    "AuthInfo": "cred_expire=5",
    "TaskPlugin": "task/cgroup",
    "ProctrackType": "proctrack/cgroup",
    "KillWait": "30 sec",
    "SLURM_VERSION": "22.05.8",
}
HURTFUL = {
    "JobRequeue": "0",
    "AuthInfo": "(null)",
    "TaskPlugin": "task/none",
    "ProctrackType": "proctrack/linuxproc",
    "KillWait": "5 sec",
}


@pytest.mark.parametrize("setting", HURTFUL)
def test_each_setting_that_hurts_is_told_with_what_to_do(setting):
    assert [one.remedy for one in doctor.from_settings(KIND)] == [""], (
        "a harmless one needs no action"
    )
    found = [one for one in doctor.from_settings({**KIND, setting: HURTFUL[setting]}) if one.remedy]
    assert len(found) == 1
    assert found[0].state in (NOTE, BAD)
    assert len(doctor.HURTFUL) == len(HURTFUL), "each has a row here"


def test_the_wait_of_a_requeued_job_is_called_normal():
    [wait] = [c for c in doctor.from_settings({**KIND, "AuthInfo": "(null)"}) if c.remedy]
    assert (wait.state, wait.remedy) == (NOTE, "nothing needs to be done: this is normal")


@pytest.mark.parametrize(
    ("limit", "harmless", "remedy"),
    [
        ("-v 40000000", "-v unlimited", "-v"),
        ("-n 512", "-n 1024", "-n"),
        ("-u 300", "-u 600", "-u"),
    ],
)
def test_limits_that_ranks_cannot_live_with_are_bad(limit, harmless, remedy):
    code = (
        "from orchestrator.health.doctor import BAD, limits\n"
        "print(*(c.remedy for c in limits() if c.state == BAD), sep='\\n')"
    )

    def remedies(set_limit):
        shell = f'ulimit -S {set_limit}; exec "$0" -c "$1"'
        words = ["bash", "-c", shell, sys.executable, code]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if f"ulimit -S {remedy}" in line]

    assert remedies(harmless) == []
    (line,) = remedies(limit)
    assert "cluster.slurm_flags.propagate=NONE" in line


def test_a_machine_without_slurm_gets_one_note(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    [found] = doctor.slurm()
    assert (found.state, "python -m slurm up" in found.remedy) == (NOTE, True)


def test_a_controller_that_does_not_answer_is_bad_and_said(monkeypatch, tmp_path):
    for name in doctor.COMMANDS:
        text = "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n"
        script(tmp_path, text, name, run=True)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    [found] = doctor.slurm()
    assert (found.state, "does not answer" in found.text, bool(found.remedy)) == (BAD, True, True)


def test_what_is_called_tested_is_what_the_tests_run_with():
    pins = dict(
        re.findall(r"^([\w-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    assert doctor.tested_versions().items() <= pins.items()
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert all(any(one.startswith(name) for one in needed) for name in doctor.NEEDED)


def test_a_wrong_sum_and_a_failed_run_are_bad(made):
    figures = {"mib": 1.0, "seconds": 0.5, "gigabytes_per_s": 2.0}
    run = made("wrong", records=[record(0, loss=1.0, metrics=figures)])
    assert [one.state for one in trial_findings(run, 0)] == ["good", BAD]
    run.begin_attempt()
    write_json(run.attempt(1) / NODES_FILE, {"nodes": [{"node": "n1", **WELL}], "damaged": []})
    assert [one.subject for one in trial_findings(run, 0)] == ["runs", "nodes", "collective"]
    culprit = {"rank": 1, "node": "n1", "cause": "no route", "log_tail": []}
    failed = made("failed", ended=result(state="failed", culprit=culprit))
    [found] = trial_findings(failed, 1)
    assert (found.state, "no route" in found.text) == (BAD, True)


def test_here_it_sums_on_two_simulated_nodes(tmp_path):
    own = tmp_path / "cluster" / "own.yaml"
    own.parent.mkdir()
    own.write_text("kind: local\nranks_per_node: 1\n")
    where = ("--config-dir", tmp_path, "+cluster=own", f"run.dir={tmp_path / 'run'}")
    asked = ("--run", "--json", *where)
    done = call("doctor", *asked, module="orchestrator")
    findings = json.loads(done.stdout)
    assert done.returncode == any(one["state"] == BAD for one in findings), done.stderr
    collectives = [one["state"] for one in findings if one["subject"] == "collective"]
    assert collectives == ["good"] * 2, findings
    nodes = [one["text"].partition(":")[0] for one in findings if one["subject"] == "nodes"]
    assert nodes == ["node0", "node1"]
    assert all(one["remedy"] for one in findings if one["state"] == BAD)


WELL = {
    "interface": "eth0",
    "address": "10.0.0.1",
    "memory": 1e10,
    "scratch": 1e10,
    "device_taken": 0.0,
    "clock_s": 0.0,
    "bytes_per_s": None,
}
LINKS = """
import json
import torch, torch.distributed as dist
from orchestrator.health.exchange import measure_links
dist.init_process_group("gloo")
if dist.get_rank() == 2:
    intact = dist.P2POp
    dist.P2POp = lambda op, data, peer: intact(op, data + 1 if op is dist.isend else data, peer)
rates, damaged = measure_links([0, 1, 2], torch.device("cpu"))
print(json.dumps([rates, damaged]))
dist.destroy_process_group()
"""


SUMS = """
import json
import torch, torch.distributed as dist
from orchestrator.health import exchange
dist.init_process_group("gloo")
intact, calls, answers = dist.all_reduce, [], []
def damaged(tensor):
    intact(tensor)
    calls.append(tensor)
    if dist.get_rank() == 1 and len(calls) == exchange.REPEATS + 2:
        tensor[len(tensor) // 2] += 1
dist.all_reduce = damaged
for _ in range(3):
    answers.append(exchange.measure_sum(1000, torch.device("cpu"))[1])
print(json.dumps(answers))
dist.destroy_process_group()
"""


def nodes(changes):
    return [{**WELL, "node": f"n{place}", **change} for place, change in enumerate(changes)]


@pytest.mark.parametrize(
    ("change", "words", "state"),
    [
        ({"memory": 1e6}, "of memory are free", BAD),
        ({"scratch": -1.0}, "(TMPDIR) cannot be written", BAD),
        ({"scratch": 1e6}, "(TMPDIR) has", BAD),
        ({"device_taken": 0.5}, "50% of a device's memory", NOTE),
        ({"clock_s": -60.0}, "its clock is -60.0 s off", NOTE),
        ({"bytes_per_s": 1e7}, "on eth0 (10.0.0.1)", NOTE),
    ],
)
def test_each_fault_names_its_node_and_how_to_exclude_it(change, words, state):
    (fault,) = node_faults(
        nodes([{"bytes_per_s": 1e9}, {"bytes_per_s": 1e9, **change}, {"bytes_per_s": 1e9}]), []
    )
    assert (fault.text.partition(":")[0], fault.state) == ("n1", state)
    assert words in fault.text
    assert "cluster.exclude=n1" in fault.remedy


def test_damaged_data_names_both_ends_and_sound_nodes_have_no_faults():
    (fault,) = node_faults(nodes([{}, {}, {}]), [("n2", "n0")])
    assert fault.state == BAD
    assert "n2: data that it sent to n0 came damaged" in fault.text


def test_all_ranks_measure_the_same_links_and_find_damaged_data(tmp_path):
    """Four ranks on three nodes: the fourth rank shares a node, and sends nothing."""
    (tmp_path / "links.py").write_text(LINKS)
    said = [json.loads(line) for line in warm.ranks("links", 4, tmp_path).splitlines()]
    assert len(said) == 4
    assert all(one == said[0] for one in said)
    rates, damaged = said[0]
    assert len(rates) == 3
    assert all(rate > 0 for rate in rates)
    assert damaged == [0], "node 2 sends other data than it has"


def test_one_wrong_element_of_one_rank_in_one_repeat_is_a_damaged_sum(tmp_path):
    script(tmp_path, SUMS, "sums.py")
    answers = [json.loads(line) for line in warm.ranks("sums", 2, tmp_path).splitlines()]
    assert answers == [[True, False, True]] * 2
