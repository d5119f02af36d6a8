"""The examples of docs/how-to/library.md give the updates of one big batch in plain torch."""

import subprocess

import pytest
import torch
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    normalize,
    softplus,
)

from orchestrator.plan.order import DataOrder
from tests import warm
from tests.docs.scripts import ranks, script, torchrun
from tests.helpers import LIMIT_S, environment

pytestmark = pytest.mark.long


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


def test_the_loop_takes_the_big_batchs_steps(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
    wanted = big_batch(model, 140, model, clip_norm=1.0)
    rows = ranks("library.md", "loop.py", 3, tmp_path)
    assert [number for row in rows for number in row[:2]] == pytest.approx(wanted, rel=1e-4)
    assert {row[2] for row in rows} == {1.0}


def test_a_loop_of_ones_own_gives_the_same_bits_on_one_and_on_three_ranks(tmp_path):
    alone, three = (ranks("library.md", "same_bits.py", n, tmp_path) for n in (1, 3))
    assert len(alone) == 5
    assert alone == three


def test_twelve_changed_lines_make_the_torchrun_script_one_with_our_windows(tmp_path):
    for name in ("ddp.py", "windows.py"):
        (tmp_path / name).write_text(script("library.md", name).replace(f"# {name}\n", ""))
    diffstat = subprocess.run(
        ["git", "diff", "--no-index", "--numstat", "ddp.py", "windows.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    added, taken_away = map(int, diffstat.split()[:2])
    assert 0 < added + taken_away <= 12, diffstat


def norms_after_big_batches(samples=700, global_batch=140):
    """Of the weights of windows.py, in float64, after one epoch in plain torch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(samples, 20, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    order = DataOrder(dataset_samples=samples, global_batch=global_batch)
    for update in range(order.updates_per_epoch):
        mine = order.indices(update).tolist()
        optimizer.zero_grad()
        cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
    return [weights.norm().item() for weights in model.parameters()]


IN_FLOAT64 = ("\ndist.init_", "\ntorch.set_default_dtype(torch.float64)\ndist.init_")


@pytest.fixture
def wanted():
    torch.set_default_dtype(torch.float64)
    yield norms_after_big_batches()
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("start", "processes"), [(torchrun, 2), (ranks, 3)])
def test_our_windows_take_the_big_batchs_steps_on_uneven_ranks(start, processes, tmp_path, wanted):
    (row,) = start("library.md", "windows.py", processes, tmp_path, IN_FLOAT64)
    assert row == pytest.approx(wanted, rel=1e-12)


def test_a_callback_sees_each_update_of_our_windows(tmp_path):
    (tmp_path / "losses.py").write_text(script("library.md", "losses.py"))
    text = script("library.md", "windows.py").partition("if rank == 0")[0]
    text = text.replace("windows = run.windows(", "losses = Losses()\nwindows = run.windows(")
    text = text.replace("micro_batch=16", "micro_batch=16, callbacks=[losses]")
    shown = "print(*(update for update, loss, seconds in losses.seen if loss and seconds))"
    text = f"from losses import Losses\n{text}{shown}\ndist.destroy_process_group()\n"
    (tmp_path / "train.py").write_text(text)
    assert warm.ranks("train", 1, tmp_path).split() == ["0", "1", "2", "3", "4"]


def test_our_windows_alone_under_plain_python_take_the_same_steps(tmp_path, wanted):
    text = script("library.md", "windows.py").replace(*IN_FLOAT64)
    kept = [line for line in text.splitlines() if not line.startswith(("dist.", "rank, ranks"))]
    (tmp_path / "alone.py").write_text("rank = 0\n" + "\n".join(kept))
    done = warm.call("alone", [], cwd=tmp_path, env=environment(), timeout=LIMIT_S, kind="runs")
    assert list(map(float, done.stdout.split())) == pytest.approx(wanted, rel=1e-12), done.stderr
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"alone.py"}, "nothing is left"


def _gan():
    """(loss of the critic, loss of the generator) of five updates in plain torch."""
    torch.manual_seed(0)
    generator = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    critic = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    both = [torch.optim.Adam(net.parameters(), 0.01) for net in (generator, critic)]
    drawn, found = torch.Generator().manual_seed(1), []
    for _ in range(5):
        real = torch.randn(60, 2, generator=drawn) + 3
        noise = torch.randn(60, 4, generator=drawn)
        scores = critic(torch.cat([real, generator(noise).detach()]))
        wanted = torch.cat([torch.ones(60, 1), torch.zeros(60, 1)])
        judged = binary_cross_entropy_with_logits(scores, wanted)
        both[1].zero_grad()
        judged.backward()
        both[1].step()
        fooled = softplus(-critic(generator(noise))).mean()
        both[0].zero_grad()
        fooled.backward()
        both[0].step()
        found += [judged.item(), fooled.item()]
    return found


def test_generator_and_discriminator_take_the_big_batchs_steps(tmp_path):
    rows = ranks("library.md", "gan.py", 2, tmp_path)
    assert [number for row in rows for number in row[:2]] == pytest.approx(_gan(), rel=1e-4)
    assert {row[2] for row in rows} == {2.0}


def test_keys_that_are_gathered_with_their_gradient_give_the_big_batchs_steps(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wanted = []
    for views in torch.randn(5, 2, 60, 20, generator=torch.Generator().manual_seed(1)):
        queries, keys = (normalize(model(view), dim=1) for view in views)
        loss = cross_entropy(queries @ keys.T / 0.1, torch.arange(60))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        wanted += [loss.item(), norm.item()]
    for processes in (2, 3):
        rows = ranks("library.md", "contrast.py", processes, tmp_path)
        assert [number for row in rows for number in row[:2]] == pytest.approx(wanted, rel=1e-4)


def test_two_stages_on_two_replicas_clip_and_step_as_the_whole_model_does(tmp_path):
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh())
    second = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
    model = torch.nn.Sequential(first, second)
    wanted = big_batch(model, 120, model, clip_norm=1.0)
    rows = ranks("library.md", "pipeline.py", 4, tmp_path)
    assert [number for row in rows for number in row[:2]] == pytest.approx(wanted, rel=1e-4)
    assert {row[2] for row in rows} == {2.0}, "among replicas, and between stages"
