"""What MLflow and Weights & Biases have of a run, read by their own packages."""

import json
import struct
from itertools import groupby


def mlflow_scalars(run):
    """Yield the step and the values of each write, in their order."""
    client, found = mlflow_run(run)
    metrics = [
        m for key in found.data.metrics for m in client.get_metric_history(found.info.run_id, key)
    ]
    written = sorted(metrics, key=lambda one: (one.timestamp, one.step))
    for (_, step), values in groupby(written, key=lambda one: (one.timestamp, one.step)):
        yield step, {one.key: one.value for one in values}


def mlflow_run(run):
    """Return MLflow's client and its only run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=run.mlflow.as_uri())
    [experiment] = [e for e in client.search_experiments() if e.name == "orchestrator"]
    [found] = client.search_runs([experiment.experiment_id])
    return client, found


def wandb_scalars(run):
    """Yield the step and the values of each write, in their order."""
    for path in sorted(run.wandb.rglob("*.wandb")):
        for record in wandb_records(path.read_bytes()):
            row = {i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
            values = {key: value for key, value in row.items() if not key.startswith("_")}
            if values:
                yield values.pop("update"), values


def wandb_records(data):
    """Yield the records of a file: blocks of 32 KiB, of records after their length and kind."""
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
