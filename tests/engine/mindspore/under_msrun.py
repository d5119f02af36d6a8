"""A MindSpore script as people have it, and how `msrun` starts it."""

import sys
from pathlib import Path

from orchestrator.engine.common.rendezvous import keep_port
from tests import helpers

TRAIN = """\
import json, os, sys
import mindspore as ms, numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
init()
rank, size = get_rank(), get_group_size()
draw = np.random.default_rng(0)
x = draw.standard_normal((32, 3)).astype(np.float32)
y = x @ np.asarray([[1.0], [-2.0], [0.5]], np.float32)
net = nn.Dense(3, 1, weight_init="zeros", bias_init="zeros")
own = [ms.Tensor(every[rank::size]) for every in (x, y)]
mean = nn.DistributedGradReducer(net.trainable_params(), mean=True, degree=size)
step = nn.SGD(net.trainable_params(), 0.1)
of = ms.value_and_grad(lambda a, b: ((net(a) - b) ** 2).mean(), None, step.parameters)
for update in range(5):
    loss, found = of(*own)
    step(mean(found))
loss = float((ops.AllReduce()(loss) / size).asnumpy())
weights = b"".join(each.asnumpy().tobytes() for each in net.trainable_params())
variables = {name: os.environ[name] for name in os.environ if name.startswith(("MS_", "RANK_"))}
sys.stdout.write(f"final {loss.hex()} {weights.hex()}\\n{json.dumps(variables, sort_keys=True)}\\n")
"""


def under_msrun(folder, workers, timeout):
    """`train.py` in that folder on so many workers, whose logs go to `theirs/worker_N.log`."""
    with keep_port("127.0.0.1") as keeper:
        done = helpers.call(
            f"--worker_num={workers}", f"--local_worker_num={workers}", "--join=True",
            "--log_dir=theirs", f"--master_port={keeper.getsockname()[1]}", "train.py",
            module="mindspore.parallel.cluster.run", cwd=folder, timeout=timeout,
            PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin",
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
