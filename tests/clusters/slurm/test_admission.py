"""Requests that a scheduler could never run, by its own answers. Nothing is started."""

import getpass
import os
import resource

import pytest

from orchestrator.clusters.api import Admission, cluster_of
from orchestrator.clusters.slurm import cluster as slurm_cluster
from orchestrator.clusters.slurm.admission import (
    check_request,
    misfit,
    preempt_grace_s,
    read_partitions,
)
from orchestrator.clusters.slurm.scheduler import Answer
from orchestrator.config.composer import compose
from orchestrator.errors import ClusterError, ConfigError
from tests.programs import script
from tests.refusals import mentions, refused

PARTITIONS = (
    "PartitionName=main AllowGroups=ALL Default=YES GraceTime=0 MaxNodes=UNLIMITED "
    "MaxTime=UNLIMITED PreemptMode=OFF State=UP TotalNodes=4\n"
    "PartitionName=low Default=NO GraceTime=20 MaxNodes=2 DefaultTime=1:00:00 MaxTime=1-00:00:00 "
    "PreemptMode=REQUEUE State=UP TotalNodes=4\n"
    "PartitionName=old Default=NO GraceTime=0 MaxNodes=UNLIMITED MaxTime=30:00 PreemptMode=OFF "
    "State=DOWN TotalNodes=4\n"
    "PartitionName=shut Default=NO GraceTime=0 MaxNodes=UNLIMITED MaxTime=UNLIMITED "
    "PreemptMode=OFF State=DRAIN TotalNodes=4\n"
)


def test_what_a_partition_never_gives_is_found_although_slurm_would_take_it():
    found = read_partitions(PARTITIONS)
    assert misfit(found["low"], 2, None) is None
    assert mentions(misfit(found["low"], 3, None), "cluster.nodes=3 low 2")
    assert mentions(
        misfit(found["low"], 1, 1441), "cluster.time_min=1441 low cluster.time_min=1440"
    )
    assert misfit(found["main"], 4, 10**6) is None
    assert misfit(found["old"], 1, None) is None  # it is down, not closed: a job waits there
    assert mentions(misfit(found["shut"], 1, None), "partition shut jobs")


class Client:
    """Answers as sacctmgr, one table for associations and one for qos; after a site's banner."""

    def __init__(self, *qualities, default="", banner=""):
        self.tables = {"assoc": [f"{getpass.getuser()}|{default}"], "qos": qualities}
        self.banner = banner

    def run(self, *command, **_):
        rows = "".join(f"{row}\n" for row in self.tables[command[3]])
        return Answer(0, f"{self.banner}{rows}", "")


BY_PARTITION, BY_QOS = "preempt/partition_prio", "preempt/qos"
# As sacctmgr prints Name, GraceTime and Preempt.
BANNER = "*** maintenance on Monday ***\nask | the help desk\n\n"
QUALITIES = ("normal|00:00:00|", "low|00:00:15|", "high|00:00:00|low,scavenge")


@pytest.mark.parametrize(
    ("kind", "mode", "qos", "client", "grace"),
    [
        (BY_PARTITION, "REQUEUE", None, Client(), 20),
        (BY_PARTITION, "GANG,SUSPEND", None, Client(), None),  # it continues later
        ("preempt/none", "REQUEUE", "low", Client(*QUALITIES), None),
        (BY_QOS, "REQUEUE", "low", Client(*QUALITIES), 15),
        (BY_QOS, "REQUEUE", "normal", Client(*QUALITIES), None),
        (BY_QOS, "REQUEUE", None, Client(*QUALITIES, default="low"), 15),
        (BY_QOS, "REQUEUE", None, Client(*QUALITIES), None),
        (BY_QOS, "REQUEUE", "low", Client(), None),
        (BY_QOS, "REQUEUE", "low", Client(*QUALITIES, banner=BANNER), 15),
        (BY_QOS, "REQUEUE", None, Client(*QUALITIES, banner=BANNER, default="low"), 15),
    ],
)
def test_the_notice_of_a_preemption_is_the_partitions_or_the_qos(kind, mode, qos, client, grace):
    known = read_partitions(PARTITIONS.replace("PreemptMode=REQUEUE", f"PreemptMode={mode}"))
    settings = {"PreemptType": kind}
    assert preempt_grace_s(client, settings, qos, [known["low"]]) == grace


class Scheduler:
    """Answers as sbatch and scontrol; "low" is where the site places jobs."""

    def __init__(self, code, words):
        self.answer = Answer(code, "", words)

    def run(self, *command, **_):
        assert command == ("sbatch", "--test-only")
        return self.answer

    def check_output(self, *command):
        return PARTITIONS

    def settings(self):
        return {"KillWait": "3 sec"}


TAKEN = "Job 1 to start at 2026-11-22T05:56:20 using 2 processors on nodes n[0-1] in partition low"


def test_a_job_is_held_to_the_limits_of_the_partition_that_the_site_places_it_in():
    client = Scheduler(0, f"sbatch: jobs of this site go to low\nsbatch: {TAKEN}\n")
    admitted = check_request(client, {"partition": "old", "time": "60"}, 2, "")
    assert admitted.message == TAKEN
    [warning] = admitted.warnings
    assert warning.endswith(": jobs of this site go to low")
    assert admitted.notice == {"preempt_grace_s": 20, "kill_wait_s": 3, "time_limit_s": 3600}
    with refused(ClusterError, "cluster.nodes=3 low 2"):
        check_request(client, {"partition": "main"}, 3, "")


def test_a_job_that_cannot_be_placed_now_waits_or_is_refused_if_it_names_what_is_not_there():
    client = Scheduler(1, "sbatch: error: no nodes")
    assert mentions(check_request(client, {}, 1, "").warnings[0], "(sbatch: error: no nodes)")
    with refused(ClusterError, "cluster.nodes=5 main 4"):
        check_request(client, {}, 5, "")
    with refused(ClusterError, "cluster.partition=mian 'main'"):
        check_request(client, {"partition": "mian"}, 1, "")


@pytest.mark.parametrize(
    "words",
    [
        "sbatch: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.",
        "sbatch: unrecognized option '--foo=1'",
        "sbatch: error: Invalid --mail-type specification",
        "allocation failure: Invalid license specification",
        "allocation failure: Job dependency problem",
    ],
)
def test_a_wrong_option_is_refused_without_advice_on_waiting(words):
    with refused(ClusterError, words) as caught:
        check_request(Scheduler(1, words), {}, 1, "")
    assert str(caught.value).endswith(f": {words}")


@pytest.mark.parametrize(
    ("limit", "ahead_s", "notice_s", "advice"),
    [
        ("cluster.time_min=10", 600, 300, "10 min 300 s cluster.time_min"),
        ("cluster.time_min=2", 60, 60, "2 min 60 s cluster.time_min"),
        ("cluster.time_min=3", 60, 60, None),
        ("cluster.partition=low", 3600, 3600, "cluster.signal_ahead_s=1800 cluster.time_min=60"),
        ("cluster.partition=low", 1799, 1799, None),
        ("cluster.partition=main", 65535, 65535, None),
    ],
)
def test_a_notice_is_half_of_the_time_limit_at_most(
    monkeypatch, tmp_path, limit, ahead_s, notice_s, advice
):
    scheduler = Scheduler(1, "no nodes")
    monkeypatch.setattr(slurm_cluster.SlurmCluster, "client", lambda _: scheduler)
    monkeypatch.setattr(slurm_cluster, "_answers", {})
    no_time = [] if "time_min" in limit else ["cluster.time_min=null"]
    words = ["+cluster=slurm", limit, *no_time, f"cluster.signal_ahead_s={ahead_s}"]
    cluster = cluster_of(compose(words))
    request = cluster.request(tmp_path / "run", 0)
    assert f"#SBATCH --signal=USR2@{notice_s}\n" in request.text
    warnings = [w for w in cluster.check(request).warnings if "signal_ahead_s" in w]
    assert len(warnings) == bool(advice)
    names = f"cluster.signal_ahead_s={ahead_s} {advice}"
    assert all(mentions(warning, names) for warning in warnings), warnings


def test_a_limit_of_addresses_that_slurm_would_give_to_the_ranks_is_warned_of(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(slurm_cluster, "check_request", lambda *_: Admission())
    monkeypatch.setattr(slurm_cluster, "_answers", {})

    def warnings(*overrides):
        cluster = cluster_of(compose(["+cluster=slurm", *overrides]))
        return cluster.check(cluster.request(tmp_path / "run", 0)).warnings

    before = resource.getrlimit(resource.RLIMIT_AS)
    assert not any("ulimit -v" in warning for warning in warnings())
    resource.setrlimit(resource.RLIMIT_AS, (1 << 46, before[1]))
    try:
        assert "cluster.slurm_flags.propagate=NONE" in " ".join(warnings())
        assert not any("ulimit" in w for w in warnings("cluster.slurm_flags.propagate=NONE"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("variable", ["SLURM_CLUSTERS", "SBATCH_CLUSTERS"])
def test_a_variable_that_names_another_cluster_is_refused(monkeypatch, tmp_path, variable):
    monkeypatch.setattr(slurm_cluster, "check_request", lambda *_: Admission())
    monkeypatch.setattr(slurm_cluster, "_answers", {})
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # no warnings of other variables
    text = "#!/bin/sh\necho 'ClusterName = here'\n"
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin", text, "scontrol", run=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)

    def check(names, *overrides):
        monkeypatch.setenv(variable, names)
        cluster = cluster_of(compose(["+cluster=slurm", *overrides]))
        return cluster.check(cluster.request(tmp_path / "run", 0))

    with refused(ClusterError, f"{variable}=there here -M cluster.slurm_conf {variable}"):
        check("there")
    assert check("here") == check("there,here") == check("")
    (conf := tmp_path / "slurm.conf").touch()
    check("there", f"cluster.slurm_conf={conf}")


def test_a_persons_variables_for_sbatch_that_decide_nothing_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(slurm_cluster, "check_request", lambda *_: Admission())
    monkeypatch.setattr(slurm_cluster, "_answers", {})
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SBATCH_TIMELIMIT", "5")
    cluster = cluster_of(compose(["+cluster=slurm"]))
    [warning] = cluster.check(cluster.request(tmp_path / "run", 0)).warnings
    assert mentions(warning, "SBATCH_TIMELIMIT cluster.slurm_flags.OPTION")


@pytest.mark.parametrize(
    ("given", "framework", "way"),
    [
        (["cluster.gpus_per_node=4"], "torch", "cluster.ranks_per_node=4 transport=gloo"),
        (["cluster.gpus_per_node=a100:4", "transport=nccl"], None, "transport=gloo"),
        (["cluster.gpus_per_node=4", "transport=gloo"], "torch", None),
        (["cluster.gpus_per_node=8"], "torch", None),
        ([], "torch", None),
    ],
)
def test_fewer_gpus_than_ranks_on_a_node_are_refused_before_the_queue(given, framework, way):
    config = compose(["+cluster=slurm", "cluster.ranks_per_node=8", *given])
    if way is None:
        cluster_of(config).refuse(framework)
        return
    with refused(ConfigError, f"{given[0]} 8 ranks cluster.ranks_per_node GPU {way}") as caught:
        cluster_of(config).refuse(framework)
    assert str(caught.value).endswith(way.rpartition(" ")[2])
