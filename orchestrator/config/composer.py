"""Composition of a command line, or of a sweep's points, into checked configurations."""

from __future__ import annotations

import pickle
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hydra import __version__
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import DefaultCompletionPlugin
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from orchestrator.config.app_place import AppPlace
from orchestrator.config.command_line import PRIMARY, CommandLine, check_overrides, key_of, spelled
from orchestrator.config.guard import OWN_LAUNCHER, check_arguments, guarded
from orchestrator.config.job_source import builds_optimizer
from orchestrator.config.loader import OF_A_POINT, Loader, interpolations, within
from orchestrator.config.program import is_program
from orchestrator.config.reading import read_config, unknown_keys
from orchestrator.config.schema import Config
from orchestrator.errors import EXIT_FINISHED, ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """A composed configuration as plain values, not yet checked.

    Attributes:
        values: every interpolation resolved.
        overrides: that it was composed with, as typed.
        sweeps: whether a sweep is asked for, by -m or by the configuration itself.
        sweep_folder: where its points are gathered, unless `run.dir` says otherwise.
        point_folder: in it, this point's.
    """

    values: dict[str, Any]
    overrides: tuple[str, ...]
    sweeps: bool
    sweep_folder: Path
    point_folder: Path

    def config(self) -> Config:
        """Checked against the schema and the rules.

        Raises:
            ConfigError: unknown keys, wrong types, values that cannot be used.
        """
        if sentences := unknown_keys(self.values):
            raise ConfigError("\n".join(sentences))
        with guarded():
            return read_config(self.values)


def at_home(value: Any) -> Any:
    """`~/…` in a job's arguments, which are paths then, as the shell would have expanded it; a
    program's command has been the shell's already.
    """
    if isinstance(value, dict) and is_program(value):
        return {key: v if key == "command" else at_home(v) for key, v in value.items()}
    if isinstance(value, str):
        return str(Path(value).expanduser()) if value.startswith("~/") else value
    if isinstance(value, dict):
        return {key: at_home(inner) for key, inner in value.items()}
    return [at_home(inner) for inner in value] if isinstance(value, list) else value


CORE = "hydra._internal.core_plugins"
BASIC_SWEEPER = f"{CORE}.basic_sweeper.BasicSweeper"
LAUNCHERS = (
    f"{CORE}.basic_launcher.BasicLauncher",
    "hydra_plugins.orchestrator_launcher.OrchestratorLauncher",
)
UNUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "launcher._target_": (LAUNCHERS, OWN_LAUNCHER.format("hydra/launcher")),
    "launcher.cluster": ((asdict(AppPlace()),), "points run where the section cluster says"),
    "sweeper.max_batch_size": ((None,), "all points of a sweep are checked before one runs"),
    "run.dir": ((".", "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"), "a run's folder is run.dir=…"),
    "output_subdir": ((None, ".hydra"), "a run's folder says all of it: config.yaml"),
    "job.chdir": ((None, False), "a run works in the folder that it was started from"),
    "job.env_set": (({},), "variables of the ranks are cluster.environment={NAME: value}"),
    "job.env_copy": (([],), "variables of the ranks are cluster.environment={NAME: value}"),
    "callbacks": (({},), "nothing of Hydra's runs here; metrics.jsonl is written every update"),
}  # fmt: skip
"""Key below `hydra`: the values that change nothing, and what to do instead."""


PARAMS = "hydra.sweeper.params"
SECTIONS = ("sweeper", "launcher", "job", "run", "sweep")


def refuse_replaced(hydra: DictConfig) -> None:
    """Raise `ConfigError` where a section of Hydra's settings became a single value."""
    for name in SECTIONS:
        if not OmegaConf.is_dict(OmegaConf.select(hydra, name)):
            raise ConfigError(
                f"hydra.{name} is a group of settings of Hydra's own and cannot be one value; "
                f"leave hydra.{name} out"
            )


def refuse_typed_params(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` where what a file says of a sweep was typed; OmegaConf falls over it."""
    for override in overrides:
        if override.lstrip("+~").startswith(PARAMS):
            raise ConfigError(
                f"{PARAMS} is a file's way to say what is swept; on the command line each "
                f"parameter stands for itself, as in -m train.seed=1,2"
            )


def refuse_unused(hydra: DictConfig) -> None:
    """Raise `ConfigError` for what is set below `hydra` and would be ignored."""
    wrong: list[str] = []
    for key, (harmless, way) in UNUSED.items():
        parent, _, leaf = key.rpartition(".")
        node = OmegaConf.select(hydra, parent) if parent else hydra
        value = OmegaConf.to_container(node).get(leaf) if node else None  # type: ignore[union-attr]
        if value is not None and value not in harmless:
            wrong.append(f"hydra.{key}={value} means nothing here: {way}")
    if wrong:
        raise ConfigError("\n".join(wrong))


MOST_SHAPES = 64  # kept compositions, of some MiB each
FOLDERS = ("hydra.sweep.dir", "hydra.sweep.subdir")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(\.[0-9]+)?")  # as Python reads it, and Hydra
KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*")
SETTING = (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """One override of a point.

    Attributes:
        way: `key=`, `+key=`, `++key=` or `~key`.
        value: None as well where it is not `plain`.
        plain: it sets one value in its place, and may be another one in another point.
        sets: it sets values, and chooses no file.
    """

    text: str
    key: str
    way: OverrideType
    value: Any
    plain: bool
    sets: bool


def _overlap(one: str, other: str) -> bool:
    return within(one, other) or within(other, one)


class Alike:
    """Knows the compositions that were made, and composes what differs from one in values alone.

    Args:
        primary: name of the primary configuration.
        telling: keys that say what a composition is made of, so that no value of theirs is plain.
    """

    def __init__(self, loader: Loader, primary: str, telling: Collection[str]) -> None:
        self._loader, self._primary, self._telling = loader, primary, telling
        self._words: dict[str, Word] = {}
        self._numbers: dict[tuple[str, type], Word] = {}
        self._groups: dict[str, bool] = {}
        self._repository: Any = None
        self._shapes: dict[Any, Shape | tuple[Any, ...] | None] = {}

    def composed(self, number: int, overrides: Sequence[str]) -> Composed | None:
        """A point as composing it whole would have it; None where that has to be done."""
        words = self._read(overrides)
        key = _shape_of(words) if words else None
        shape = self._shapes.get(key)
        if words is None or shape is None:
            return None
        if isinstance(shape, tuple):  # the second of its kind: worth to be looked at
            shape = self._shapes[key] = self._shape(*shape)
        return shape.point(number, overrides, words) if shape else None

    def keep(self, overrides: Sequence[str], found: DictConfig, whole: Composed) -> None:
        """Remember a composition that was just made."""
        words = self._read(overrides)
        if words and len(self._shapes) < MOST_SHAPES:
            before = frozenset(self._loader.interpolated)
            self._shapes.setdefault(_shape_of(words), (found, whole, words, before))

    def _read(self, overrides: Sequence[str]) -> list[Word] | None:
        """None where composing them says what is wrong, or where they choose other files."""
        try:
            words = [self._words.get(text) or self._number(text) for text in overrides]
        except HydraException:
            return None
        return None if any(word.key == "hydra.searchpath" for word in words) else words

    def _number(self, text: str) -> Word:
        """A word; where it is another number for a key that had one, without Hydra's parser."""
        key, _, value = text.partition("=")
        found = NUMBER.fullmatch(value)
        kind = float if found and found[1] else int
        like = self._numbers.get((key, kind)) if found else None
        word = replace(like, text=text, value=kind(value)) if like else self._word(text)
        if found and word.plain and type(word.value) is kind:
            self._numbers[key, kind] = word
        return word

    def _word(self, text: str) -> Word:
        [parsed] = OverridesParser.create().parse_overrides([text])
        key = parsed.key_or_group
        if key not in self._groups:
            if self._repository is None:
                self._repository = self._loader.files(self._primary)
            self._groups[key] = self._repository.group_exists(key)
        sets = not self._groups[key] or parsed.package is not None
        plain = sets and self._is_plain(parsed)
        word = Word(
            text=text,
            key=key,
            way=parsed.type,
            value=parsed.value() if plain else None,
            plain=plain,
            sets=sets,
        )
        self._words[text] = word
        return word

    def _is_plain(self, parsed: Override) -> bool:
        key = parsed.key_or_group
        if parsed.type not in SETTING or parsed.value_type is not ValueType.ELEMENT:
            return False
        if parsed.package is not None or not KEY.fullmatch(key):
            return False
        if within(key, "hydra") or any(_overlap(key, told) for told in self._telling):
            return False
        value = parsed.value()
        if isinstance(value, str):
            return "${" not in value and value != "???"
        return value is None or isinstance(value, bool | int | float)

    def _shape(
        self, found: DictConfig, whole: Composed, words: Sequence[Word], before: frozenset[str]
    ) -> Shape | None:
        """None where another point's values could mean more than their places."""
        referring = interpolations(found)
        paths = before | referring.keys()
        setting = [word for word in words if word.sets]
        for number, word in enumerate(setting):
            if word.way not in SETTING or any(within(word.key, path) for path in paths):
                return None
            others = setting[:number] + setting[number + 1 :]
            if word.plain and any(_overlap(word.key, other.key) for other in others):
                return None
            if word.plain and not _is_leaf(found, word.key):
                return None
        if any(_overlap(path, told) for path in paths for told in self._telling):
            return None
        ours: dict[str, tuple[str, ...]] = {}
        for path, names in referring.items():
            if not within(path, "hydra") or path in FOLDERS:
                if names is None:
                    return None
                ours[path] = names
        return Shape(found, whole, words, ours)


def _shape_of(words: Sequence[Word]) -> Any:
    return tuple((word.key, word.way) if word.plain else word.text for word in words)


class Shape:
    """One composition, in which points set their values.

    Args:
        found: as Hydra composed it; changed from here on.
        words: that it was composed with.
        referring: all that may have to be worked out anew, and to what it refers.
    """

    def __init__(
        self,
        found: DictConfig,
        whole: Composed,
        words: Sequence[Word],
        referring: Mapping[str, Collection[str]],
    ) -> None:
        self._found, self._whole, self._referring = found, whole, referring
        self._values = pickle.dumps(whole.values)
        self._original = [word.text for word in words]
        self._standing = list(self._original)
        self._folders = {key: _worked_out(found, key) for key in FOLDERS}
        self._affected = cache(self._find_affected)

    def point(
        self, number: int, overrides: Sequence[str], words: Sequence[Word]
    ) -> Composed | None:
        """The point of these overrides; None where a value is none that its place takes."""
        values = pickle.loads(self._values)  # noqa: S301  # what was put there a moment ago
        try:
            self._set(number, words)
            changed = frozenset(
                word.key
                for word, before in zip(words, self._original, strict=True)
                if word.text != before
            )
            found = {key: _worked_out(self._found, key) for key in self._affected(changed)}
            for key, value in found.items():
                if not within(key, "hydra"):
                    _put(values, key.split("."), value)
            folder, part = ({**self._folders, **found}[key] for key in FOLDERS)
        except (OmegaConfBaseException, TypeError, ValueError, LookupError):
            return None  # composed whole, it is refused in the right words
        if "job" in values:
            values["job"] = at_home(values["job"])
        return replace(
            self._whole,
            values=values,
            overrides=tuple(overrides),
            sweep_folder=Path(folder),
            point_folder=Path(folder, str(part)),
        )

    def _set(self, number: int, words: Sequence[Word]) -> None:
        """Make this point's of the composition."""
        for index, word in enumerate(words):
            if word.plain and self._standing[index] != word.text:
                self._standing[index] = ""  # until it is known to be one that can be set
                OmegaConf.update(self._found, word.key, word.value)
                self._standing[index] = word.text
        hydra = self._found.hydra
        with read_write(hydra), open_dict(hydra):
            hydra.job.num, hydra.job.id = number, str(number)

    def _find_affected(self, keys: frozenset[str]) -> list[str]:
        """These keys, and what refers to them, or to others that do."""
        reached = [*keys, *OF_A_POINT]
        while more := [
            path
            for path, names in self._referring.items()
            if path not in reached and any(_overlap(n, key) for n in names for key in reached)
        ]:
            reached += more
        return [key for key in reached if key not in OF_A_POINT]


def _worked_out(found: DictConfig, key: str) -> Any:
    value = OmegaConf.select(found, key, throw_on_missing=True)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _is_leaf(found: DictConfig, key: str) -> bool:
    value = OmegaConf.select(found, key)
    return value is not None and not OmegaConf.is_config(value)  # what is null may be a section


def _put(values: Any, keys: Sequence[str], value: Any) -> None:
    """Set one of plain values. Raises `LookupError`, `ValueError` where there is no such place."""
    for key in keys[:-1]:
        values = values[int(key)] if isinstance(values, list) else values[key]
    last: Any = int(keys[-1]) if isinstance(values, list) else keys[-1]
    values[last]  # it was there before
    values[last] = value


IDENTITY = {"job": ("_target_",), "optimizer": ("_target_", "name")}
"""What says which job or optimizer a section describes; its other keys are that one's arguments."""


class Composer:
    """Composes what one command line asks for, and the points of its sweep.

    Raises:
        ConfigError: `--config-dir` is no folder.
    """

    def __init__(self, line: CommandLine) -> None:
        check_arguments(line.overrides)
        self.line = line
        self.params: list[str] = []  # what the configuration itself sweeps over
        self.searches = False  # whether points are chosen by what came of earlier ones,
        self.own_search = False  # by us
        self.loader = Loader(line.config_dir)
        telling = [f"{section}.{key}" for section, keys in IDENTITY.items() for key in keys]
        self._alike = Alike(self.loader, line.config_name, telling)
        OmegaConf.register_new_resolver("sweep_name", lambda: self._sweep_name, replace=True)

    @cached_property
    def _sweep_name(self) -> str:
        """The name of the folder of this line's sweep: the same for the same keys, whatever values
        they are swept over, so that the line typed again finds what it has made.
        """
        with guarded():
            return self.loader.sweep_name(self.overrides, self.line)

    def compose(self) -> Composed:
        """The configuration of a run, or what all points of a sweep have in common.

        Raises:
            ConfigError: what cannot be composed, in words.
        """
        mode = RunMode.MULTIRUN if self.line.multirun else RunMode.RUN
        with guarded():
            refuse_typed_params(self.line.overrides)
            found = self.load(self.overrides, mode)
            asked = OmegaConf.select(found, "hydra.mode")
            if asked == RunMode.RUN and self.line.multirun:
                raise ConfigError("-m asks for a sweep, but hydra.mode=RUN for none; leave one out")
            sweeps = self.line.multirun or asked == RunMode.MULTIRUN
            if not sweeps:
                self.loader.refuse_choices(self.overrides)
            refuse_replaced(found.hydra)
            theirs = found.hydra.sweeper.get("_target_") != BASIC_SWEEPER
            self.own_search = OmegaConf.select(found, "sweep.search") not in (None, "none")
            if theirs and self.own_search:
                raise ConfigError(
                    "sweep.search and hydra/sweeper=… are two searches; leave one of them out"
                )
            self.searches = theirs or self.own_search
            if self.own_search and not sweeps and not self.line.cfg:
                raise ConfigError("sweep.search chooses the points of a sweep, so it needs -m")
            params = found.hydra.sweeper.get("params") or {}
            self.params = [spelled(f"{key}={value}") for key, value in params.items()]
            if sweeps:
                self.loader.refuse_twice(self.overrides)
            return self._composed(found, self.line.overrides, sweeps=sweeps)

    @property
    def overrides(self) -> list[str]:
        """As Hydra takes them."""
        sweep = self.line.multirun
        return [spelled(override, sweep=sweep) for override in self.line.overrides]

    @property
    def stated(self) -> list[str]:
        """What is swept over: the configuration's own words, and the line's."""
        return [*self.params, *self.overrides]

    def points(
        self, overrides: Sequence[Sequence[str]], first: int = 0
    ) -> list[Composed | ConfigError]:
        """These points of the sweep that `compose` found, or why one cannot be composed.

        Args:
            first: the number of the first.
        """
        found: list[Composed | ConfigError] = []
        for number, given in enumerate(overrides, first):
            try:
                found.append(self._point(number, [spelled(override) for override in given]))
            except ConfigError as error:
                found.append(error)
        return found

    def _point(self, number: int, overrides: Sequence[str]) -> Composed:
        with guarded():
            if alike := self._alike.composed(number, overrides):
                return alike
            self.loader.interpolated.clear()
            found = self.load(overrides, RunMode.RUN)
            with open_dict(found.hydra.job):
                found.hydra.job.num, found.hydra.job.id = number, str(number)
            whole = self._composed(found, overrides)
            self._alike.keep(overrides, found, whole)
            return whole

    def load(self, overrides: Sequence[str], mode: RunMode) -> DictConfig:
        """Compose; again without each shipped default that the user's statements replace.

        Args:
            overrides: as Hydra takes them.
        """
        given = list(overrides)
        while True:
            found = self._loaded(given, mode)
            group = next((g for g in IDENTITY if self._gives_way(g, found, given)), None)
            if group is None:
                return found
            given.append(f"~{group}")

    def _loaded(self, given: list[str], mode: RunMode) -> DictConfig:
        name = self.line.config_name
        try:
            return self.loader.load_configuration(name, given, mode, validate_sweep_overrides=False)
        except HydraException as error:
            if "Multiple values for cluster" not in str(error):
                raise
        # The primary configuration lists the group after all: here Hydra wants no plus.
        given[:] = [o.removeprefix("+") if key_of(o) == "cluster" else o for o in given]
        return self.loader.load_configuration(name, given, mode, validate_sweep_overrides=False)

    def _gives_way(self, group: str, found: DictConfig, given: Sequence[str]) -> bool:
        """Whether a shipped file that nobody chose describes another job (or optimizer) than the
        one that is stated, so that its keys are not meant for it.
        """
        section = OmegaConf.select(found, group)
        if not section or f"~{group}" in given:  # there is no file of the group any more
            return False
        keys = [key_of(override) for override in given]
        typed = any(key == group or key.startswith(f"{group}.") for key in keys)
        target = OmegaConf.select(found, "job._target_")
        own = group == "optimizer" and isinstance(target, str) and builds_optimizer(target)
        files = self.line.config_dir or OmegaConf.select(found, "hydra.searchpath")
        if not (typed or own or files):
            return False
        origin = self.loader.origin(self.line.config_name, given, group)
        if origin.default is None:
            return False
        default = OmegaConf.select(origin.default, group)
        if any(OmegaConf.select(section, k) != default.get(k) for k in IDENTITY[group]):
            return True
        return bool(own and not origin.stated and not typed)

    def _composed(
        self, found: DictConfig, overrides: Sequence[str], *, sweeps: bool = False
    ) -> Composed:
        refuse_unused(found.hydra)
        HydraConfig.instance().set_config(found)  # for ${hydra:…}
        values: dict[str, Any] = {}
        for key in found:
            if key != "hydra":
                node = found[key]
                plain = (
                    OmegaConf.to_container(node, resolve=True)
                    if OmegaConf.is_config(node)
                    else node
                )
                values[str(key)] = at_home(plain) if key == "job" else plain
        sweep = found.hydra.sweep
        return Composed(
            values=values,
            overrides=tuple(overrides),
            sweeps=sweeps,
            sweep_folder=Path(sweep.dir),
            point_folder=Path(
                sweep.dir, "" if OmegaConf.is_missing(found.hydra.job, "num") else str(sweep.subdir)
            ),
        )


def compose(
    overrides: Sequence[str], config_dir: str | None = None, config_name: str = PRIMARY
) -> Config:
    """Compose and check, as a launch would. Raises `ConfigError`."""
    check_overrides(overrides)
    line = CommandLine(overrides=tuple(overrides), config_dir=config_dir, config_name=config_name)
    return Composer(line).compose().config()


OURS = "hydra_plugins.orchestrator_launcher"
Point = Composed | ConfigError
Launch = Callable[[Sequence[Point], int], Sequence[JobReturn]]


class Points:
    """Stands for the function that Hydra's sweepers run: our launcher asks it for whole batches.

    Attributes:
        folder: where a search writes what it has found, without making that folder itself.
    """

    __name__ = "orchestrator.launch"

    def __init__(self, composer: Composer, launch: Launch) -> None:
        self._composer, self._launch = composer, launch
        self.folder: Path | None = None

    def __call__(self, _: DictConfig) -> Any:
        """Raises always: a point alone is nothing that could be run."""
        raise ConfigError("points of a sweep are placed by the launcher 'orchestrator' alone")

    def launch_points(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Compose a batch of points and hand it on.

        Args:
            initial_job_idx: the number of its first.
        """
        points = self._composer.points(job_overrides, initial_job_idx)
        returned = self._launch(points, initial_job_idx)
        if self.folder is not None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return returned


def drive(composer: Composer, launch: Launch) -> Any:
    """Let the sweeper choose points, and `launch` do what is to be done with each batch of them.

    Args:
        launch: gets points, or why one cannot be composed, and the number of the first.

    Returns:
        What the sweeper returns. Raises `ConfigError` for what cannot be swept.
    """
    found = composer.load(composer.overrides, RunMode.MULTIRUN)
    points = Points(composer, launch)
    with guarded(), open_dict(found):
        found.hydra.launcher = {"_target_": f"{OURS}.OrchestratorLauncher"}
        found.hydra.sweeper.params = dict(text.split("=", 1) for text in composer.params)
        if composer.searches:
            stated = OmegaConf.select(found, "run.dir")
            found.hydra.sweep.dir = str(stated or found.hydra.sweep.dir)
            points.folder = Path(found.hydra.sweep.dir)
        else:
            found.hydra.sweeper["_target_"] = f"{OURS}.OrchestratorSweeper"
        sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=HydraContext(config_loader=composer.loader, callbacks=Callbacks()),
            task_function=points,
            config=found,
        )
        composer.loader.refuse_sweep(composer.stated)
    theirs = f"the sweeper {found.hydra.sweeper['_target_']}" if composer.searches else ""
    with guarded(bounded=False, whose=theirs):
        return sweeper.sweep(list(composer.overrides))


def points_of(composer: Composer) -> list[Point]:
    """The points of the sweep that `composer` composes, or why one cannot be composed."""
    found: list[Point] = []

    def collect(points: Sequence[Point], _: int) -> Sequence[JobReturn]:
        found.extend(points)
        return [JobReturn(status=JobStatus.UNKNOWN) for _ in points]

    drive(composer, collect)
    return found


class Answers(Hydra):
    """Hydra's application, which composes as a launch does."""

    def __init__(self, composer: Composer) -> None:
        super().__init__(task_name="orchestrator.launch", config_loader=composer.loader)
        self._composer = composer

    def compose_config(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, *_: Any, **__: Any
    ) -> DictConfig:
        if config_name is None:  # Hydra's own help, which is of no configuration
            return super().compose_config(config_name, overrides, run_mode)
        return self._composer.load(overrides, run_mode)


def answer(composer: Composer) -> int:
    """Print what a flag of Hydra's asks for; give the exit code."""
    line, name, given = composer.line, composer.line.config_name, composer.overrides
    parser, asked = get_args_parser(), Namespace(overrides=given, resolve=line.resolve)
    with guarded():
        hydra = Answers(composer)
        if line.help:
            hydra.app_help(config_name=name, args_parser=parser, args=asked)
        elif line.hydra_help:
            hydra.hydra_help(config_name=name, args_parser=parser, args=asked)
        elif line.version:
            print(f"Hydra {__version__}")  # noqa: T201  # as Hydra's own flag prints it
        elif line.shell_completion:
            hydra.shell_completion(config_name=name, overrides=list(line.overrides))
        elif line.info:
            hydra.show_info(line.info, config_name=name, overrides=given)
        elif line.cfg:
            hydra.show_cfg(name, given, line.cfg, line.package, line.resolve)
    return EXIT_FINISHED


class HydrasCompletion(DefaultCompletionPlugin):
    """Knows the groups, choices, keys and values of a loader's configuration."""

    def choices(self, config_name: str, line: str) -> list[str]:
        """What the last word of a line of overrides may become, sorted."""
        return self._query(config_name=config_name, line=line)
