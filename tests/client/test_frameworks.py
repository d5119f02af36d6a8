"""Lightning, Accelerate and the Trainer: unmodified in a run, and with our callbacks."""

import re

import pytest

from tests import helpers
from tests.programs import ENDS, script

pytestmark = pytest.mark.long

TRAIN = f"""\
import os, sys, torch
from torch import nn
from orchestrator import callbacks, current_run as run
torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

def with_accelerate(updates, make=None):
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    model = net()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), 0.02), torch.utils.data.DataLoader(data, 4)
    )
    ours = make(accelerator) if make else None
    for update in range(ours.first if ours else 0, updates):
        x, y = [batch for batch in loader][update % len(loader)]
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if ours and ours.ends_after(update, loss=loss.detach()):
            return None
    return accelerator.reduce(loss.detach(), "mean").item()

def with_trainer(updates, folder, callback=None, dies=None):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=11, n_positions=8))
    words = [{{"input_ids": (t := torch.arange(8) * n % 11), "labels": t}} for n in range(32)]
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=updates, per_device_train_batch_size=2,
        report_to=[], logging_steps=1, disable_tqdm=True, save_strategy="no", learning_rate=0.01,
    )
    class Collate:
        def __call__(self, rows):
            if rank == 1 and trainer.state.global_step == dies:
                raise ValueError("the trainer's rank 1 has no such word")
            return {{name: torch.stack([row[name] for row in rows]) for name in rows[0]}}
    trainer = Trainer(
        model, arguments, train_dataset=words, data_collator=Collate(),
        callbacks=[callback] if callback else [],
    )
    trainer.train(resume_from_checkpoint=callback.checkpoint if callback else None)
    return trainer.state.log_history[-2]["loss"]

def with_lightning(updates, callback=None):
    import lightning
    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()
        def training_step(self, batch, number):
            self.latest = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            return self.latest
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.02)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu", devices=local, num_nodes=size // local, strategy="ddp",
        max_steps=updates, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback] if callback else [],
    )
    model = Model()
    loader = torch.utils.data.DataLoader(data, 4)
    trainer.fit(model, loader, ckpt_path=callback.checkpoint if callback else None)
    return model.latest.item()

def collectives():
    group = torch.distributed.group.WORLD
    return group._get_sequence_number_for_group() if group else 0
def tell(name, train, *given):
    before = collectives()
    loss = train(*given)
    # At once: torchrun's ranks share one output.
    sys.stdout.write(f"{{name}} {{loss}} {{collectives() - before}}\\n")
tell("final lightning", with_lightning, 5)
tell("final accelerate", with_accelerate, 5)
tell("final trainer", with_trainer, 3, "trained")
tell("called lightning", with_lightning, 5, callbacks.LightningCallback())
tell("called accelerate", with_accelerate, 5, callbacks.AccelerateUpdates)
tell("called trainer", with_trainer, 3, run.checkpoint_dir, callbacks.TrainerCallback())
if "--die" in sys.argv:
    with_trainer(100, "died", dies=2)
{ENDS}"""
"""Each as people have it, and with our callback: its last loss, and how many collectives it called.
"""

NAMES = ("accelerate", "trainer", "lightning")
TOLD = re.compile(r"(final|called) (\w+) (\d+\.\d+(?:e-\d+)?) (\d+)")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run on two nodes of one rank, which ends with rank 1's error; what each rank printed, and
    what two ranks of torchrun printed.

    Four ranks would import three frameworks each to prove no more: that ranks of one node get
    torchrun's variables is tested in tests/end_to_end/test_programs.py.
    """
    folder = tmp_path_factory.mktemp("plain")
    script(folder, TRAIN)
    run = folder / "run"
    helpers.call(
        "run",
        helpers.SMALL,
        f"run.dir={run}",
        "--",
        "train.py",
        "--die",
        module="orchestrator",
        cwd=folder,
        timeout=helpers.LIMIT_S,
        code=1,
    )
    ours = [TOLD.findall((run / f"logs/rank-{rank:05d}.log").read_text()) for rank in range(2)]
    peer = helpers.call(
        "--standalone",
        "--nproc-per-node=2",
        "train.py",
        module="torch.distributed.run",
        cwd=folder,
        timeout=helpers.LIMIT_S,
        GLOO_SOCKET_IFNAME="lo",
        code=0,
    )
    return run, ours, TOLD.findall(peer.stdout)


@pytest.mark.timeout(800)
def test_unmodified_they_end_with_the_losses_that_they_have_under_torchrun(plain):
    _, ours, theirs = plain
    assert {(how, name) for how, name, *_ in theirs} == {
        (how, name) for how in ("final", "called") for name in NAMES
    }
    both = [*ours[0], *ours[1]]
    assert len(both) == 12
    assert sorted(both) == sorted(theirs)


def test_with_callbacks_they_call_no_collective_more_and_end_with_the_same_loss(plain):
    """In a run and, where the same lines do nothing, under torchrun."""
    _, ours, theirs = plain
    for reports in (*ours, theirs):
        ends = {how: sorted(rest for kind, *rest in reports if kind == how) for how, *_ in reports}
        assert ends["called"] == ends["final"]
        assert all(int(collectives) > 0 for *_, collectives in ends["final"])


def test_a_rank_that_fails_in_a_framework_is_named_with_its_exception(plain):
    found = helpers.result(plain[0])["culprit"]
    assert found["rank"] == 1
    assert found["cause"].startswith("ValueError: the trainer's rank 1 has no such word")
