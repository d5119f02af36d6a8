"""Ranks start without torch's compiler, which takes as long to load as torch, unless it is used."""

import subprocess
import sys

TRAINED = """
import sys
import torch
from orchestrator.engine.torch.model.uncompiled import DECIDED, spare_the_compiler

torch.manual_seed(1)
spare_the_compiler()
spare_the_compiler()
model = torch.nn.Linear(2, 1)
made = torch.optim.AdamW(model.parameters(), lr=0.1)

for _ in range(2):
    model(torch.ones(3, 2)).sum().backward()
    made.step()
    made.zero_grad()
    made.load_state_dict(made.state_dict())
    made.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    methods = ("zero_grad", "state_dict", "load_state_dict", "add_param_group")
    wrapped = [getattr(torch.optim.Optimizer, name).__wrapped__ for name in methods]
    print("torch._dynamo" in sys.modules, {getattr(one, DECIDED).__module__ for one in wrapped})
    import torch._dynamo  # as torch.compile does
"""


def test_optimizers_load_the_compiler_only_when_a_job_does_and_then_heed_it():
    words = [sys.executable, "-c", TRAINED]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "False {'orchestrator.engine.torch.model.uncompiled'}",
        "True {'torch._dynamo.eval_frame'}",
    ], done.stderr
