"""MindSpore over MCCL: the flat reduction in buckets against one all-reduce for each tensor.

Two ranks; 16 tensors of 8.4 million numbers in all, and 200 small ones. Ours are the accumulator's
buckets, packed and waited for as at a boundary; the other is an AllReduce a tensor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import interleaved, keep, machine, rows_of

RANKS, REPETITIONS, TIMEOUT_S = 2, 9, 300
REFERENCE = "one all-reduce a tensor"
SETS = {
    "16 tensors, 8.4 M numbers": [(1024, 1024)] * 8 + [(1000,)] * 8,
    "200 tensors of 64": [(64,)] * 200,
}
BUCKETS_MIB = (25.0, 4.0)


def rank_main(folder: Path, rank: int, repetitions: int) -> None:
    """Measure all sets on one rank; rank 0 writes the figures."""
    os.environ.setdefault("GLOG_v", "3")
    from mindspore import Tensor, nn, ops

    from orchestrator.engine.api import EngineSettings, GroupSpec
    from orchestrator.engine.mindspore.accumulator import Accumulator
    from orchestrator.engine.mindspore.group import form_group

    group = form_group(
        GroupSpec(
            rank=rank, size=RANKS, local_rank=rank, node="here", address="127.0.0.1", folder=folder
        )
    )

    class Holder(nn.Cell):
        def __init__(self, shapes: list[tuple[int, ...]]) -> None:
            super().__init__()
            from mindspore import Parameter, ParameterTuple

            self.held = ParameterTuple(
                Parameter(ops.ones(shape), name=f"p{index}") for index, shape in enumerate(shapes)
            )

        def construct(self, x: Tensor) -> Tensor:
            return x

    def loss(model: nn.Cell, batch: Tensor) -> tuple[Tensor, int, dict[str, Tensor]]:
        raise NotImplementedError("nothing is trained here")

    figures: dict[str, Any] = {}
    for name, shapes in SETS.items():
        holder = Holder(shapes)
        contenders = {}
        for mib in BUCKETS_MIB:
            flat = Accumulator(holder, loss, group, EngineSettings(bucket_bytes=int(mib * 2**20)))

            def once(flat: Accumulator = flat) -> float:
                group.barrier()
                began = time.perf_counter()
                for tensor in flat.reduce()[0]:
                    tensor.asnumpy()
                return 1e3 * (time.perf_counter() - began)

            contenders[f"flat, buckets of {mib:g} MiB"] = once
        tensors = list(flat.sums)

        def each(tensors: list[Tensor] = tensors) -> float:
            group.barrier()
            began = time.perf_counter()
            group.sums(tensors)
            return 1e3 * (time.perf_counter() - began)

        contenders[REFERENCE] = each
        figures[name] = rows_of(interleaved(contenders, repetitions), REFERENCE)
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
    group.close()
    os._exit(0)


def main(*, quick: bool = False) -> None:
    """Start the ranks and keep what rank 0 measured."""
    found = machine()
    repetitions = str(3 if quick else REPETITIONS)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.mindspore_reduction",
                    folder,
                    str(rank),
                    repetitions,
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.wait(TIMEOUT_S)
        figures = json.loads((Path(folder) / "figures.json").read_text())
    parts = [
        {"heading": name, "reference": REFERENCE, "figures": {"ms": rows}}
        for name, rows in figures.items()
    ]
    data = {
        "title": f"MindSpore over MCCL, {RANKS} ranks: one reduction",
        "machine": found,
        "note": "The flat reduction in buckets beside one all-reduce for each tensor.",
        "parts": parts,
    }
    keep("mindspore_reduction", data, quick=quick)


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
