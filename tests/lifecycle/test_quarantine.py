"""Nodes that are in quarantine: who puts them in, for how long, and what submissions make of it."""

import os
import shlex
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from orchestrator.__main__ import app
from orchestrator.clusters.slurm.request.batch_script import Here, all_options, batch_script
from orchestrator.clusters.slurm.request.quarantined import told
from orchestrator.compose.composer import compose
from orchestrator.errors import RunFolderError, UsageError
from orchestrator.lifecycle import quarantine
from orchestrator.run_folder.rundir import RunDir

NAMES = st.sampled_from(["n1", "n2", "gpu-7.site"])
CLUSTERS = st.sampled_from([None, "/etc/slurm/other.conf"])
ACTS = st.lists(st.tuples(st.sampled_from(["add", "clear"]), NAMES, CLUSTERS), max_size=8)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".orchestrator" / "quarantine"


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.rglob("*")) if p.is_dir()}


@settings(max_examples=25, deadline=None)
@given(acts=ACTS)
def test_what_was_put_in_and_not_taken_out_is_in_by_cluster(tmp_path_factory, acts):
    before, os.environ["HOME"] = os.environ["HOME"], str(tmp_path_factory.mktemp("home"))
    mask = os.umask(0)
    try:
        there: set[tuple[str, str | None]] = set()
        for act, node, conf in acts:
            if act == "add":
                quarantine.add(node, "bad", slurm_conf=conf)
                there.add((node, conf))
            elif (node, conf) in there:
                quarantine.clear(node, slurm_conf=conf)
                there.remove((node, conf))
        assert {(e.node, e.cluster or None) for e in quarantine.of_all()} == there
        for conf in (None, "/etc/slurm/other.conf"):
            found = {entry.node for entry in quarantine.of_cluster(conf)}
            assert found == {node for node, of in there if of == conf}
        if there:
            assert modes(Path.home() / ".orchestrator") == {0o700}
    finally:
        os.umask(mask)
        os.environ["HOME"] = before


def test_who_was_put_in_for_an_hour_is_free_after_it(home, monkeypatch):
    entry = quarantine.add("n1", "bad", slurm_conf=None, hours=1)
    assert [e.node for e in quarantine.of_cluster(None)] == ["n1"]
    monkeypatch.setattr(quarantine.time, "time", lambda: entry.since + 3600.0)
    assert quarantine.of_cluster(None) == []


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"node": "n2"}', None])
def test_a_damaged_record_is_named_and_frees_nobody_in_silence(home, damage):
    quarantine.add("n1", "bad", slurm_conf=None)
    path = home / "slurm" / "n1.json"
    path.write_bytes(path.read_bytes().replace(b"bad", b"good") if damage is None else damage)
    with pytest.raises(RunFolderError, match=f"rm {path}"):
        quarantine.of_cluster(None)


@given(node=st.text(max_size=12) | st.from_regex(quarantine.NODE, fullmatch=True))
def test_no_name_of_a_node_means_more_than_itself_to_a_shell_or_to_slurm(node):
    try:
        quarantine.checked(node, 1.0)
    except UsageError:
        return
    assert shlex.quote(node) == node
    assert not set(node) & set("[], \n/")
    assert not node.startswith(("-", "."))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["add"], "needs the names of nodes"),
        (["add", "n1", "n[2-3]"], "'n[2-3]' is no node's name"),
        (["add", "n1", "--hours", "0"], "--hours must lie above 0"),
        (["add", "n1", "--hours", "nan"], "--hours must lie above 0"),
        (["clear", "n9"], "not in quarantine: n9"),
        (["clear"], "or --all"),
        (["clear", "n1", "--all"], "or --all"),
        (["list", "n1"], "quarantine add NODE"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_changes(home, words, said):
    done = CliRunner().invoke(app, ["quarantine", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert quarantine.of_all() == []


def test_people_put_nodes_in_and_take_them_out(home):
    run = CliRunner()
    done = run.invoke(app, ["quarantine", "add", "n1", "n2", "--reason", "it smokes", "--hours=2"])
    assert done.exit_code == 0, done.output
    assert "n2" in done.output
    assert "it smokes" in done.output
    assert run.invoke(app, ["quarantine", "clear", "n1"]).exit_code == 0
    assert [e.node for e in quarantine.of_all()] == ["n2"]
    assert run.invoke(app, ["quarantine", "clear", "--all"]).exit_code == 0
    assert quarantine.of_all() == []


def test_a_submission_leaves_them_out_beside_those_of_the_configuration(home, tmp_path):
    here = Here(python="python", folder=tmp_path, package=tmp_path, quarantined=("n1", "n2"))
    config, run = compose(["+cluster=slurm", "cluster.exclude=n[7-8]"]), RunDir(tmp_path)
    assert "#SBATCH --exclude='n[7-8],n1,n2'" in batch_script(config, run, 0, here).splitlines()
    assert all_options(config, run, here)["exclude"] == "n[7-8],n1,n2"
    config.cluster.exclude = None
    assert "#SBATCH --exclude=n1,n2" in batch_script(config, run, 0, here).splitlines()
    assert "--exclude" not in batch_script(config, run, 0, replace(here, quarantined=()))
    entry = quarantine.add("n1", "it smokes", slurm_conf="/etc/slurm/other.conf")
    (sentence,) = told([entry])
    assert "(it smokes)" in sentence
    assert "quarantine clear n1 --slurm-conf /etc/slurm/other.conf" in sentence
