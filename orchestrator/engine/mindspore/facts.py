"""Facts about MindSpore. Importing them imports no MindSpore."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.frameworks import RESTARTS, SURVIVE, FrameworkFacts, Limit
from orchestrator.config.schema import Config

NO_NEW_GROUP = f"its ranks cannot form a group again, but {RESTARTS} reads a checkpoint"
PYNATIVE = ("engine.mode", ("pynative",))
ON_CPU = ("transport", ("auto", "mccl"))
STYLE = ("engine.style", ("framework",))
ONE_PROCESS = "AutoParallel needs Ascend or GPU for more than one process"
DEVICES = "no CPU computes it; for devices name transport=hccl or nccl"
ADAM = ("optimizer", ("adam",))
ADAMW = "optimizer=adamw optimizer.weight_decay=0 steps by the same rule"
WHOLE_GRAPHS = "MindSpore 2.10 compiles functions at O0 and O1; O2 was for whole graphs on Ascend"


class MindSporeFacts(FrameworkFacts):
    """Facts about MindSpore."""

    limits = (
        Limit("transport", ("auto", "mccl", "nccl", "hccl")),
        Limit("accumulation.reduction", ("fast",)),
        Limit("engine.shard_optimizer", (False,)),
        Limit("engine.shard_model", ("none",)),
        Limit("engine.jit_level", ("auto", "O0", "O1"), why=WHOLE_GRAPHS),
        Limit("engine.jit_level", ("auto",), PYNATIVE, "levels are for engine.mode=jit"),
        Limit("train.precision", ("float16", "float32", "float64"), ON_CPU, DEVICES),
        Limit("train.precision", ("float32", "float16", "bfloat16"), ADAM, ADAMW),
        Limit("cluster.nodes", (1,), STYLE, ONE_PROCESS),
        Limit("cluster.ranks_per_node", (1,), STYLE, ONE_PROCESS),
        Limit("engine.mode", ("graph", "jit"), STYLE),
        Limit("train.clip_norm", (None,), STYLE),
        Limit("accumulation.ragged", ("drop",), STYLE, "it needs windows of equal size"),
        Limit("accumulation.batch_schedule", ([],), STYLE, "it needs windows of equal size"),
        Limit("train.precision", ("float32",), STYLE),
        Limit("optimizer", ("sgd", None), STYLE, "its Adam and AdamW are not the papers'"),
        Limit("train.on_non_finite", ("stop",), STYLE),
        Limit("accumulation.balance", ("even",), STYLE, "it needs windows of equal size"),
        Limit("accumulation.micro_tokens", (None,), STYLE, "it needs equal micro-batches"),
    )
    cpu_transport = "mccl"
    sends_early = False
    package, tested_version = "mindspore", "2.10.0"

    def problems(self, config: Config, *, coupled: bool) -> Iterator[str]:
        yield from super().problems(config, coupled=coupled)
        if coupled:
            yield "embed() and loss_of_embeddings() need torch; write the job for torch"

    def survival_problems(self, config: Config, *, talks: bool = False) -> Iterator[str]:
        del config, talks
        yield f"{SURVIVE} MindSpore: {NO_NEW_GROUP}"
