"""A run folder cannot bring a slurm.conf of its own: it could name code for squeue to load."""

import pytest

from orchestrator.clusters.slurm.cluster import SlurmCluster
from orchestrator.clusters.slurm.trust import is_trusted, remember
from orchestrator.config.composer import compose
from orchestrator.errors import ClusterError, RunFolderError
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.runs.status import statuses
from tests.programs import script
from tests.refusals import mentions, refused
from tests.run_folders import make_run


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return tmp_path / "home"


def placed(run, conf, job_id="7"):
    handle = {"kind": "slurm", "job_id": job_id, "attempt": 0, "slurm_conf": str(conf)}
    write_json(run.handle, handle)
    return run


def test_status_runs_nothing_with_a_slurm_conf_that_only_a_run_names(home, tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    (tmp_path / "bin").mkdir()
    for name in ("squeue", "sacct", "scontrol"):
        script(tmp_path / "bin", f"#!/bin/sh\necho $SLURM_CONF >> {ran}\n", name, run=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    run = make_run(tmp_path / "run")
    conf = run.path / "slurm.conf"
    conf.write_text("PluginDir=/tmp/evil\n")
    for path in (conf, "run/slurm.conf", "~/slurm.conf", "/dev/zero", "/proc/self/environ"):
        [found], sentences = statuses([placed(run, path)])
        assert not ran.exists()
        assert found.state == "unknown"
        assert mentions(sentences[0], f"{run.path} {path} SLURM_CONF={path}"), sentences[0]
    remember(str(conf))
    statuses([placed(run, conf)])
    assert set(ran.read_text().split()) == {str(conf)}


def test_a_slurm_conf_is_trusted_if_it_is_the_users_own(home, tmp_path, monkeypatch):
    conf, other = tmp_path / "slurm.conf", tmp_path / "other.conf"
    for path in (conf, other):
        path.write_text("ClusterName=x\n")
    assert not is_trusted(conf)
    monkeypatch.setenv("SLURM_CONF", str(conf))
    assert is_trusted(conf)
    assert not is_trusted(other)
    remember(str(other))
    assert is_trusted(other)
    assert (home / ".orchestrator" / "slurm_confs").stat().st_mode & 0o777 == 0o600
    other.chmod(0o666)
    assert not is_trusted(other)


@pytest.mark.parametrize("job_id", ["--user=me", "7;8", "7,8", "-1", "", " 7", "7\n"])
def test_a_job_id_that_is_none_never_becomes_a_word_for_scancel(home, tmp_path, job_id):
    run = placed(make_run(tmp_path / "run"), "/etc/hostname", job_id)
    with refused(RunFolderError, f"{run.handle} {job_id!r}"):
        RunDir(run.path).read_handle()


def test_a_resume_remembers_a_typed_slurm_conf_and_uses_none_of_the_folders(home, tmp_path):
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\n")
    config = compose(["+cluster=slurm", f"cluster.slurm_conf={conf}"])
    with refused(ClusterError, f"{tmp_path / 'run'} {conf} SLURM_CONF={conf}"):
        SlurmCluster(config).trust(make_run(tmp_path / "run"), typed=())
    SlurmCluster(config).trust(make_run(tmp_path / "another"), typed={"cluster.slurm_conf"})
    assert is_trusted(conf)
