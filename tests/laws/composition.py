"""Generated folders of configuration, and what a composition of them must say: a small oracle.

Each source states values of keys that no rule forbids; which one wins is written down here once, as
the documentation has it: base, files of groups, the user's primary, the command line.
"""

import dataclasses

import yaml
from hypothesis import strategies as st

KEYS = {
    "train.epochs": st.sampled_from([1.0, 2.0, 3.5]),
    "train.seed": st.integers(0, 9),
    "train.clip_norm": st.sampled_from([0.5, 1.0]),
    "accumulation.global_batch": st.integers(32, 64),
    "schedule.base_lr": st.sampled_from([0.1, 0.25]),
    "facts.parameters": st.integers(1, 99),
    "facts.dataset_samples": st.integers(100, 999),
    "run.name": st.sampled_from(["a", "b"]),
    "cluster.heartbeat_timeout_s": st.sampled_from([11.0, 12.0]),
    "job.width": st.integers(1, 9),
    "job.inner.depth": st.integers(1, 9),
    "job.inner.rate": st.sampled_from([0.5, 0.25]),
    "train.loader_workers": st.integers(1, 9),
    "optimizer.weight_decay": st.sampled_from([0.125, 0.5]),
}
OURS = {"job": ["digits", "line", "default"], "optimizer": ["adam", "sgd"], "tracker": ["none"]}
TARGETS = st.sampled_from(["my.A", "my.B", "jobs.digits.Digits"])


@dataclasses.dataclass
class Stated:
    """What one source says: dotted key to value, written as a file or as overrides."""

    values: dict

    def yaml(self, *, drop=""):
        tree = {}
        for dotted, value in self.values.items():
            *path, leaf = dotted.removeprefix(drop).split(".")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[leaf] = value
        return yaml.safe_dump(tree) if tree else ""


@st.composite
def stated(draw, *, target=None, keys=tuple(KEYS), most=5):
    chosen = draw(st.lists(st.sampled_from(keys), unique=True, max_size=most))
    values = {key: draw(KEYS[key]) for key in chosen}
    if target is not None and draw(target):
        values["job._target_"] = draw(TARGETS)
    return Stated(values)


SOMETIMES = st.sampled_from([False, False, True])


@dataclasses.dataclass
class Case:
    """A folder's files, a command line, and the sources that it has in rising precedence."""

    files: dict
    line: list
    sources: list

    def write(self, folder):
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def expected(self):
        """The last that was said of every key."""
        found = {}
        for source in self.sources:
            found |= source.values
        return found


@st.composite
def cases(draw):
    files, sources, line = {}, [], []
    if draw(st.booleans()):  # a job file of their own, under a name of ours as often as not
        name = draw(st.sampled_from(["mine", "digits", "line"]))
        own = draw(stated(target=st.just(True)))
        files[f"job/{name}.yaml"] = "# @package _global_\n" + own.yaml()
        # Under the default's name it is theirs even where nobody chooses it.
        chosen = draw(st.booleans()) if name == "digits" else True
        sources.append(own)
        line += [f"job={name}"] if chosen else []
    cluster = draw(st.booleans())
    if cluster:
        name = draw(st.sampled_from(["slurm", "site"]))
        own = draw(stated(keys=("cluster.heartbeat_timeout_s",), most=1))
        own.values["cluster.kind"] = "local"
        files[f"cluster/{name}.yaml"] = own.yaml(drop="cluster.")
        line.append(draw(st.sampled_from(["", "+"])) + f"cluster={name}")
    experiment = draw(st.one_of(st.none(), stated(target=SOMETIMES)))
    if experiment is not None:
        files["experiment/theirs.yaml"] = "# @package _global_\n" + experiment.yaml()
        line.append("experiment=theirs")
    primary = draw(st.one_of(st.none(), stated(target=SOMETIMES)))
    flags = []
    if primary is not None:
        flags = ["--config-name", "primary"]
        files["primary.yaml"] = "defaults:\n  - base\n  - _self_\n" + primary.yaml()
    typed = draw(stated(target=SOMETIMES))
    line += [f"{key}={value}" for key, value in typed.values.items()]
    # Files of groups come in the order of base's defaults list, then the primary's own words, then
    # what the command line adds to the defaults (the cluster), then its values.
    files_of_groups = [*sources, *([experiment] if experiment else [])]
    above = [*([primary] if primary else []), *([own] if cluster else []), typed]
    return Case(files, [*flags, *draw(st.permutations(line))], [*files_of_groups, *above])
