"""Training programs as people have them, in a few lines: what is run as it is in tests."""

import stat
from pathlib import Path

QUICK = """\
import json, os, signal, socket, subprocess, sys, time
rank = int(os.environ["RANK"])
what, _, whose = (sys.argv[1] if len(sys.argv) > 1 else "").partition("@")
me = not whose or int(whose) == rank
print("rank", rank, "begins", flush=True)
"""
"""No framework is imported: most of what a launcher has to do needs none."""

WAITS = """
open(f"here-{rank}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
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


def script(folder: Path, text: str, name: str = "train.py", *, run: bool = False) -> Path:
    path = folder / name
    path.write_text(text)
    if run:
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
