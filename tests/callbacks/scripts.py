"""Training scripts for Lightning, Accelerate and the Trainer, as people have them, in small."""

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
def say(what, loss):
    sys.stdout.write(f"{{what}} {{loss}}\\n")  # at once: torchrun's ranks share one output
def pause(update, name):
    if "--die" in sys.argv and name == "trainer" and rank == 1 and update == dies:
        raise ValueError("the trainer's rank 1 has no such word")
dies = None
say("final lightning", with_lightning(5))
say("final accelerate", with_accelerate(5))
say("final trainer", with_trainer(3, "trained"))
dies = 2
if "--die" in sys.argv:
    with_trainer(100, "died")
"""

IN_A_RUN = f"""{FRAMEWORKS}
from orchestrator import callbacks, current_run as run
def pause(update, name):
    if NAMES[run.attempt:][:1] == [name] and update >= 3:
        open(f"here-{{name}}-{{rank}}", "w").close()
        time.sleep(0.2)  # the stop comes meanwhile, and not after the end
NAMES = ["accelerate", "trainer", "lightning"]
if run.attempt < 2:
    loss = with_accelerate(40 if run.attempt == 0 else 30, callbacks.AccelerateUpdates)
    print("accelerate", loss, flush=True)
if run.attempt in (1, 2) and not run.stopping:
    loss = with_trainer(30, run.checkpoint_dir, callbacks.TrainerCallback())
    print("trainer", loss, run.stopping, flush=True)
if run.attempt in (2, 3) and not run.stopping:
    loss = with_lightning(30, callbacks.LightningCallback(every=10))
    print("lightning", loss, run.stopping, flush=True)
"""
