"""MLflow and Weights & Biases, each read back by its own package."""

import os

import psutil
import pytest

from orchestrator.config.composer import compose
from orchestrator.config.reading import to_yaml
from orchestrator.errors import ConfigError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import EXIT_CODES, State
from orchestrator.runs.start import prepare
from orchestrator.trainer.recorder import Scalars, check_tracker
from tests.helpers import SMALL, TINY, await_exit, begin, call, records, verb
from tests.hold import Hold, request_stop
from tests.trackers.readers import mlflow_run, mlflow_scalars, wandb_records, wandb_scalars

pytestmark = pytest.mark.whole_runs


@pytest.mark.parametrize("kind", ["mlflow", "wandb"])
def test_tracker_without_its_package_is_refused(kind, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install [\w-]+, or tracker"):
        check_tracker(kind)


def test_unknown_mlflow_option_is_refused():
    config = compose(["tracker=mlflow", "tracker.options.urii=x"])
    with pytest.raises(ConfigError, match=r"there is no key 'tracker\.options"):
        prepare(config)


def test_a_server_that_does_not_answer_is_a_warning(run, monkeypatch):
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    config = compose(["tracker=mlflow", "tracker.options.uri=http://127.0.0.1:9"])
    run.write_config(to_yaml(config))
    with pytest.warns(UserWarning, match="tracker=mlflow could not start"):
        Scalars(run, config).write(0, {"train/loss": 0.5})
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2", "by default it tries for minutes"


def test_runs_that_begin_together_share_the_experiment_in_mlflow(run, monkeypatch):
    from mlflow.tracking import MlflowClient

    config = compose(["tracker=mlflow", f"run.dir={run.path}"])
    run.write_config(to_yaml(config))
    Scalars(run, config).close(State.FINISHED)
    find, found = MlflowClient.get_experiment_by_name, []

    def too_early(self, name):
        found.append(find(self, name) if found else None)
        return found[-1]

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", too_early)
    scalars = Scalars(run, config)
    scalars.write(0, {"train/loss": 0.5})
    scalars.close(State.FINISHED)
    assert [values for _, values in mlflow_scalars(run)] == [{"train/loss": 0.5}]


@pytest.mark.parametrize("failing", [0, 1])
def test_mlflow_has_all_updates_of_a_failed_run_and_how_each_attempt_ended(
    tmp_path, failing, monkeypatch
):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = RunDir(tmp_path / "run")

    def mlflow_has():
        client, found = mlflow_run(run)
        history = client.get_metric_history(found.info.run_id, "train/loss")
        return found.info.status, [one.step for one in history]

    hold = Hold(tmp_path / "hold")
    call(
        TINY,
        SMALL,
        "tracker=mlflow",
        "train.updates=12",
        "train.checkpoint_every=2",
        "job.fault=raise",
        f"job.fault_rank={failing}",
        "job.fault_after=21",
        hold.override,
        f"run.dir={run.path}",
        "-q",
        cwd=tmp_path,
        code=1,
    )
    assert mlflow_has() == ("FAILED", [record["update"] for record in records(run.path)])
    hold.hold_before(6)
    resumed = begin("resume", run.path, module="orchestrator", cwd=tmp_path)
    hold.wait_until_held(6, [failing])
    assert mlflow_has()[0] == "RUNNING"
    request_stop(run.path, lambda: verb("cancel", run.path, code=0))
    hold.release()
    await_exit(resumed, 3)
    stopped = [record["update"] for record in records(run.path)]
    assert mlflow_has() == ("KILLED", stopped)
    assert len(stopped) > 6, stopped


@pytest.mark.parametrize("state", [State.FINISHED, State.STOPPED, State.FAILED])
def test_weights_and_biases_has_the_exit_code(run, state):
    config = compose(["tracker=wandb", f"run.dir={run.path}"])
    run.write_config(to_yaml(config))
    Scalars(run, config).close(state)
    [path] = run.wandb.rglob("*.wandb")
    codes = [r.exit.exit_code for r in wandb_records(path.read_bytes()) if r.HasField("exit")]
    assert codes == [EXIT_CODES[state]]


def test_a_run_is_tracked_and_leaves_no_process(tmp_path):
    run = RunDir(tmp_path / "run")
    call(
        TINY,
        SMALL,
        "tracker=wandb",
        "train.updates=3",
        f"run.dir={run.path}",
        "-q",
        cwd=tmp_path,
        code=0,
    )
    losses = [v["train/loss"] for _, v in wandb_scalars(run) if "train/loss" in v]
    assert losses == [record["loss"] for record in records(run.path)]
    services = [p for p in psutil.process_iter(["name", "cwd"]) if "wandb" in p.info["name"]]
    assert [p for p in services if p.info["cwd"] == str(tmp_path)] == []
