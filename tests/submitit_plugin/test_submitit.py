"""An unmodified script of submitit on simulated nodes, and the plug-in by itself."""

import os
import signal
import sys
import threading

import psutil
import pytest
from submitit import AutoExecutor
from submitit.core import plugins
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import TorchDistributedEnvironment

from orchestrator import submitit_plugin
from orchestrator.agent.node_spec import publish_agent
from orchestrator.clusters.api import cluster_of
from orchestrator.config.composer import compose
from orchestrator.errors import ClusterError, ConfigError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.program_link import ATTEMPT, RUN
from orchestrator.submitit_plugin import VARIABLE, OrchestratorExecutor, _is_followed
from tests.agent.specs import node_spec
from tests.helpers import verb
from tests.submitit_plugin.script_runs import check, run_script

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]


@pytest.fixture(autouse=True)
def plugins_by_this_environment():
    """Let submitit ask for the executors' names anew, which it keeps for the process."""
    plugins.get_executors.cache_clear()
    yield
    plugins.get_executors.cache_clear()


def test_an_unmodified_script_runs_on_simulated_nodes(tmp_path):
    logs = tmp_path / "logs of %j"
    check(run_script(logs, "local"), tmp_path)
    causes = "ValueError: nothing can be done", "OSError: no room for a checkpoint"
    found = verb("status", *tmp_path.glob("logs of */*_run")).stdout
    assert [found.count(cause) for cause in causes] == [1, 1]


def test_the_executor_takes_the_place_of_submitit_s_own_only_when_asked_for(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (OrchestratorExecutor.name(), OrchestratorExecutor.affinity()) == ("orchestrator", 0)
    monkeypatch.setenv(VARIABLE, "local")
    assert OrchestratorExecutor.name() == "slurm"


@pytest.mark.parametrize(
    ("parameters", "instead"),
    [
        ({"gpus_per_task": 1}, "gpus_per_node"),
        ({"cpus_per_gpu": 1}, "cpus_per_task"),
        ({"teardown": ["rm x"]}, "the function itself"),
        ({"srun_args": ["--mpi=pmix"]}, "cluster.srun_flags"),
        ({"use_srun": False}, "agents start the ranks"),
        ({"mem": "0"}, "as in mem='16G'"),
    ],
)
def test_parameters_that_have_no_meaning_here_are_refused(parameters, instead, tmp_path):
    with pytest.raises(ValueError, match=instead):
        OrchestratorExecutor(tmp_path).update_parameters(**parameters)


def asked_for(auto, folder):
    """Return the configuration of an executor's next job, and its batch script."""
    config = compose(auto._executor._overrides())
    return config, cluster_of(config).request(folder / "run", 0).text


def test_memory_and_flags_are_asked_for_as_sbatch_would_have_them(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "slurm cluster.account=mine")
    auto = AutoExecutor(tmp_path)
    auto.update_parameters(
        mem_gb=1.5,
        timeout_min=90,
        nodes=2,
        tasks_per_node=4,
        gpus_per_node=4,
        cpus_per_task=3,
        slurm_partition="gpu",
        slurm_comment="two words",
        slurm_signal_delay_s=120,
        slurm_setup=["module load cuda"],
        slurm_additional_parameters={"mail-type": "FAIL"},
        slurm_stderr_to_stdout=True,
    )
    config, text = asked_for(auto, tmp_path)
    for flag in (
        "--mem=1536M",
        "--time=90",
        "--nodes=2",
        "--gpus-per-node=4",
        "--partition=gpu",
        "--comment='two words'",
        "--mail-type=FAIL",
        "--account=mine",
    ):
        assert f"#SBATCH {flag}\n" in text, flag
    assert "module load cuda\n" in text
    assert "STDERR_TO_STDOUT=1" in text
    assert (config.cluster.ranks_per_node, config.cluster.cpus_per_rank) == (4, 3)
    assert config.cluster.signal_ahead_s == 120


@pytest.mark.parametrize("memory", ["16G", "16GB", 16 * 1024, "16777216K"])
def test_memory_has_the_units_of_sbatch(memory, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "slurm")
    auto = AutoExecutor(tmp_path)
    auto.update_parameters(
        slurm_mem=memory, slurm_additional_parameters={"contiguous": True, "mail_type": "END"}
    )
    _, text = asked_for(auto, tmp_path)
    for flag in ("--mem=16384M", "--contiguous", "--mail-type=END"):
        assert f"#SBATCH {flag}\n" in text, flag


@pytest.mark.parametrize(
    ("parameters", "words"),
    [({"array_parallelism": 2}, "a job of its own"), ({"setup": ["true"]}, "is not run on")],
)
def test_parameters_without_effect_are_warned_of(parameters, words, tmp_path):
    with pytest.warns(UserWarning, match=words):
        OrchestratorExecutor(tmp_path).update_parameters(**parameters)


def test_a_time_limit_of_slurms_forms_is_the_one_that_was_typed(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "slurm")
    executor = OrchestratorExecutor(tmp_path)
    executor.update_parameters(time="4:00:00")
    assert "cluster.time_min=240" in executor._overrides()
    executor.update_parameters(time="4h")
    with pytest.raises(ConfigError, match="slurm_time is a time limit"):
        executor._overrides()


def test_both_streams_go_to_one_log_where_that_is_asked_for(tmp_path):
    executor = OrchestratorExecutor(tmp_path)
    executor.update_parameters(stderr_to_stdout=True)
    job = executor.submit(print_to_both)
    job.wait()
    assert "out\nerr\n" in job.stdout()


def test_a_function_starts_again_if_a_rank_is_killed_and_the_others_raise_for_it(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(VARIABLE, "local run.max_restarts=1")
    executor = OrchestratorExecutor(tmp_path)
    executor.update_parameters(ntasks_per_node=2)
    job = executor.submit(end_rank_1_once, tmp_path / "mark")
    assert job.results() == [2.0, 2.0]
    assert (job.run / "attempts" / "001").is_dir()


def end_rank_1_once(mark):
    import torch
    import torch.distributed as dist

    place = TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    if place.rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_an_error_like_a_lost_peers_is_the_result_once_nothing_starts_again(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "local run.max_restarts=1")
    job = OrchestratorExecutor(tmp_path).submit(lose_connection)
    with pytest.raises(FailedJobError, match="reset by peer"):
        job.result()
    assert (job.run / "attempts" / "001").is_dir()


def lose_connection():
    raise ConnectionResetError(104, "Connection reset by peer")


def print_to_both():
    print("out", flush=True)
    print("err", file=sys.stderr)


@pytest.mark.parametrize(
    ("folder", "work", "error", "words"),
    [
        ("%A_%a", [1, 2], ValueError, r"%a has no value here.*use %j"),
        ("", [1, threading.Lock()], TypeError, "pickle"),
        ("", [1, "x" * 20_000], RuntimeError, "max_pickle_size_gb"),
        ("", [1, 2], FailedSubmissionError, "error: .*slurm"),
    ],
)
def test_a_refused_submission_leaves_nothing(monkeypatch, tmp_path, folder, work, error, words):
    monkeypatch.setenv(VARIABLE, "slurm cluster.slurm_conf=/nowhere/slurm.conf")
    executor = OrchestratorExecutor(tmp_path / folder, max_pickle_size_gb=1e-5)
    with pytest.raises(error, match=words):
        executor.map_array(print, work)
    assert not list(tmp_path.iterdir())


def test_another_python_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cluster\.container"):
        OrchestratorExecutor(tmp_path, python="singularity exec x python")


def test_a_thread_of_the_kernel_whose_pid_is_a_jobs_id_does_not_follow_that_job():
    threads = [p.pid for p in psutil.process_iter() if p.pid == 2 or p.ppid() == 2]  # kthreadd's
    assert not any(_is_followed(str(pid)) for pid in threads)


# ------------------------------------------------------------------ The plug-in


def test_a_run_that_cannot_be_cancelled_leaves_no_other_one_queued(tmp_path, monkeypatch, capsys):
    codes, cancelled = iter((0, 0, 2)), []

    def cancel(run, *, now):
        cancelled.append((run.path.name, now))
        if run.path.name == "a":
            raise ClusterError("the scheduler does not answer")

    monkeypatch.setattr("orchestrator.launch.main", lambda _: next(codes))
    monkeypatch.setattr("orchestrator.runs.cancel.cancel", cancel)
    runs = [tmp_path / name for name in "abc"]
    assert submitit_plugin.queue(tmp_path, runs, ["cluster=slurm"]) == 2
    assert cancelled == [("a", True), ("b", True)]
    assert "the scheduler does not answer" in capsys.readouterr().err


def test_a_rank_that_begins_before_the_first_nodes_agent_waits_for_its_address(
    tmp_path, monkeypatch
):
    run = RunDir(tmp_path)
    run.attempt(0).mkdir(parents=True)
    for name, value in ((RUN, tmp_path), (ATTEMPT, 0), ("SLURM_JOB_NODELIST", "nowhere[0-1]")):
        monkeypatch.setenv(name, str(value))
    later = threading.Timer(0.3, publish_agent, (node_spec(tmp_path), 1))
    later.start()
    submitit_plugin._name_first_node()
    later.join()
    assert os.environ["SLURM_JOB_NODELIST"] == "127.0.0.1,nowhere1"
