"""A MindSpore script as `msrun` takes it, not a line changed."""

import json
import re

import pytest

from tests import helpers
from tests.engine.mindspore.under_msrun import TRAIN, under_msrun
from tests.programs import script


@pytest.mark.timeout(600)
def test_on_two_nodes_of_two_ranks_it_ends_with_the_bits_that_it_has_under_msrun(tmp_path):
    script(tmp_path, TRAIN)
    under_msrun(tmp_path, 4, timeout=290)  # one after the other, since each takes gigabytes
    ours = helpers.call(
        "run", "job.style=mindspore", "run.dir=ours", "cluster.rendezvous_timeout_s=600", "--",
        "train.py", module="orchestrator", cwd=tmp_path, timeout=290,
    )  # fmt: skip
    assert ours.returncode == 0, ours.stdout + ours.stderr

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
