"""A framework of NumPy: jobs work out their gradients themselves, SGD with momentum steps.

Its ranks start in a quarter of the time that torch's take. So whatever is about the starting,
stopping and losing of ranks, and not about what computes in them, is tested with it.
"""

import hashlib

import numpy as np
from safetensors.numpy import load_file, save_file
from toy_letters import Letters

from orchestrator.engine.api import BoundaryReport, Engine, Framework
from orchestrator.engine.common.clock import Clock
from orchestrator.engine.common.job_checks import check_fits, check_metric_names, checked_figures
from orchestrator.engine.common.replicas import ReplicaChecker
from orchestrator.engine.common.seeds import derived_seed
from orchestrator.engine.common.trailer import STOP, Trailer
from orchestrator.engine.common.update_policy import LossScale, UpdatePolicy
from orchestrator.errors import ConfigError

ONLY = {
    "reduction": "fast",
    "precision": "float32",
    "shard_optimizer": False,
    "survive": False,
    "loader_workers": 0,
}
MOMENTUM = 0.9


class Numpy(Framework):
    """`framework = "numpy"` of a job."""

    def form_group(self, spec):
        return Letters(spec)

    def build_engine(self, job, settings, group):
        return NumpyEngine(job, settings, group)

    def versions(self):
        return {"numpy": np.__version__}


class Weights(dict):
    """A model: float32 arrays by name. A job's `loss` adds to the `gradient` of each."""

    def __init__(self, arrays):
        super().__init__({name: array.astype(np.float32) for name, array in arrays.items()})
        self.gradient = {name: np.zeros_like(array) for name, array in self.items()}


class NumpyEngine(Engine):
    """See `orchestrator.engine.api.Engine`."""

    def __init__(self, job, settings, group):
        for name, value in ONLY.items():
            if getattr(settings, name) != value:
                raise ConfigError(f"numpy's {name} is {value}, not {getattr(settings, name)}")
        self._job, self._settings, self._group = job, settings, group
        self._data, self._names = job.dataset(), tuple(settings.metric_names)
        self._seed("model")
        self._model = Weights(job.model())
        self._velocity = {name: np.zeros_like(array) for name, array in self._model.items()}
        self._losses, self._clock, self._window = [], Clock(), None
        self._policy = UpdatePolicy(settings, LossScale(scales=False), self.gather)
        sizes = [array.size for array in self._model.values()]
        self._replica_checker = ReplicaChecker(
            [*self._model],
            sizes,
            [4] * len(sizes),
            digests=self._digests,
            gather=self.gather,
            ranks=group.size,
        )

    def _seed(self, purpose, *place):
        np.random.seed(derived_seed(purpose, self._settings.seed, *place) % 2**32)

    def _digests(self, pieces):
        arrays = [*self._model.values()]
        parts = [arrays[one.number].ravel()[one.start : one.end].tobytes() for one in pieces]
        return [int.from_bytes(hashlib.sha256(part).digest()[:8], "little") for part in parts]

    # an update

    def batches(self, micro_batches):
        for one in micro_batches:
            samples = [self._data[index] for index in one.indices]
            yield tuple(np.stack(column) for column in zip(*samples, strict=True))

    def begin_window(self, window):
        self._window, self._mark = window, self._group.mark()
        self._clock.begin()
        self._losses.clear()
        self._micro_steps = 0
        for gradient in self._model.gradient.values():
            gradient[...] = 0
        self._group.silence = f"in mid-window of update {window.update}"

    def micro_step(self, batch, micro_batch):
        with self._clock.compute:
            self._seed("step", micro_batch.update, micro_batch.start)
            loss = self._job.loss(self._model, batch)
            check_metric_names(loss.metrics, self._names)
            metrics = [float(loss.metrics[name]) for name in self._names]
            self._losses += [float(loss.weight), float(loss.total), *metrics]
            self._micro_steps += 1

    def boundary(self, *, stop=False):
        window, self._window = self._window, None
        trailer = Trailer.from_losses(self._losses, len(self._names))
        trailer.flags[STOP] = int(stop)
        self._replica_checker.write_digest(trailer, window.update)
        flat = np.concatenate([self._flat_gradient(), np.float32(trailer.numbers())])
        with self._clock.wait:
            self._group.silence = None
            self._group.all_reduce_sum(flat)
        gradient, sums = np.split(flat, [self.parameter_count()])
        totals = Trailer.from_numbers(sums.tolist())
        self._replica_checker.check(totals, window.update)
        stepped = None
        with self._clock.optimize:
            norm = float(np.linalg.norm(gradient))
            stepped = self._policy.norm_and_factor(window.update, totals, trailer, norm, list)
            if stepped is not None:
                self._step(gradient * np.float32(stepped[1]), window.learning_rate)
        if stepped is not None:
            self._job.after_update(self._model, window.update)
        sent = self._group.since(self._mark)
        return BoundaryReport(
            update=window.update,
            applied=stepped is not None,
            gradient_norm=stepped[0] if stepped else None,
            micro_steps=self._micro_steps,
            collectives=sent.collectives,
            bytes_on_wire=sent.bytes_on_wire,
            **totals.report(self._names),
            **self._clock.seconds(),
        )

    def _flat_gradient(self):
        return np.concatenate([array.ravel() for array in self._model.gradient.values()])

    def _step(self, gradient, learning_rate):
        start = 0
        for name, array in self._model.items():
            mine = gradient[start : start + array.size].reshape(array.shape)
            self._velocity[name] = np.float32(MOMENTUM) * self._velocity[name] + mine
            array[...] -= np.float32(learning_rate) * self._velocity[name]
            start += array.size

    # around updates

    def gather(self, numbers):
        row = np.array([numbers], np.float64)
        return self._group.all_gather(row).tolist()

    def evaluate(self):
        return checked_figures(self._job.evaluate(self._model), self._job)

    def check_replicas(self):
        self._replica_checker.check_all()

    def optimizer_used(self):
        return {"class": "SGD with momentum", "from": "toy_framework", "groups": []}

    def parameter_count(self):
        return sum(array.size for array in self._model.values())

    def save_state(self, folder):
        save_file(dict(self._model), folder / "weights.safetensors")
        save_file(self._velocity, folder / "optimizer.safetensors")
        return {}

    def load_state(self, folder, extra):
        del extra
        self._model.update(load_file(folder / "weights.safetensors"))
        self._velocity = load_file(folder / "optimizer.safetensors")

    def load_weights(self, path):
        found = load_file(path)
        kinds = [
            {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
            for arrays in (found, self._model)
        ]
        check_fits(*kinds)
        self._model.update(found)

    def weights_sha256(self):
        digest = hashlib.sha256()
        for name in sorted(self._model):
            digest.update(self._model[name].tobytes())
        return digest.hexdigest()

    def memory_bytes(self):
        size = 4 * self.parameter_count()
        return {"parameters": size, "gradients": size, "optimizer": size}
