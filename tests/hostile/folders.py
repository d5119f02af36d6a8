"""Damaged run folders from a seed, a verb run on each, and what is wrong with how that ended."""

import dataclasses
import hashlib
import json
import random
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import ROOT, command, environment
from tests.hostile.arena import Ended, run
from tests.hostile.damage import World, spoil
from tests.hostile.lines import Line

SMALL = ("job._target_=tests.tiny_job.Tiny", "job.samples=24", "cluster.nodes=1",
         "cluster.ranks_per_node=1", "accumulation.global_batch=8", "accumulation.micro_batch=8",
         "train.checkpoint_every=1", "train.updates=5")  # fmt: skip
BREAKS = ("job.fault=raise", "job.fault_rank=0", "job.fault_after=3")
TOLD = "the tiny job was told to fail"
READING = "tests.hostile.reading"
VERBS = ("status", "status of many", "status --json", "logs", "logs -f", "compare", "compared with",
         "cancel", "cancel --now", "attach", "report md", "report csv",
         "read", "read", "read", "read", "read")  # fmt: skip
WATCHING = ("status", "logs", "compare", "attach", "report", "read")
PRECIOUS = "what-no-command-may-print"
LIMIT_S = 12.0
MOST_WORDS = 20_000


@dataclass(frozen=True)
class Source:
    """An undamaged run. `right`: what `reading` finds after each number of updates; `weights`: the
    digest that it ends with, undisturbed.
    """

    path: Path
    told: str
    right: tuple[tuple[int, str], ...]
    weights: str | None


@dataclass(frozen=True)
class Case:
    """A damaged run, and what is asked of it."""

    verb: str
    line: Line
    run: Path
    source: Source
    damages: tuple[str, ...]


def sources(base: Path, *, finished: bool) -> list[Source]:
    """Runs that were trained: one broken off, one finished."""
    wanted = {"broken": BREAKS, **({"finished": ()} if finished else {})}
    started = [
        subprocess.Popen(
            command(*SMALL, *more, f"run.dir={base / name}"), env=environment(), cwd=ROOT,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for name, more in wanted.items()
    ]  # fmt: skip
    assert [process.wait(120) for process in started] == [1, 0][: len(started)]
    found = [_known(base / name, base) for name in wanted]
    if finished:  # the broken one would have ended with the same bits
        found[0] = dataclasses.replace(found[0], weights=found[1].weights)
    return found


def _known(path: Path, base: Path) -> Source:
    """What `reading` finds in a run, and in it without its newest checkpoint, or without any."""
    from tests.hostile.reading import read

    copy = shutil.copytree(path, base / "copy" / "run")
    seen = [read(copy)]
    told = str(seen[0]["told"])
    for folder in sorted((copy / "checkpoints").iterdir(), reverse=True):
        shutil.rmtree(folder)
        seen.append(read(copy))
    shutil.rmtree(copy)
    assert {found["told"] for found in seen} == {told}
    result = json.loads((path / "result.json").read_text())
    right = tuple((int(str(found["updates"])), str(found["state"])) for found in seen)
    return Source(path, told, right, result["weights_sha256"])


def cases(seed: int, count: int, base: Path, made: list[Source], resumed: float) -> Iterator[Case]:
    """`count` cases, the same for the same seed, each in a folder of its own below `base`.

    Args:
        resumed: the share of cases in which a run is really gone on with.
    """
    chance = random.Random(seed)
    for number in range(count):
        source = chance.choice([made[0], *made])
        folder = base / f"{number:05d}.case"
        outside = folder / "outside"
        outside.mkdir(parents=True)
        (outside / "secret").write_text(f"{PRECIOUS}\n" * 3)
        shutil.copytree(chance.choice(made).path, outside / "run")
        path = shutil.copytree(source.path, folder / "run")
        others = tuple(other.path for other in made if other is not source)
        world = World(outside, others, PRECIOUS)
        damages = tuple(spoil(path, chance, world) for _ in range(chance.choice((1, 1, 1, 2, 3))))
        verb = "resume" if chance.random() < resumed else chance.choice(VERBS)
        more = {"PYTHONPATH": str(ROOT), "COLUMNS": chance.choice(("100", "40", "100"))}
        yield Case(verb, _line(verb, path, made[0].path, more), path, source, damages)


def _line(verb: str, path: Path, sound: Path, more: dict[str, str]) -> Line:
    arguments = {
        "status of many": ("status", str(sound), str(path)),
        "status --json": ("status", str(path), "--json"), "logs -f": ("logs", str(path), "-f"),
        "compare": ("compare", str(path), str(sound)),
        "compared with": ("compare", str(sound), str(path), "--tensors"),
        "cancel --now": ("cancel", str(path), "--now"), "read": (str(path),),
        "report md": ("report", str(path), "--format", "md"),
        "report csv": ("report", str(path), "--format", "csv"),
    }.get(verb, (verb, str(path)))  # fmt: skip
    return Line(READING if verb == "read" else "orchestrator", arguments, ".", more)


def state_of(folder: Path) -> dict[str, object]:
    """Everything in a folder, and what cannot be seen from its digest: kinds, modes, owners."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        regular = stat.S_ISREG(facts.st_mode) and facts.st_size < 1 << 24
        content = hashlib.sha256(path.read_bytes()).hexdigest() if regular else ""
        link = str(path.readlink()) if path.is_symlink() else ""
        found[str(path.relative_to(folder))] = (
            facts.st_mode, facts.st_uid, facts.st_size, content, link,
        )  # fmt: skip
    return found


def tried(case: Case) -> tuple[Ended, list[str]]:
    """Run a case; give how it ended, and what must not be, in words."""
    folder = case.run.parent
    watching = case.verb.startswith(WATCHING)
    watched = folder if watching else folder / "outside"
    before, system = state_of(watched), _system()
    ended = run(case.line, folder, limit_s=60.0 if case.verb == "resume" else LIMIT_S)
    for own in (folder / "words", folder / "here"):
        shutil.rmtree(own) if own.is_dir() else own.unlink()
    fine = {"exit code 3", *(["a traceback"] if TOLD in ended.words else [])}  # the job's own
    faults = [fault for fault in ended.faults(folder) if fault not in fine]
    if case.verb.startswith("logs") and any(".log a terabyte" in d for d in case.damages):
        faults = [fault for fault in faults if not fault.startswith("hangs")]  # it is printed whole
    after = state_of(watched)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    faults += [f"changed {name}" for name in changed]
    faults += ["changed the system"] if _system() != system else []
    faults += _words(case, ended)
    if not faults and ended.code == 0:
        faults = {"read": _read, "resume": _resumed}.get(case.verb, lambda *_: [])(case, ended)
    return ended, faults


def _system() -> tuple[object, ...]:
    facts = Path("/etc/passwd").stat()
    return facts.st_mtime_ns, facts.st_size, sorted(Path("/etc").iterdir())


def _words(case: Case, ended: Ended) -> list[str]:
    """What must stand in no command's words."""
    found = []
    if PRECIOUS in ended.words or "root:x:0" in ended.words:
        found.append("printed what lies outside the run")
    if "\x1b" in ended.words or "\x07" in ended.words:
        found.append("escape codes reach the terminal")
    if len(ended.words) > MOST_WORDS and not case.verb.startswith("logs"):
        found.append(f"{len(ended.words)} characters of words")
    if ended.code and not ended.words.strip():
        found.append("ended without a word")
    return found


def _read(case: Case, ended: Ended) -> list[str]:
    """A run with seals is gone on with as it would have been, or it is refused."""
    source = case.source
    found = json.loads(next(line for line in ended.words.splitlines() if line.startswith("{")))
    if found["told"] != source.told:
        return ["reads another result: what was told differs"]
    if (found["updates"], found["state"]) not in source.right:
        return ["reads another result: a state that no checkpoint had"]
    return []


def _resumed(case: Case, ended: Ended) -> list[str]:
    """What was gone on with ends with the bits of the undisturbed run."""
    if "nothing to resume" in ended.words:
        finished = json.loads((case.source.path / "result.json").read_text())["state"] == "finished"
        return [] if finished else ["a broken run is called finished"]
    result = json.loads((case.run / "result.json").read_text())
    same = result["weights_sha256"] == case.source.weights
    return [] if same else [f"another result: {result['weights_sha256']}"]
