"""`TorchEngine`: a job's model, data and optimizer behind the `Engine` interface."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Module

from orchestrator.config.optimizer import check_builder, described
from orchestrator.config.rules import interrupt_refusals
from orchestrator.data import HeldOutData
from orchestrator.engine.api import (
    BoundaryReport,
    Engine,
    EngineSettings,
    HeldOutReport,
    MicroBatch,
    RecomputedLeaf,
    Window,
)
from orchestrator.engine.common.held_out import HeldOutSums
from orchestrator.engine.common.job_checks import (
    checked_figures,
    left_in_evaluation,
    refuse_scheduler,
)
from orchestrator.engine.common.job_state import kept_attributes
from orchestrator.engine.common.seeds import derived_seed
from orchestrator.engine.common.trailer import limb_bits
from orchestrator.engine.torch import loader
from orchestrator.engine.torch.accumulator import Accumulator
from orchestrator.engine.torch.buffers import as_sharded, local_part
from orchestrator.engine.torch.checks import check_filled, loss_numbers
from orchestrator.engine.torch.consistency_checks import check_same_job_state, machine_warning
from orchestrator.engine.torch.grad_cache import CoupledWindows
from orchestrator.engine.torch.group import (
    BaseGroup,
    broadcast_tensors,
    gather_numbers,
    to_floats,
    version_of,
)
from orchestrator.engine.torch.model import (
    ForwardState,
    advice,
    be_deterministic,
    build_optimizer,
    check_optimizer,
    compiled_advice,
    doubled,
    frozen_modules,
    in_evaluation,
    is_opaque,
    job_state_of,
    kept_random_state,
    kept_state,
    modes_of,
    moved,
    seed_everything,
    with_norms,
)
from orchestrator.engine.torch.model_watch import (
    AfterUpdateWatch,
    ForwardWatch,
    warn_of_changed_buffers,
)
from orchestrator.engine.torch.sent_state import buffers_of_writer, send_state, take_buffers
from orchestrator.engine.torch.state import (
    Snapshot,
    load_job,
    load_model,
    load_optimizer,
    load_weights,
    model_state,
    weights_sha256,
)
from orchestrator.engine.torch.sum_probe import check_samples
from orchestrator.engine.torch.transports import peer_lost_during
from orchestrator.errors import ConfigError, JobError, StateLost
from orchestrator.job import Job, dataset_of, is_coupled
from orchestrator.plan.held_out import HeldOutPiece, HeldOutShare
from orchestrator.units import first_few, named_ranks

if TYPE_CHECKING:
    from orchestrator.engine.torch.fully_sharded import FullySharded


def peak_memory_bytes(device: torch.device) -> int:
    """Return the largest memory so far: the GPU's if it computes there, or the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere else


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return their memory on this rank, counted once where it is shared."""
    parts = map(local_part, tensors)
    return sum({(t.device, t.data_ptr(), t.numel()): t.nbytes for t in parts}.values())


# ------------------------------------------------------------------ Engine


class TorchEngine(Engine):
    """An `Engine` that also `Survives`, `CopiesState`, `ShowsGradients` and `RecomputesLeaves`; see
    there for the methods.

    Building one is collective: it builds the job's model, the same on every rank, and all that
    trains it.

    Args:
        group: the ranks; its device is where the model lives.

    Raises:
        JobError: `model()` or `dataset()` give what they must not, a scheduler hangs on the job's
            optimizer, or replicas differ.
        ConfigError: settings or an optimizer that cannot be used, or `settings.survive` with a
            transport whose collectives cannot be left, or a job that calls collectives of its own.
    """

    def __init__(self, job: Job, settings: EngineSettings, group: BaseGroup) -> None:
        talks = bool(getattr(job, "talks_in_window", False))
        refusal = next(interrupt_refusals(group.transport, talks=talks, explicit=True), None)
        if settings.survive and refusal:
            raise ConfigError(refusal)
        self._job, self._settings, self._group = job, settings, group
        reproducible = settings.reduction == "reproducible"
        if reproducible:
            be_deterministic()
        self._reproducible = reproducible
        # The same on all ranks, so the model begins alike without sending it.
        seed_everything(derived_seed("model", settings.seed))
        model = job.model()
        if not isinstance(model, Module):
            raise JobError(f"model() must give a torch.nn.Module, but gives {type(model).__name__}")
        check_filled(model, sharded=settings.shard_model != "none")
        if settings.precision == "float64":
            model = doubled(model)
        # A model in shards may be larger than a device; `fully_shard` moves it there, part by part.
        if settings.shard_model == "none":
            model = model.to(group.device)
        self.model, norms = with_norms(model, settings.norm)
        self._replaced_norm = settings.norm if norms else ""
        model_state(self.model)  # refuses at once what a checkpoint cannot hold
        if settings.shard_model != "none":
            from orchestrator.engine.torch.fully_sharded import form_replicate_group, shard_model

            shard_model(job, self.model, group, settings.shard_model)
            form_replicate_group(group, settings.shard_model)
        optimizer = getattr(job, "optimizer", lambda _: None)(self.model)
        check_builder(settings.optimizer, type(job).__name__, own=optimizer is not None)
        if optimizer is None:
            optimizer = build_optimizer(self.model, settings.optimizer)
        else:
            check_optimizer(optimizer, f"{type(job).__name__}.optimizer")
            refuse_scheduler(optimizer.param_groups, job)
        accumulator = Accumulator(
            self.model,
            optimizer,
            group,
            settings,
            silent=not talks,
            warn_about_layers=False,  # `warnings` does, for the run
        )
        self._accumulate(accumulator)
        self._taken = threading.Event()  # what is to be saved was copied, so it may change
        self._taken.set()
        self._modes = modes_of(self.model)
        self._job_state = job_state_of(job, self.model, optimizer)
        self._window: Window | None = None  # until its boundary is over
        self._done, self._trains = 0, self.model.training
        # After a loss: see `_undo` and `catch_up`.
        self._whole_state: dict[str, Any] | None = None  # the optimizer's, between two groups
        self._incomplete = False  # a part of the state was lost, and what is kept is of no use
        self._scale_before: dict[str, float] = {}
        self._forward_before: ForwardState | None = None
        self._buffers = [name for name, _ in self.model.named_buffers()]
        # Each rank may leave a window, and be the one that saves what was before it.
        self._restores_forward = settings.survive or bool(self._buffers)
        self._modules = list(self.model.named_modules())
        self._frozen = frozen_modules(self._modules)  # whose buffers all ranks have in common
        self._changed_modes: set[str] = set()  # by the latest `after_update`
        after_update = getattr(job, "after_update", None)
        own = getattr(after_update, "__func__", after_update)
        self._has_after_update = own not in (None, Job.after_update)
        self._is_first = True  # this process has not ended a window yet
        # Each until it has nothing left to see.
        self._forward_watch: ForwardWatch | None = ForwardWatch(self.model)
        self._after_update_watch: AfterUpdateWatch | None = None
        if self._has_after_update:
            self._after_update_watch = AfterUpdateWatch(self.model)
        self._is_sum: bool | None = None  # the job's loss; None before the probe
        self._warnings = norms + machine_warning(self.gather, settings.reduction)

    def _accumulate(self, accumulator: Accumulator) -> None:
        """Make this the engine's accumulator, and rebuild what depends on it."""
        self.accumulator, self._clock = accumulator, accumulator.clock
        accumulator.learning_rate.keep()  # as the others of a new group gave it
        # The state of a sharded optimizer, until the next window.
        self._gathered: dict[str, Any] | None = None
        self._coupled = None
        if is_coupled(self._job):
            self._coupled = CoupledWindows(
                self._job,
                self.model,
                self._settings,
                accumulator,
            )

    @property
    def _sharded(self) -> FullySharded | None:
        return self.accumulator.fully_sharded

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        return () if self._sharded is None else self._sharded.shard_ranks

    # ------------------------------------------------------------------ an update

    def batches(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        return self._batches_of(dataset_of(self._job), micro_batches)

    def held_out_batches(
        self, data: HeldOutData, micro_batches: Iterable[MicroBatch]
    ) -> Iterator[Any]:
        return self._batches_of(data, micro_batches)

    def _batches_of(self, dataset: Any, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        return loader.batches(
            micro_batches,
            dataset=dataset,
            job=self._job,
            seed=self._settings.seed,
            workers=self._settings.loader_workers,
            pin_memory=self._group.device.type == "cuda",
        )

    def begin_window(self, window: Window) -> None:
        # Before `_keep_for_undo`, which would else keep the buffers from before.
        self._share_frozen_buffers()
        self._job_state.watch()
        self._keep_for_undo()
        self._window, self._done = window, 0
        if self._forward_watch is not None:
            self._forward_watch.begin_window()
        self._gathered = None
        self.accumulator.learning_rate.check(f"before update {window.update}")
        if self._coupled is not None:
            self._coupled.begin()
        self.accumulator.begin_window(
            update=window.update,
            learning_rate=window.learning_rate,
            leaves=window.micro_step_count if self._reproducible else None,
            expected_weight=window.samples,  # right wherever the weight is the number of samples
        )

    def _share_frozen_buffers(self) -> None:
        """Have all ranks take rank 0's buffers of modules that a job has put into evaluation mode.

        Statistics of a batch norm, which are each rank's own, are constants of the model from then
        on; a restart begins with rank 0's. Collective where the job has its own `after_update`, and
        the model buffers: ranks agree on the modules first, since a job may treat them differently.

        Raises:
            JobError: on all ranks alike; `after_update` has changed modes on some ranks alone.
        """
        before, self._frozen = self._frozen, frozen_modules(self._modules)
        changed, self._changed_modes = self._changed_modes, set[str]()
        if self._group.size == 1 or self.shard_ranks or not self._has_after_update:
            return
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in self._buffers))
        if not owners:
            return
        facts = [
            float(name in known) for known in (self._frozen, changed, before) for name in owners
        ]
        rows = gather_numbers(self._group, facts)
        count = len(owners)
        new: set[str] = set()
        for number, name in enumerate(owners):
            frozen, by_job, earlier = (
                [row[number + count * part] for row in rows] for part in range(3)
            )
            if all(frozen):
                if not all(earlier):
                    new.add(name)
            elif any(frozen) and 0 < sum(by_job) < len(rows):
                odd = [rank for rank, is_frozen in enumerate(frozen) if is_frozen]
                raise JobError(
                    f"{type(self._job).__name__}.after_update() differs between ranks: it leaves "
                    f"{name or 'the model'} in evaluation mode on {named_ranks(odd)} alone. Call "
                    "eval() or train() there on all ranks, by the update's number"
                )
        buffers = dict(self.model.named_buffers())
        names = [name for name in self._buffers if name.rpartition(".")[0] in new]
        names = [name for name in names if not is_opaque(buffers[name])]
        if names:
            take_buffers(self._group, self.model, {name: buffers[name] for name in names})

    def micro_step(self, batch: Any, micro_batch: MicroBatch) -> None:
        window = self._window
        if window is None or micro_batch.update != window.update:
            raise RuntimeError(f"a micro-step of update {micro_batch.update} in no window of it")
        # Not of a model in shards, whose forward is collective.
        probes = self._is_sum is None and not self.shard_ranks
        # A graph that looks like a mean's is refused only where the probe has not compared the loss
        # itself: some sums look like one.
        self.accumulator.refuse_means = not (probes or self._is_sum)
        with self._translated_errors("a micro-step"):
            if self._coupled is not None:
                self._coupled.micro_step(batch, micro_batch)
            else:
                self._done += 1
                steps = len(window.micro_batches)
                self.accumulator.padding = self._done > steps - window.padding
                # By the place in the update, so dropout does not depend on which rank computes it.
                seed = derived_seed(
                    "step", self._settings.seed, micro_batch.update, micro_batch.start
                )
                with self._clock.compute:
                    seed_everything(seed)
                    loss = self._loss(batch)
                leaf = micro_batch.number if self._reproducible else None
                self.accumulator.backward(loss, last=self._done == steps, leaf=leaf)
            if probes:
                self._probe(micro_batch)

    def _probe(self, micro_batch: MicroBatch) -> None:
        """Compare the losses of a few samples, after the first micro-step of this process."""
        self._is_sum = False  # where the probe fails, too
        with self._job_state.isolated():
            self._is_sum = check_samples(
                self._job,
                self.model,
                micro_batch.indices,
                device=self._group.device,
                precision=self._settings.precision,
                seed=self._settings.seed,
                norm=self._replaced_norm,
            )
        # What the graph looks like is a guess, which does not count where the loss was compared.
        if self.accumulator.mean_seen and not self._is_sum:
            raise JobError(self.accumulator.mean_seen)

    def _translated_errors(self, what: str) -> AbstractContextManager[None]:
        """Translate errors of FSDP's collectives about a peer, as those of our groups are."""
        if not self.shard_ranks:
            return nullcontext()
        return peer_lost_during(f"{what} of a model in shards", self._group.rank)

    def _loss(self, batch: Any) -> Any:
        batch = moved(batch, self._group.device, double=self._settings.precision == "float64")
        try:
            with self.accumulator.precision.forward():
                return self._job.loss(self.model, batch)
        except RuntimeError as error:
            if self.shard_ranks and "mixed torch.Tensor and DTensor" in str(error):
                raise JobError(
                    f"{type(self._job).__name__}.loss() computes with parts of the model, whose "
                    "weights are in shards (engine.shard_model): they are gathered where a module "
                    "that fully_shard() took is called. Call the model itself, or define "
                    "shard(self, model, mesh), which calls fully_shard() on those parts"
                ) from error
            raise

    def boundary(self, *, stop: bool = False) -> BoundaryReport:
        self._taken.wait()  # a snapshot may still copy the weights that the step changes
        if self._coupled is not None and self._window is not None:
            self._coupled.backward(self._window)
        self.accumulator.learning_rate.check("inside a window")
        if self._trains and not self.model.training:
            raise left_in_evaluation(self._job, "model.eval()", "model.train()")
        if self._window is not None:
            if self._forward_watch is not None and self._window.micro_batches:
                self._forward_watch.end_window()
                if self._forward_watch.done:
                    self._forward_watch = None
            self._seed("boundary", self._window.update)  # what an optimizer draws
        report = self.accumulator.boundary(stop=stop)
        if self._is_first:
            self._end_first_window()
        self.accumulator.learning_rate.keep()  # some optimizers change it themselves
        if report.applied:
            if after_update := getattr(self._job, "after_update", None):
                # Again, since ranks with shards of an optimizer may have drawn unequally much.
                self._seed("after", report.update)
                self._update_job(after_update, report.update)
            self.accumulator.learning_rate.check(f"in after_update of update {report.update}")
        self._window = None
        return report

    def _seed(self, purpose: str, *position: int) -> None:
        """Seed the generators with what is equal on all ranks and after a restart."""
        seed_everything(derived_seed(purpose, self._settings.seed, *position))

    def _update_job(self, after_update: Callable[[Module, int], None], update: int) -> None:
        """Call the job after an update, and note the modules that it freezes or thaws."""
        modes = frozen_modules(self._modules) if self._has_after_update else set[str]()
        watch = self._after_update_watch
        if watch is not None:
            watch.begin()
        with torch.no_grad():
            after_update(self.model, update)
        if self._has_after_update:
            self._changed_modes = modes ^ frozen_modules(self._modules)
        if watch is not None:
            watch.end()
            if watch.done:
                self._after_update_watch = None

    def _end_first_window(self) -> None:
        """Warn of buffers that the forward has changed, if another split would change the update.

        Later windows have no copy to compare with, unless they need it to undo.
        """
        self._is_first = False
        split = self._group.size > 1 or self._done > 1
        if split and self._forward_before is not None:
            warn_of_changed_buffers(self._forward_before, "in after_update()")
        if not self._restores_forward:
            self._forward_before = None  # frees the copies

    # ------------------------------------------------------------------ a leaf again

    def leaf_digest(self) -> int:
        return self.accumulator.leaf_digest()

    def recompute_leaf(self, micro_batch: MicroBatch) -> RecomputedLeaf:
        layers = [vars(layer) for _, layer in self._modules]
        with (
            kept_random_state(),
            self._job_state.preserved() as changed,
            kept_attributes(layers),
            kept_state(self.model),
        ):
            # In this process: workers fetch ahead, in the order of this rank's own leaves.
            [batch] = loader.batches(
                [micro_batch],
                dataset=dataset_of(self._job),
                job=self._job,
                seed=self._settings.seed,
            )
            seed = derived_seed("step", self._settings.seed, micro_batch.update, micro_batch.start)
            seed_everything(seed)
            digest = self.accumulator.recompute(lambda: self._loss(batch))
        return RecomputedLeaf(digest=digest, changed=changed)

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        group = self._group
        # This exchange is the engine's own; silence is for the job's.
        silence, group.silence = group.silence, None
        try:
            with self._clock.wait:
                return self.gather(numbers)
        finally:
            group.silence = silence

    # ------------------------------------------------------------------ around updates

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        return gather_numbers(self._group, numbers)

    def evaluate(self) -> dict[str, float]:
        changed = (
            "evaluate() changed %s, and it is called on rank 0 alone, so ranks "
            "would differ: evaluate a copy, as of copy.deepcopy(model)"
        )
        with kept_random_state(), self._evaluation(changed):
            self._seed("evaluation")  # the same numbers in each, as in `evaluate_held_out`
            figures = getattr(self._job, "evaluate", lambda _: {})(self.model)
        return checked_figures(figures, self._job)

    def evaluate_held_out(
        self,
        data: HeldOutData,
        share: HeldOutShare,
        batches: Iterator[Any],
        before_piece: Callable[[int], None],
    ) -> HeldOutReport:
        self._taken.wait()
        group, settings, mark = self._group, self._settings, self._group.mark()
        sums = HeldOutSums(data, settings.metric_names, to_floats)

        def row_of(piece: HeldOutPiece, batch: Any) -> Sequence[Any]:
            # The same random numbers in each evaluation, on any rank.
            seed_everything(derived_seed("held-out", settings.seed, piece.start))
            return loss_numbers(self._loss(batch), settings.metric_names)

        with (
            buffers_of_writer(group, self.model, self._buffers),
            self._evaluation("loss() changed %s in an evaluation: change it in after_update()"),
            kept_random_state(),
            self._job_state.isolated(),
        ):
            group.silence = "in an evaluation"
            try:
                sums.add_share(share, batches, before_piece, row_of)
            finally:
                group.silence = None
            # HCCL has no float64.
            dtype = torch.float32 if group.transport == "hccl" else torch.float64
            # In limbs, whose sums are exact in any order (common/trailer.py).
            bits = limb_bits(24 if dtype == torch.float32 else 53, group.size)
            numbers = torch.tensor(sums.numbers(bits), dtype=dtype, device=group.device)
        group.all_reduce_sum(numbers)
        figures = sums.figures(numbers.tolist(), bits, self.gather)
        sent = group.since(mark)
        return HeldOutReport(
            figures=figures, collectives=sent.collectives, bytes_on_wire=sent.bytes_on_wire
        )

    @contextmanager
    def _evaluation(self, mistake: str) -> Generator[None]:
        """Within it, the model is in evaluation mode and no gradients are recorded.

        Raises:
            JobError: the job's parameters are not as before then; `mistake` says so.
        """
        before = {} if self.shard_ranks else self._evaluated_state()
        with self._translated_errors("the evaluation"), in_evaluation(self.model), torch.no_grad():
            yield
        if self._sharded is not None:
            self._sharded.reshard()  # the optimizer steps shards
        after = self._evaluated_state() if before else {}
        if changed := [name for name, state in after.items() if state != before[name]]:
            raise JobError(f"{type(self._job).__name__}.{mistake % first_few(changed, 3)}")

    def _evaluated_state(self) -> dict[str, tuple[int, bool]]:
        """Return what an evaluation must leave as it is, by the parameters' names."""
        return {
            name: (version_of(parameter), parameter.requires_grad)
            for name, parameter in self.model.named_parameters()
        }

    def check_replicas(self) -> None:
        self.accumulator.check_replicas()
        check_same_job_state(self._group, self._job_state)

    def optimizer_used(self) -> dict[str, Any]:
        return described(self.accumulator.optimizer, self._settings.optimizer)

    def parameter_count(self) -> int:
        return self.accumulator.parameter_count()

    def gather_state(self) -> None:
        if self.accumulator.sharded:
            self._gathered = self.accumulator.optimizer_state()

    def holds_state(self) -> bool:
        return not self.accumulator.sharded or self._gathered is not None

    def part(self) -> int | None:
        return None if self._sharded is None else self._sharded.part

    def save_state(self, folder: Path) -> dict[str, Any]:
        return self._snapshot().save_state(folder)

    def snapshot(self) -> Snapshot:
        """Return what `save_state` would write now, for another thread. The next boundary waits."""
        snapshot = self._snapshot().keep()
        self._taken = snapshot.taken
        return snapshot

    def _snapshot(self) -> Snapshot:
        self._undo()  # of a window that this rank leaves
        part, gathered = self.part(), self._gathered
        if part is None and not self.holds_state():
            raise RuntimeError("a sharded state is saved on rank 0, after gather_state()")
        if part is not None:
            state = self.accumulator.optimizer.state_dict()
        else:
            state = gathered or self.accumulator.optimizer_state()
        extra = {
            "precision": self.accumulator.precision.state(),
            "modes": self._modes.changes(),
        }
        return Snapshot(
            self.model,
            state,
            extra,
            job=self._job_state.state(),
            copied=gathered is not None,
            part=part,
        )

    def load_state(self, folder: Path, extra: Mapping[str, Any]) -> None:
        load_model(self.model, folder, extra["model"])
        load_optimizer(
            folder,
            extra["optimizer"],
            self.accumulator.load_optimizer_state,
            {"": self.accumulator.optimizer},
        )
        self.accumulator.precision.load(extra["precision"])
        self._modes.apply(extra["modes"])
        self._frozen = frozen_modules(self._modules)
        self._job_state.load(load_job(folder, extra["job"]))
        self.accumulator.learning_rate.keep()
        self._incomplete = False

    def load_initial_state(self, folder: Path, extra: Mapping[str, Any]) -> None:
        optimizer = self.accumulator.optimizer
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self.load_state(folder, extra)
        # The saved groups have the other run's rates and weight decay.
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.update(own)
        self.accumulator.learning_rate.keep()

    def load_weights(self, path: Path) -> None:
        load_weights(self.model, path)

    def weights_sha256(self) -> str:
        with self._translated_errors("the digest of the weights"):
            return weights_sha256(self.model, keep=not self.shard_ranks or self._group.rank == 0)

    def extra_collectives(self) -> int:
        return int(self._coupled is not None and self._group.size > 1)  # its gather of embeddings

    def memory_bytes(self) -> dict[str, int]:
        state = self.accumulator.optimizer.state.values()
        # An optimizer may keep plain numbers of its own beside the states of parameters.
        states = (entries for entries in state if isinstance(entries, Mapping))
        tensors = (v for entries in states for v in entries.values() if isinstance(v, Tensor))
        return {
            "parameters": _bytes((*self.model.parameters(), *self.model.buffers())),
            "gradients": self.accumulator.gradient_bytes(),
            "optimizer": _bytes(tensors),
        }

    def gradients(self) -> dict[str, Tensor]:
        return self.accumulator.gradients()

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self._group.device)

    def warnings(self, micro_batches: int | None = None) -> list[str]:
        advices = advice(self.model, ranks=self._group.size, micro_batches=micro_batches)
        if self._reproducible:
            advices += compiled_advice(self.model)
        return [*self._warnings, *advices]

    # ------------------------------------------------------------------ another group
    # Weights and optimizer state change only in the optimizer's step, so a window that broke off
    # left them unchanged. State that a forward changes (batch norm statistics) and state that a
    # boundary may have changed before it broke off (the float16 loss scale) is restored to the
    # start of the window. The shard of an optimizer that is lost with its rank comes from the
    # newest checkpoint (`StateLost`).
    #
    # The engine of a new rank was built alone. It counts as behind all others and receives what
    # ranks that are behind receive.

    def _keep_for_undo(self) -> None:
        self._scale_before = self.accumulator.precision.state()
        self._modes.keep()
        self._job_state.keep()
        if not (self._restores_forward or self._is_first):
            return
        # Extra state takes long to get, from layers that pack numbers of a GPU into it.
        if self._forward_before is None:
            self._forward_before = ForwardState(self.model, extra=self._settings.survive)
        else:
            self._forward_before.keep()

    def _undo(self) -> None:
        """Restore the state at the beginning of the window under way, if any."""
        if self._window is not None:
            self.accumulator.precision.load(self._scale_before)
            self._modes.restore()
            self._job_state.restore()
            if self._forward_before is not None:
                self._forward_before.restore()
        self._window = None

    def newcomers_wait(self, waiting: bool) -> None:  # a plain setter
        self.accumulator.newcomers_wait = waiting

    def before_growth(self) -> None:
        # Newcomers have no shards: once they are in, the group could not put the state together.
        if self._settings.shard_optimizer:
            self._taken.wait()
            self._whole_state = self.accumulator.optimizer_state(self._group)

    def catch_up(self, group: BaseGroup, updates: int, progress: str) -> str | None:
        self._undo()
        self._taken.wait()
        rows = gather_numbers(group, [updates, self._incomplete])
        if incomplete := [rank for rank, row in enumerate(rows) if row[1]]:
            self._incomplete = True  # no rank's state counts until a checkpoint is loaded
            raise StateLost(incomplete)
        applied = [int(row[0]) for row in rows]
        newest, behind = max(applied), updates < max(applied)
        among = group
        if self._sharded is not None:
            among, applied = self._same_shards(group, updates, newest)
        sharded = self._settings.shard_optimizer
        try:
            whole = self._state_among(group) if sharded else None
        except StateLost:
            self._incomplete = True
            raise
        received = None
        if min(applied) != newest:
            source = applied.index(newest)
            state = self._state_to_send() if among.rank == source else {}
            text, received_state = send_state(among, source, progress, state)
            if behind:
                own_tensors = self.model.state_dict()
                self.model.load_state_dict(
                    {
                        name: as_sharded(value, own_tensors[name])
                        for name, value in received_state["model"].items()
                    }
                )
                if self._sharded is not None:
                    self._sharded.load_own_state(
                        self.accumulator.optimizer, received_state["optimizer"]
                    )
                elif whole is None:
                    self.accumulator.load_optimizer_state(received_state["optimizer"])
                self.accumulator.precision.load(received_state["precision"])
                self._modes.apply(received_state["modes"])
                self._job_state.load(received_state["job"])
                received = text
        self._whole_state = whole  # now that the weights are those that it belongs to
        return received

    def _state_to_send(self) -> dict[str, Any]:
        """Return the state for ranks that are behind: this rank's shards of a model in shards;
        without the state of a sharded optimizer.
        """
        state: dict[str, Any] = {
            "model": {name: local_part(value) for name, value in self.model.state_dict().items()},
            "precision": self.accumulator.precision.state(),
            "modes": self._modes.changes(),
            "job": self._job_state.state(),
        }
        if self._sharded is not None:
            state["optimizer"] = self._sharded.own_state(self.accumulator.optimizer)
        elif not self._settings.shard_optimizer:
            state["optimizer"] = self.accumulator.optimizer_state()
        return state

    def _same_shards(
        self, group: BaseGroup, updates: int, newest: int
    ) -> tuple[BaseGroup, list[int]]:
        """Return the ranks of `group` that hold the same shards as this one, and how many updates
        each has applied. Collective.

        Raises:
            StateLost: on all ranks; of some shards no rank has applied the newest update.
        """
        from orchestrator.engine.torch.fully_sharded import form_replicate_group

        form_replicate_group(group, self._settings.shard_model)
        among = cast("BaseGroup", group.replicate_group)
        applied = [int(row[0]) for row in gather_numbers(among, [updates])]
        rows = gather_numbers(group, [max(applied)])
        if lost := [rank for rank, row in enumerate(rows) if row[0] < newest]:
            self._incomplete = True
            raise StateLost(lost)
        return among, applied

    def _state_among(self, group: BaseGroup) -> dict[str, Any] | None:
        """Return all of a sharded optimizer's state, on every rank of `group`. Collective.

        If a rank was lost while the last group formed, some ranks hold all of it already.
        """
        have = [bool(row[0]) for row in gather_numbers(group, [self._whole_state is not None])]
        if not any(have):
            return self.accumulator.optimizer_state(group)
        _, received = send_state(group, have.index(True), "", self._whole_state or {})
        return self._whole_state or received

    def regroup(self, group: BaseGroup) -> None:
        earlier, self._group = self.accumulator, group
        earlier.close(release=True)
        if self._incomplete and self._sharded is None:
            # Some may have stepped; all are to load a checkpoint's anyway.
            broadcast_tensors(group, [parameter.detach() for parameter in self.model.parameters()])
        # Some ranks have begun the next window already, with its rate.
        if base := earlier.optimizer.defaults.get("lr"):
            earlier.learning_rate.set(float(base))
        # All continue with the writer's buffers, as at a resume.
        take_buffers(group, self.model, dict(self.model.named_buffers()))
        self._frozen = frozen_modules(self._modules)
        # A parameter that is frozen now may be thawed later: it stays among the trained ones.
        with self._modes.as_built():
            accumulator = Accumulator(self.model, earlier.optimizer, group, earlier.options)
        accumulator.take_over(earlier)
        if self._whole_state is not None:
            accumulator.load_optimizer_state(self._whole_state)
            self._whole_state = None
        self._accumulate(accumulator)
