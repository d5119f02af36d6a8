"""The example of docs/how-to/mindspore.md takes the steps of the big batch."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.docs.scripts import script


def test_the_frameworks_own_accumulation_under_model_train_takes_the_big_batchs_steps(tmp_path):
    (tmp_path / "model_train.py").write_text(script("mindspore.md", "model_train.py"))
    done = subprocess.run(
        [sys.executable, "model_train.py"], cwd=tmp_path, capture_output=True, text=True,
        check=False, timeout=150, env={**os.environ, "GLOG_v": "3"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    x = np.random.default_rng(0).standard_normal((200, 3))
    y = x.sum(1) + 1
    inputs, found = np.concatenate([x, np.ones((200, 1))], axis=1), np.zeros(4)
    for update in range(5):
        mine = slice(40 * update, 40 * update + 40)
        error = inputs[mine] @ found - y[mine]
        found -= 0.1 * 2 * error @ inputs[mine] / 40
    assert list(map(float, done.stdout.split())) == pytest.approx(found, abs=1e-6)
