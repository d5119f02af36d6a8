"""Models in shards: `fully_shard` (FSDP2) within groups of ranks, this reduction between them.

A model sharded over a mesh of one dimension is one copy, held by all ranks. On a mesh of two
dimensions, (replicate, shard), each row of ranks (`shard_ranks`) holds a copy (HSDP), usually a
node; each column (`replicate_group`) holds the same shards of all copies.

FSDP gathers weights and scatters gradients within a copy, in each micro-step, and adds this rank's
shards into the flat buffers. Left to itself it would reduce between copies in each backward, too,
and divide by the number of ranks. Here it does neither: the sums of the micro-steps are reduced
between copies once, at the boundary, so copies may have different numbers of micro-steps, and none.

Within a copy every micro-step is collective: its ranks need equally many. `run.windows` pads with
micro-steps of weight 0; other loops do so themselves.

    [Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277, section 3.2.2 on hybrid sharding]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, ModuleList
from torch.optim import Optimizer

from orchestrator.engine.api import GroupSpec
from orchestrator.engine.common.job_checks import name_layers
from orchestrator.engine.common.trailer import Trailer
from orchestrator.engine.torch.buffers import (
    GradientBuffers,
    Named,
    as_sharded,
    bucket_slices,
    local_part,
    shard_like,
)
from orchestrator.engine.torch.group import BaseGroup, gather_texts
from orchestrator.engine.torch.model import sparse_embeddings
from orchestrator.engine.torch.reducer import GradientNorm
from orchestrator.engine.torch.rendezvous import meet
from orchestrator.engine.torch.sharding import RowReduction
from orchestrator.engine.torch.state import restore_optimizer
from orchestrator.engine.torch.transports import TorchGroup, transport_of
from orchestrator.errors import ConfigError, JobError, SilenceError
from orchestrator.job import Job

try:  # what switches FSDP's own reduction between copies off has no public name
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        DDPMeshInfo,
        FSDPMeshInfo,
    )
except ImportError:  # another torch: `FullySharded` says so
    DDPMeshInfo = FSDPMeshInfo = None


# ------------------------------------------------------------------ Models of job classes


_stores: list[Any] = []
"""Stores of process groups that torch knows, which live as long as these."""


def shard_model(job: Job, model: Module, group: BaseGroup, over: str) -> None:
    """Shard a job's model, by `job.shard` or else by layers. Collective among the ranks of a copy.

    Args:
        group: of all ranks, or of this one alone in a process that replaces a lost one.
        over: "node": one copy for the ranks of each node; "all": one copy for all ranks.

    Raises:
        JobError: `job.shard` left the model as it was.
    """
    spec = cast("GroupSpec", group.spec)
    folder = spec.folder / "copy"
    if over == "node":
        folder = spec.folder / f"copy-{spec.node}-{spec.incarnation}"
        spec = replace(spec, rank=spec.local_rank, size=spec.ranks_per_node)
    if not dist.is_initialized():  # meshes find their process groups in torch's own list alone
        folder.mkdir(mode=0o700, exist_ok=True)
        shared, transport = meet(replace(spec, folder=folder, generation=0))
        store = HashStore() if shared is None else PrefixStore("torch", shared.below)
        store.set_timeout(timedelta(seconds=spec.collective_timeout_s))
        _stores.append((store, shared))
        kind = group.device.type
        backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{transport}"
        dist.init_process_group(
            backend,
            store=store,
            rank=spec.rank,
            world_size=spec.size,
            timeout=timedelta(seconds=spec.collective_timeout_s),
        )
    # Over torch's own group, whose ranks are those of this copy.
    mesh = DeviceMesh(group.device.type, torch.arange(spec.size), mesh_dim_names=("shards",))
    getattr(job, "shard", shard_layers)(model, mesh)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise JobError(f"{type(job).__name__}.shard() did not call fully_shard() on the model")


def form_replicate_group(group: BaseGroup, over: str) -> None:
    """Set a new group's `shard_ranks`, the ranks that hold this rank's copy of the model, and
    `replicate_group`, those that hold the same shards, one of each copy. Collective.
    """
    spec = cast("GroupSpec", group.spec)
    nodes = gather_texts(group, spec.node if over == "node" else "all")
    copies = [[n for n, node in enumerate(nodes) if node == name] for name in dict.fromkeys(nodes)]
    group.shard_ranks = tuple(next(ranks for ranks in copies if group.rank in ranks))
    index = group.shard_ranks.index(group.rank)
    same = [ranks[index] for ranks in copies]
    group.replicate_ranks = tuple(same)
    group.replicate_group = TorchGroup.alone(transport=group.transport, device=group.device)
    if len(same) > 1:
        # A prefix for each column: they meet at the same time in one store.
        store = PrefixStore(f"replicas-{index}", cast("Any", group.store).below)
        own = replace(spec, rank=same.index(group.rank), size=len(same))
        group.replicate_group = transport_of(group.transport).form(own, store)


def shard_layers(model: Module, mesh: DeviceMesh) -> None:
    """Shard each element of the outermost `ModuleList`s by itself, and then all that is left.

    Raises:
        JobError: a parameter that `fully_shard` does not take.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise JobError(
                f"parameter {name} is a single number, which engine.shard_model cannot shard: give "
                "it a dimension, as in torch.nn.Parameter(torch.ones(1))"
            )
        if not parameter.is_contiguous():
            raise JobError(
                f"parameter {name} has strides {parameter.stride()} (channels_last, perhaps), and "
                "engine.shard_model takes contiguous ones only: leave the model as it was built, "
                "and convert the batch in loss(): x.to(memory_format=torch.channels_last)"
            )
    inner: set[Module] = set()
    for layers in (module for module in model.modules() if isinstance(module, ModuleList)):
        if layers in inner:
            continue
        inner.update(layers.modules())  # lists within a layer are sharded with the layer
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


# ------------------------------------------------------------------ Its reduction


class FullySharded:
    """The copies of one model that `fully_shard` has sharded, as this rank sees them.

    Building it changes the model: FSDP adds up gradients and leaves dividing, and reducing between
    copies, to the boundary.

    Args:
        model: with FSDP modules; every trained parameter is in one.

    Attributes:
        shard_ranks: numbers in `group` of the ranks that hold this rank's copy.
        replicate_group: the ranks that hold the same shards, one of each copy.
        replicate_ranks: their numbers in `group`.

    Raises:
        ConfigError: a mesh, a wrapper or a torch that cannot be served.
    """

    def __init__(self, model: Module, trained: Named, group: BaseGroup) -> None:
        self._group = group
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        meshes = {p.device_mesh for _, p in trained if isinstance(p, DTensor)}
        self.shard_ranks = group.shard_ranks
        self.replicate_ranks = group.replicate_ranks or (group.rank,)
        self.replicate_group = group.replicate_group or TorchGroup.alone(device=group.device)
        for name, parameter in trained:
            if not isinstance(parameter, DTensor):
                raise ConfigError(
                    f"parameter {name} is not sharded, but others are: call fully_shard(model) on "
                    "the whole model last, which takes all parameters that are left"
                )
        if len(meshes) > 1:
            raise ConfigError("all parts of a model have to be sharded over one and the same mesh")
        if not meshes:
            raise ConfigError("fully_shard() was called on the model, but nothing that is trained")
        mesh: DeviceMesh = meshes.pop()
        if not self.shard_ranks and (mesh.ndim > 2 or mesh.size() != group.size):
            raise ConfigError(
                f"the model is sharded over a mesh of shape {tuple(mesh.shape)}, but there are "
                f"{group.size} ranks: it has to be over all of them, in one dimension or in two "
                "(replicate, shard)"
            )
        if any(parameter.device.type != mesh.device_type for _, parameter in trained):
            raise ConfigError(
                f"shards are kept on another device than {mesh.device_type}, where the mesh "
                "reduces: CPUOffloadPolicy is not available"
            )
        if not self.shard_ranks:
            # The mesh has torch's numbers, which are others where `group` is a part of all ranks.
            ranks = sorted(mesh.mesh.flatten().tolist())
            row = mesh.mesh if mesh.ndim == 1 else mesh.mesh[mesh.get_local_rank(0)]
            self.shard_ranks = tuple(map(ranks.index, row.tolist()))
            if mesh.ndim > 1 and mesh.size(0) > 1:
                column = mesh.mesh[:, mesh.get_local_rank(1)]
                self.replicate_ranks = tuple(map(ranks.index, column.tolist()))
                self.replicate_group = TorchGroup.wrap(mesh.get_group(0), device=group.device)
        if sparse := sparse_embeddings(model):
            raise ConfigError(
                f"FSDP takes no sparse gradients, as of {name_layers(sparse)}: build it with "
                "sparse=False"
            )
        for module in self._modules:
            self._take_over(module)

    def _take_over(self, module: Any) -> None:
        """Have FSDP sum gradients within a copy, and do nothing else with them."""
        if FSDPMeshInfo is None or not hasattr(module, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                f"fully_shard of torch {torch.__version__} cannot leave its reduction between "
                "copies to the accumulator; torch 2.13 can"
            )
        module.set_gradient_divide_factor(1.0)  # these do not include the modules within
        module.set_force_sum_reduction_for_comms(True)  # the boundary divides, by the weight
        # Ranks of a copy that use other parameters would else scatter buffers of other sizes.
        module.set_reduce_scatter_unused_params(True)
        for part in module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001  # no public name
            sharded_params = [fsdp_param.sharded_param for fsdp_param in part.fsdp_params]
            if len(kinds := {str(p.dtype) for p in sharded_params if p.requires_grad}) > 1:
                raise ConfigError(
                    f"one fully_shard() takes parameters of one dtype, but has got "
                    f"{' and '.join(sorted(kinds))}: call it on the layers of the other one first"
                )
            # Without the replicate dimension FSDP has nothing to reduce between copies.
            info = part.mesh_info
            if DDPMeshInfo is not None and isinstance(info, DDPMeshInfo):
                alone = FSDPMeshInfo(mesh=info.mesh, shard_mesh_dim=info.shard_mesh_dim)
                if part.post_forward_mesh_info == info:
                    part.post_forward_mesh_info = alone
                part.mesh_info = alone

    @property
    def part(self) -> int:
        """Return the number of this rank's part of a checkpoint: its place in the first copy, -1 in
        the others.
        """
        return self.shard_ranks.index(self._group.rank) if self.replicate_group.rank == 0 else -1

    def reshard(self) -> None:
        """Free whole weights after a step: they are those before it."""
        for module in self._modules:
            cast("Any", module).reshard()

    def reduction(self, parameters: Named, bucket_bytes: int | None) -> FullyShardedReduction:
        """Build the reduction of the model's trained parameters."""
        return FullyShardedReduction(parameters, self._group, self.replicate_group, bucket_bytes)

    # State is saved as that of a model that is not sharded, so it can be read with any number of
    # ranks, and without any sharding.

    def whole_state(self, optimizer: Optimizer, *, keep: bool) -> dict[str, Any] | None:
        """Return the optimizer's `state_dict()` with whole tensors on the CPU. Collective; None if
        not kept.
        """
        whole = _with_tensors(optimizer.state_dict(), lambda _, value: _whole(value, keep=keep))
        return whole if keep else None

    def sharded_state(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return `whole_state`'s as this rank's optimizer keeps it. Not collective."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return _with_tensors(saved, lambda number, value: shard_like(value, parameters[number]))

    def own_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's `state_dict()` with this rank's shards. Not collective."""
        return _with_tensors(optimizer.state_dict(), lambda _, value: local_part(value))

    def load_own_state(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Take the `own_state` of a rank with the same shards of another copy. Not collective."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def sharded(number: int, value: Tensor) -> Tensor:
            parameter = parameters[number]
            same = value.shape == local_part(parameter).shape
            return as_sharded(value, parameter) if same else value

        restore_optimizer(optimizer, _with_tensors(saved, sharded))


def _with_tensors(
    saved: Mapping[str, Any], change: Callable[[int, Tensor], Tensor]
) -> dict[str, Any]:
    """Return an optimizer's `state_dict()` with other tensors.

    Args:
        change: returns one, from its parameter's number and the tensor.
    """
    states = {
        number: {
            key: change(number, value) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
        for number, state in saved["state"].items()
        if isinstance(state, Mapping)  # else a number that the optimizer keeps for itself
    }
    return {**saved, "state": {**saved["state"], **states}}


def _whole(tensor: Tensor, *, keep: bool) -> Tensor:
    """Return a copy of all of a sharded tensor on the CPU. Collective; empty where not kept."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if not keep:
        return torch.empty(0)
    copy = whole.detach().cpu()
    return copy.clone() if copy.data_ptr() == local_part(tensor).data_ptr() else copy


class FullyShardedReduction(RowReduction):
    """Sums the shards' gradients over the copies of the model, at the boundary.

    Raises:
        SilenceError: something else reduced between copies in a window.
    """

    def __init__(
        self,
        parameters: Named,
        group: BaseGroup,
        replicate_group: BaseGroup,
        bucket_bytes: int | None,
    ) -> None:
        buffers = GradientBuffers(parameters)
        slices = bucket_slices(buffers.payloads, bucket_bytes)
        super().__init__(buffers, replicate_group, slices, overlap=False)
        self._all_ranks = group
        self._counts_in_norm = replicate_group.rank == 0  # others there hold the same shards
        self._silent_since = 0

    def begin(self, leaves: int | None) -> None:
        super().begin(leaves)
        self._silent_since = self._group.transport_collectives() or 0

    def reduce(self, trailer: Trailer) -> tuple[Trailer, GradientNorm]:
        counted = self._group.transport_collectives()
        if counted is not None and (sent := counted - self._silent_since):
            raise SilenceError(
                f"{sent} collectives ran between the copies of the model in mid-window: they are "
                "reduced at the boundary, once"
            )
        mark = self._group.mark()
        totals = super().reduce(trailer)
        self.replicate_traffic = self._group.since(mark)
        return totals
