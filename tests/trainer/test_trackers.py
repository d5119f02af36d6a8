"""The built-in trackers pass the suite of trackers, each read back by its own package."""

import json
import struct
from itertools import groupby

import psutil
import pytest

from orchestrator.cli.start import prepare
from orchestrator.config.composer import compose
from orchestrator.config.reading import to_yaml
from orchestrator.errors import ConfigError
from orchestrator.rundir.folder import RunDir
from orchestrator.testing import TrackerSuite
from orchestrator.trainer.recorder import Scalars, check_tracker
from tests.helpers import SMALL, TINY, call, records


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
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=run.mlflow.as_uri())
        [experiment] = [e for e in client.search_experiments() if e.name == "orchestrator"]
        [found] = client.search_runs([experiment.experiment_id])
        metrics = [m for key in found.data.metrics
                for m in client.get_metric_history(found.info.run_id, key)]  # fmt: skip
        written = sorted(metrics, key=lambda one: (one.timestamp, one.step))
        for (_, step), values in groupby(written, key=lambda one: (one.timestamp, one.step)):
            yield step, {one.key: one.value for one in values}


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


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])
def test_without_its_package_a_tracker_is_refused_with_what_to_install(kind, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install [\w-]+, or tracker"):
        check_tracker(kind)


@pytest.mark.parametrize("option", ["tracker.options.rate=1", "tracker.options.urii=x"])
def test_an_option_that_a_tracker_does_not_have_is_refused_before_the_run(option):
    config = compose(["tracker=mlflow" if "uri" in option else "tracker=tensorboard", option])
    with pytest.raises(ConfigError, match=r"there is no key 'tracker\.options"):
        prepare(config)


def test_a_server_that_does_not_answer_is_a_warning(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config = compose(["tracker=mlflow", "tracker.options.uri=http://127.0.0.1:9"])
    run.write_config(to_yaml(config))
    with pytest.warns(UserWarning, match="tracker=mlflow could not start"):
        Scalars(run, config).write(0, {"train/loss": 0.5})


def test_a_run_is_tracked_and_leaves_no_process(tmp_path):
    run = RunDir(tmp_path / "run")
    call(
        TINY, SMALL, "tracker=wandb", "train.updates=3", f"run.dir={run.path}", "-q",
        cwd=tmp_path, code=0,
    )  # fmt: skip
    losses = [v["train/loss"] for _, v in TestWandB().read(run) if "train/loss" in v]
    assert losses == [record["loss"] for record in records(run.path)]
    services = [p for p in psutil.process_iter(["name", "cwd"]) if "wandb" in p.info["name"]]
    assert [p for p in services if p.info["cwd"] == str(tmp_path)] == []
