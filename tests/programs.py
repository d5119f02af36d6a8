"""Small training programs that tests run unchanged."""

import stat
from pathlib import Path

QUICK = """\
import json, os, signal, socket, subprocess, sys, time
rank = int(os.environ["RANK"])
what, _, whose = (sys.argv[1] if len(sys.argv) > 1 else "").partition("@")
me = not whose or int(whose) == rank
print("rank", rank, "begins", flush=True)
"""
"""A program without a framework: most duties of a launcher need none."""

WAITS = """
open(f"here-{rank}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)  # between two polls
"""

LOOP = f"""{QUICK}
import math, struct
from orchestrator import current_run as run
place, size = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), run.ranks or 1
links = []
if rank == 0:
    server = socket.create_server(("", place[1]))
    links = [server.accept()[0] for _ in range(size - 1)]
while rank and not links:
    try:
        links = [socket.create_connection(place)]
    except OSError:
        time.sleep(0.02)
def hear(link):
    heard = link.recv(8, socket.MSG_WAITALL)
    if len(heard) < 8:
        raise ConnectionResetError("connection reset by peer")
    return struct.unpack("d", heard)[0]
def summed(value):  # exact, so the order of arrival does not matter
    if rank == 0:
        value = math.fsum([value, *map(hear, links)])
    for link in links:
        link.sendall(struct.pack("d", value))
    return value if rank == 0 else hear(links[0])
saved = run.checkpoint_dir / "state"
first, weight = json.loads(saved.read_text()) if saved.exists() else (0, 1.0)
print("attempt", run.attempt, "goes on with", first, flush=True)
for update in range(first, int(what) if what else first + 5 if run.attempt else 10**9):
    weight = 0.99 * weight + summed(math.sin(update) / (rank + 1))
    run.report(update, loss=abs(weight), samples=8)
    if rank == 0:
        saved.with_suffix(".new").write_text(json.dumps([update + 1, weight]))
        saved.with_suffix(".new").rename(saved)
        run.save_done(update)
    if update == 3:
        open(f"here-{{rank}}", "w").close()
    if run.should_stop(update):
        break
    time.sleep(0.01)  # stops come in mid-loop
print("last", update, weight.hex(), flush=True)
"""
"""An own loop with the five lines, a sum over ranks in each update, and a state of its own.

Its argument is the number of updates; without one, it makes five after its first stop.
"""

TORCH = """\
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
rate = next((float(a.partition("=")[2]) for a in sys.argv if a.startswith("--lr=")), 0.1)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, dtype=torch.float64))
step = torch.optim.SGD(model.parameters(), lr=rate)
data = torch.arange(64, dtype=torch.float64).reshape(16, 4) / 64
for update in range(5):
    step.zero_grad()
    loss = (model(data[rank::size]) - 1).square().mean()
    loss.backward()
    step.step()
weights = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
print(f"final {[w.hex() for w in weights]}\\n", end="", flush=True)  # one write: a line of its own
"""

ENDS = """
sys.stdout.flush()
os._exit(0)
"""
"""Of a torch script: gloo's threads may abort Python's own end (docs/how-to/troubleshooting.md)."""


def script(folder: Path, text: str, name: str = "train.py", *, run: bool = False) -> Path:
    path = folder / name
    path.write_text(text)
    if run:
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
