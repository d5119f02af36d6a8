"""The built-in trackers pass the suite of trackers, each read back by its own package."""

import json
import os
import struct
from itertools import groupby

import psutil
import pytest

from orchestrator.config.composer import compose
from orchestrator.config.reading import to_yaml
from orchestrator.engine.common import waiting
from orchestrator.errors import ConfigError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import EXIT_CODES, State
from orchestrator.runs.start import prepare
from orchestrator.testing import TrackerSuite
from orchestrator.trainer.recorder import Scalars, check_tracker
from tests.helpers import SMALL, TINY, await_exit, begin, call, records, verb
from tests.hold import Hold, request_stop

pytestmark = pytest.mark.whole_runs


class TestTensorBoard(TrackerSuite):
    @pytest.fixture
    def tracker(self):
        return ["tracker=tensorboard"]

    def read(self, run):
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event

        for path in sorted(run.tensorboard.iterdir()):
            for raw in RawEventFileLoader(str(path)).Load():
                event = Event.FromString(raw)
                if event.summary.value:
                    yield event.step, {one.tag: one.simple_value for one in event.summary.value}


class TestMLflow(TrackerSuite):
    @pytest.fixture
    def tracker(self):
        return ["tracker=mlflow"]

    def read(self, run):
        client, found = _mlflow_run(run)
        metrics = [
            m
            for key in found.data.metrics
            for m in client.get_metric_history(found.info.run_id, key)
        ]
        written = sorted(metrics, key=lambda one: (one.timestamp, one.step))
        for (_, step), values in groupby(written, key=lambda one: (one.timestamp, one.step)):
            yield step, {one.key: one.value for one in values}


def _mlflow_run(run):
    """Return MLflow's client and its only run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=run.mlflow.as_uri())
    [experiment] = [e for e in client.search_experiments() if e.name == "orchestrator"]
    [found] = client.search_runs([experiment.experiment_id])
    return client, found


class TestWandB(TrackerSuite):
    @pytest.fixture
    def tracker(self):
        return ["tracker=wandb"]

    def read(self, run):
        for path in sorted(run.wandb.rglob("*.wandb")):
            for record in _records(path.read_bytes()):
                row = {i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
                values = {key: value for key, value in row.items() if not key.startswith("_")}
                if values:
                    yield values.pop("update"), values


def _records(data):
    """Of a file of theirs: blocks of 32 KiB, of records with their length and kind before them."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            yield Record.FromString(record)
            record = b""


@pytest.mark.parametrize("kind", ["mlflow", "wandb"])
def test_without_its_package_a_tracker_is_refused_with_what_to_install(kind, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install [\w-]+, or tracker"):
        check_tracker(kind)


def test_without_its_package_the_default_tracker_is_left_out_with_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check_tracker("tensorboard")
    with pytest.warns(UserWarning, match=r"tracker\.kind=tensorboard.*pip install tensorboard"):
        scalars = Scalars(RunDir(tmp_path), compose([TINY]))
    scalars.write(0, {"train/loss": 1.0})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["tracker.options.rate=1", "tracker.options.urii=x"])
def test_an_option_that_a_tracker_does_not_have_is_refused_before_the_run(option):
    config = compose(["tracker=mlflow" if "uri" in option else "tracker=tensorboard", option])
    with pytest.raises(ConfigError, match=r"there is no key 'tracker\.options"):
        prepare(config)


def test_a_server_that_does_not_answer_is_a_warning(run, monkeypatch):
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    config = compose(["tracker=mlflow", "tracker.options.uri=http://127.0.0.1:9"])
    run.write_config(to_yaml(config))
    with pytest.warns(UserWarning, match="tracker=mlflow could not start"):
        Scalars(run, config).write(0, {"train/loss": 0.5})
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2", "by default it tries for minutes"


def test_a_tracker_that_blocks_is_declared_so_that_it_ends_no_training(run, monkeypatch):
    from orchestrator.trainer import trackers

    activities = []
    for name in ("__init__", "write", "close"):
        monkeypatch.setattr(
            trackers.TensorBoard, name, lambda *_: activities.append(waiting.declared_activity())
        )
    scalars = Scalars(run, compose([TINY, "tracker=tensorboard"]))
    scalars.write(0, {"train/loss": 0.5})
    scalars.close(State.FINISHED)
    assert activities == ["it waits for its tracker"] * 3


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
    assert [values for _, values in TestMLflow().read(run)] == [{"train/loss": 0.5}]


@pytest.mark.parametrize("failing", [0, 1])
def test_mlflow_has_all_updates_of_a_failed_run_and_how_each_attempt_ended(
    tmp_path, failing, monkeypatch
):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = RunDir(tmp_path / "run")

    def mlflow_has():
        client, found = _mlflow_run(run)
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
    codes = [r.exit.exit_code for r in _records(path.read_bytes()) if r.HasField("exit")]
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
    losses = [v["train/loss"] for _, v in TestWandB().read(run) if "train/loss" in v]
    assert losses == [record["loss"] for record in records(run.path)]
    services = [p for p in psutil.process_iter(["name", "cwd"]) if "wandb" in p.info["name"]]
    assert [p for p in services if p.info["cwd"] == str(tmp_path)] == []
