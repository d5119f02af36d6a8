"""Accelerate, the Trainer and Lightning, and the documentation's loops, audited unmodified."""

import json

import pytest

from tests.docs.scripts import script
from tests.helpers import verb

pytestmark = pytest.mark.long

DATA = """\
import os, sys, torch
from torch import nn
x = torch.randn(88, 6, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
loader = torch.utils.data.DataLoader(data, 4)
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
"""
ACCELERATE = """\
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), 0.02)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, 100)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(3):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
"""
LIGHTNING = """\
import lightning
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()
    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.02)
trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_epochs=3,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, accumulate_grad_batches=3, gradient_clip_val=1.0,
)
trainer.fit(Model(), loader)
"""
TRAINER = """\
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(
    n_layer=1, n_embd=8, n_head=1, vocab_size=11, n_positions=8, resid_pdrop=0, embd_pdrop=0,
    attn_pdrop=0))
drawn, rows = torch.Generator().manual_seed(1), []
for n in range(44):
    words = torch.randint(0, 11, (8,), generator=drawn)
    labels = words.clone()
    labels[int(torch.randint(3, 9, (1,), generator=drawn)):] = -100
    rows.append({"input_ids": words, "labels": labels})
arguments = TrainingArguments(
    output_dir="out", use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=3,
    report_to=[], disable_tqdm=True, num_train_epochs=2, learning_rate=0.01,
)
Trainer(model, arguments, train_dataset=rows).train()
"""


def audited(folder, name, *words):
    done = verb("audit", "--json", *words, "--", name, cwd=folder)
    return json.loads(done.stdout)["runs"][0]


@pytest.mark.parametrize("text", [ACCELERATE, LIGHTNING], ids=["accelerate", "lightning"])
def test_the_last_window_of_an_epoch_is_divided_by_the_usual_number(text, tmp_path):
    """An epoch has 11 micro-batches a rank: windows of 3, 3, 3 and 2."""
    (tmp_path / "train.py").write_text(DATA + text)
    made = audited(tmp_path, "train.py")
    assert made["faults"] == ["ragged-last-window"], made
    wrong = [u for u in made["updates"] if u["relative_error"] > 1e-6]
    assert [u["update"] for u in wrong] == [3, 7]
    assert all(u["micro_steps"] == [2, 2] for u in wrong)
    assert [u["length"] for u in wrong] == pytest.approx([2 / 3, 2 / 3], abs=1e-6)


def test_the_trainer_weights_tokens_alike_and_counts_one_more_a_sentence(tmp_path):
    """Its divisor has each sentence's first label, too, for which there is no loss."""
    (tmp_path / "train.py").write_text(DATA + TRAINER)
    made = audited(tmp_path, "train.py")
    assert made["faults"] == ["varying-divisor"]
    assert made["rows"]["weights"] == "right"
    lengths = [f["text"] for f in made["findings"] if f["row"] == "length"]
    assert lengths[0] == "the update is divided by 69, where 57 samples or tokens have a loss"


@pytest.mark.parametrize(
    ("name", "faults"),
    [("ddp.py", ["reduced-each-micro-step", "mean-of-means-over-ranks"]), ("windows.py", [])],
)
def test_the_documentation_s_script_is_wrong_by_a_little_and_the_converted_one_right(
    name, faults, tmp_path
):
    (tmp_path / name).write_text(script("library.md", name))
    made = audited(tmp_path, name, "cluster.ranks_per_node=3")
    assert made["faults"] == faults
    errors = [u["relative_error"] for u in made["updates"]]
    assert max(errors) < (1e-2 if faults else 1e-6)
    assert (min(errors) > 1e-3) == bool(faults)
    assert made["state"] == ("wrong" if faults else "right")
