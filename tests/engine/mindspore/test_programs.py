"""A MindSpore script as `msrun` takes it, not a line changed."""

import json
import re
import sys
from pathlib import Path

from orchestrator.engine.mindspore.comm.scheduler import free_port
from tests import helpers
from tests.programs import script

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
told = {name: os.environ[name] for name in os.environ if name.startswith(("MS_", "RANK_"))}
sys.stdout.write(f"final {loss.hex()} {weights.hex()}\\n{json.dumps(told, sort_keys=True)}\\n")
"""


def test_on_two_nodes_of_two_ranks_it_ends_with_the_bits_that_it_has_under_msrun(tmp_path):
    script(tmp_path, TRAIN)
    msrun = helpers.begin(
        "--worker_num=4", "--local_worker_num=4", "--join=True", "--log_dir=theirs",
        f"--master_port={free_port('127.0.0.1')}", "train.py",
        module="mindspore.parallel.cluster.run", cwd=tmp_path,
        PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin",
    )  # fmt: skip
    ours = helpers.call(
        "run", "job.style=mindspore", "run.dir=ours", "cluster.rendezvous_timeout_s=600", "--",
        "train.py", module="orchestrator", cwd=tmp_path,
    )  # fmt: skip
    output, _ = msrun.communicate(timeout=120)
    assert ours.returncode == 0, ours.stdout + ours.stderr
    assert msrun.returncode == 0, output

    endings = set()
    for rank in range(4):
        at = (f"theirs/worker_{rank}.log", f"ours/logs/rank-{rank:05d}.log")
        texts = [(tmp_path / name).read_text() for name in at]
        endings |= {tuple(re.findall("^final (.*)", text, re.MULTILINE)) for text in texts}
        told = [json.loads(re.findall(r"^\{.*\}$", text, re.MULTILINE)[-1]) for text in texts]
        for one in told:
            assert one.pop("MS_SCHED_PORT")
            assert one.pop("MS_SCHED_HOST").startswith("127.0.")
        assert told[0] == told[1], "the same variables, of the same values"
    assert len(endings) == 1
    assert len(endings.pop()) == 1
