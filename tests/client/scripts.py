"""Training scripts for Lightning, Accelerate and the Trainer, as people have them, in small."""

import re

from tests import helpers
from tests.programs import ENDS

FRAMEWORKS = """\
import os, sys, time, torch
from torch import nn
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
        pause(update, "accelerate")
    return accelerator.reduce(loss.detach(), "mean").item()

def with_trainer(updates, folder, callback=None):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=11, n_positions=8))
    words = [{"input_ids": (t := torch.arange(8) * n % 11), "labels": t} for n in range(32)]
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=updates, per_device_train_batch_size=2,
        report_to=[], logging_steps=1, disable_tqdm=True, save_strategy="no", learning_rate=0.01,
    )
    class Collate:
        def __call__(self, rows):
            pause(trainer.state.global_step, "trainer")
            return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
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
            pause(self.global_step, "lightning")
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
"""

PLAIN = f"""{FRAMEWORKS}
from orchestrator import callbacks, current_run as run
def say(what, *values):
    words = " ".join(map(str, values))
    sys.stdout.write(f"{{what}} {{words}}\\n")  # at once: torchrun's ranks share one output
def pause(update, name):
    if "--die" in sys.argv and name == "trainer" and rank == 1 and update == dies:
        raise ValueError("the trainer's rank 1 has no such word")
def collectives():
    group = torch.distributed.group.WORLD
    return group._get_sequence_number_for_group() if group else 0
def tell(name, train, *given):
    before = collectives()
    loss = train(*given)
    say(name, loss, collectives() - before)
dies = None
tell("final lightning", with_lightning, 5)
tell("final accelerate", with_accelerate, 5)
tell("final trainer", with_trainer, 3, "trained")
tell("called lightning", with_lightning, 5, callbacks.LightningCallback())
tell("called accelerate", with_accelerate, 5, callbacks.AccelerateUpdates)
tell("called trainer", with_trainer, 3, run.checkpoint_dir, callbacks.TrainerCallback())
dies = 2
if "--die" in sys.argv:
    with_trainer(100, "died")
{ENDS}"""
"""Each as it is, and with our callback: its last loss, and how many collectives it called."""

NAMES = ("accelerate", "trainer", "lightning")
TOLD = re.compile(r"(final|called) (\w+) (\d+\.\d+(?:e-\d+)?) (\d+)")


def under_torchrun(folder):
    """What PLAIN, the folder's train.py, prints on two of torchrun's ranks."""
    peer = helpers.call(
        "--standalone", "--nproc-per-node=2", "train.py",
        module="torch.distributed.run", cwd=folder, timeout=390, GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    assert peer.returncode == 0, peer.stderr
    return peer.stdout


def log(run, rank):
    return (run / "logs" / f"rank-{rank:05d}.log").read_text()
