"""The net of `survive` trained by torchft, whose replicas are killed in the same beat.

Its lighthouse and its managers listen on every interface, so all of it runs in a network namespace
of its own, where there is nothing but a loopback; where none can be made, it does not run.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import wait_for

ABSENT = "not installed (pip install torchft)"
NO_NAMESPACE = "not run: it listens on every interface, and `unshare -rn` gives no namespace here"
ALONE = ("unshare", "-rn")
SET_FLAGS, UP = 0x8914, 1  # SIOCSIFFLAGS, IFF_UP: netdevice(7)
REPLICAS, MICRO_STEPS, MICRO_BATCH = 4, 4, 16
PATIENCE_MS = 1000
"""Of its lighthouse: after which a silent replica is out, and for how long one may be waited for.
Its defaults are 5 s and 60 s, with which each loss would take longer."""


def goodput(victims: list[int], every_s: float) -> dict[str, Any]:
    """Measure as `survive.goodput`, of all replicas together."""
    row: dict[str, Any] = {"name": "torchft", "kills": 0, "useful": None, "equal": "-"}
    if importlib.util.find_spec("torchft") is None:
        return {**row, "why": ABSENT}
    if not shutil.which("unshare") or subprocess.run([*ALONE, "true"], check=False).returncode:
        return {**row, "why": NO_NAMESPACE}
    done = subprocess.run(
        [*ALONE, sys.executable, "-m", __spec__.name, json.dumps([victims, every_s])],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    of = [steps for steps in json.loads(done.stdout) if steps]
    whole = sum(steps[-1]["time"] - steps[0]["time"] + steps[0]["seconds"] for steps in of)
    # The wait for the next quorum is part of a step that is committed after all.
    usual = 3 * median(one["seconds"] for steps in of for one in steps)
    counted = (one for steps in of for one in steps if one["committed"])
    useful = sum(min(one["seconds"], usual) for one in counted)
    lost = (whole - useful) / len(of) / len(victims)
    return {
        **row,
        "kills": len(victims),
        "useful": useful / whole,
        "lost": lost,
        "equal": "no",
        "why": "",
    }


def _loopback_up() -> None:
    """Bring the loopback up in this process's own namespace; refuse anywhere else."""
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        raise SystemExit("this is no network namespace of its own: there is more than a loopback")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", b"lo", UP))


def _disturbed(victims: list[int], every_s: float) -> list[list[dict[str, Any]]]:
    """Return the steps of each replica; a killed one is restarted."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=PATIENCE_MS,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=PATIENCE_MS,
    )
    folder = Path(tempfile.mkdtemp(prefix="torchft-"))

    def started(n: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", __spec__.name, lighthouse.address(), str(n), folder],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"{n}.log").open("a"),
        )

    replicas = [started(n) for n in range(REPLICAS)]
    try:
        for n in range(REPLICAS):
            wait_for(lambda n=n: len(_steps(folder, n)) >= 5, "training")
        for number, victim in enumerate(victims):
            if number:
                time.sleep(every_s)  # the measured interval between kills
            replicas[victim].send_signal(signal.SIGKILL)
            replicas[victim].wait()
            replicas[victim] = started(victim)
        time.sleep(every_s / 2)
        return [_steps(folder, n) for n in range(REPLICAS)]
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        lighthouse.shutdown()
        shutil.rmtree(folder)


def _steps(folder: Path, replica: int) -> list[dict[str, Any]]:
    path = folder / f"{replica}.jsonl"
    return [json.loads(one) for one in path.read_text().split("\n")[:-1]] if path.exists() else []


def replica(lighthouse: str, number: int, folder: Path) -> None:
    """Train until killed; print a line for each step."""
    import torch
    from torch.distributed import TCPStore
    from torch.nn.utils import parameters_to_vector, vector_to_parameters
    from torchft import Manager, Optimizer, ProcessGroupGloo

    from benchmarks.survive import SAMPLES, Work, loss_of, net

    torch.manual_seed(0)
    model = net()
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    parts = {"model": model, "optimizer": adam}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        load_state_dict=lambda state: [parts[n].load_state_dict(s) for n, s in state.items()],
        replica_id=f"replica_{number}",
        lighthouse_addr=lighthouse,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    optimizer, weights = Optimizer(manager, adam), list(model.parameters())
    data = Work().dataset().tensors[0]
    with (folder / f"{number}.jsonl").open("a", buffering=1) as file:
        while True:
            began, before = time.time(), manager.current_step()
            optimizer.zero_grad()
            for step in range(MICRO_STEPS):
                first = ((before * REPLICAS + number) * MICRO_STEPS + step) * MICRO_BATCH % SAMPLES
                loss_of(model, data[first : first + MICRO_BATCH]).backward()
            # Its DistributedDataParallel (0.2.0) ends on an assertion here when a peer is lost.
            gradient = parameters_to_vector([w.grad for w in weights if w.grad is not None])
            manager.allreduce(gradient).wait()
            vector_to_parameters(gradient, [w.grad for w in weights if w.grad is not None])
            optimizer.step()
            committed = manager.current_step() > before
            now = time.time()
            line = {"time": now, "seconds": now - began, "committed": committed}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 2:  # from `goodput`, in the namespace
        _loopback_up()
        print(json.dumps(_disturbed(*json.loads(sys.argv[1]))))  # it reads this
        sys.exit()
    replica(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
