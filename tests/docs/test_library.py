"""The examples of docs/library.md give the updates of one big batch in plain torch."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.docs.scripts import torchrun


def big_batch(model, samples, part, clip_norm=float("inf")):
    """(mean loss, norm of the gradient of `part`) of five updates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(5 * samples, 20, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    found = []
    for update in range(5):
        mine = slice(update * samples, (update + 1) * samples)
        loss = cross_entropy(model(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(part.parameters(), clip_norm)
        optimizer.step()
        found += [loss.item(), norm.item()]
    return found


@pytest.mark.parametrize("processes", [1, 3])
def test_the_loop_with_torchrun_takes_the_big_batchs_steps(processes, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
    wanted = big_batch(model, 140, model, clip_norm=1.0)
    rows = torchrun("library.md", "loop.py", processes, tmp_path)
    assert [number for row in rows for number in row[:2]] == pytest.approx(wanted, rel=1e-4)
    assert {row[2] for row in rows} == {1.0 if processes > 1 else 0.0}


def test_two_stages_on_two_replicas_take_the_big_batchs_steps_with_one_reduction(tmp_path):
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh())
    second = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
    wanted = big_batch(torch.nn.Sequential(first, second), 120, second)
    rows = torchrun("library.md", "pipeline.py", 4, tmp_path)
    assert [number for row in rows for number in row[:2]] == pytest.approx(wanted, rel=1e-4)
    assert {row[2] for row in rows} == {1.0}
