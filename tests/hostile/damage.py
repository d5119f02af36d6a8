"""What can befall a run folder: each kind of damage is a function that does it and says what.

Damage of a file gets the file; damage of a folder the run. Both get a `World`: what lies around the
run, which no damage may make a command change or print.
"""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.lines import CANARY

ESCAPE = "\x1b[31mred\x07"
DEEP = 200_000
SPARSE = 1 << 40
TEXTS = {
    "a number": "7", "null": "null", "a text": '"text"', "a list": "[1, 2]", "an empty table": "{}",
    "depth": "[" * DEEP, "depth of tables": '{"a":' * DEEP, "a long number": "9" * 6000,
    "not a number": "NaN", "infinite": '{"updates": 1e999, "update": 1e999, "state": 1e999}',
    "negative": '{"updates": -1, "update": -1, "loss": "x", "time": -1}',
    "escape codes": f'{{"state": "{ESCAPE}", "loss": "{ESCAPE}"}}', "raw escape codes": ESCAPE * 40,
    "a traceback": 'File "x", line 1\n', "one long line": "x" * 900_000, "many lines": "\n" * 500_000,
    "a yaml tag": f"!!python/object/apply:os.system ['touch {CANARY}']\n",
    "a pickle": f"cos\nsystem\n(S'touch {CANARY}'\ntR.", "surrogates": '{"state": "\\ud800"}',
    "an alias": "a: &a [1]\nb: *a\n", "dates": "{time: 2001-01-01}", "another encoding": "",
}  # fmt: skip
VALUES = ("null", "-1", "1e999", "NaN", "true", '"text"', "[]", "{}", "9" * 5000, "1.5", "[[1]]",
          '"\\u001b[31mred"', '"../../../etc/passwd"', '"/etc/passwd"', str(2**64), "-0.0")  # fmt: skip
NAMES = ("x", ".partial-000000009-1", "update-", "update-0", "update-999999999999999999", "100000000",
         "rank-00000.log", "rank-99999.log", "failure-1.json", "failure-00000.json", "node-x", "001",
         "warnings-00000.jsonl", "departure.json", "restart.json", "result.json", "handle.json", "cancel",
         "resumes.json", "newest", "submitit", "code", f"{ESCAPE}", "a\nb", "ü", os.fsdecode(b"\xff\xfe"),
         "update-000000007", "n" * 255, "sweep.json", "config.yaml", "heartbeat-00000", "ranks-00512")  # fmt: skip


@dataclass(frozen=True)
class World:
    """What a case has around its run.

    Attributes:
        outside: a folder beside the run, with files that hold `secret`, and a run.
        others: undamaged runs, whose files may be put into this one.
        secret: words that no command may print.
    """

    outside: Path
    others: tuple[Path, ...]
    secret: str


def _is_plain(path: Path) -> bool:
    """A regular file that can be read whole."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < SPARSE


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def flip(path: Path, chance: random.Random, world: World) -> str:
    content = bytearray(path.read_bytes())
    count = chance.choice((1, 1, 3)) if content else 0
    places = [chance.randrange(len(content)) for _ in range(count)]
    for place in places:
        content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"bits flipped at {places}"


def cut(path: Path, chance: random.Random, world: World) -> str:
    length = chance.randrange(1 + path.stat().st_size)
    os.truncate(path, length)
    return f"cut to {length}"


def empty(path: Path, chance: random.Random, world: World) -> str:
    os.truncate(path, 0)
    return "emptied"


def grow(path: Path, chance: random.Random, world: World) -> str:
    os.truncate(path, SPARSE)
    return "a terabyte of nothing"


def rewrite(path: Path, chance: random.Random, world: World) -> str:
    name = chance.choice(list(TEXTS))
    content = path.read_bytes()
    if name == "another encoding":
        coding = chance.choice(("utf-16", "utf-32", "utf-8-sig", "cp037"))
        path.write_bytes(content.decode("latin-1").encode(coding, "replace"))
        return f"in {coding}"
    path.write_bytes(TEXTS[name].encode() + (content if chance.random() < 0.2 else b""))
    return f"holds {name}"


def mistype(path: Path, chance: random.Random, world: World) -> str:
    """Another value after some colon, as a hand that edits would leave it."""
    text = path.read_bytes().decode("latin-1")
    colons = [i for i, sign in enumerate(text) if sign == ":"]
    if not colons:
        return empty(path, chance, world)
    at = chance.choice(colons) + 1
    end = min((i for i in (text.find(sign, at) for sign in ",\n}]") if i >= 0), default=len(text))
    value = chance.choice(VALUES)
    path.write_bytes(f"{text[:at]} {value}{text[end:]}".encode("latin-1"))
    return f"{text[max(0, at - 30) : at]!r} is {value:.40}"


def swap_within(path: Path, chance: random.Random, world: World) -> str:
    run = next(p for p in path.parents if (p / "logs").exists() or p.name == "run")
    other = chance.choice([p for p in sorted(run.rglob("*")) if _is_plain(p)])
    content = other.read_bytes()
    other.write_bytes(path.read_bytes())
    path.write_bytes(content)
    return f"swapped with {other.name}"


def swap_between(path: Path, chance: random.Random, world: World) -> str:
    run = next(p for p in path.parents if p.name == "run")
    other = chance.choice(world.others)
    same = other / path.relative_to(run)
    if not same.is_file():
        same = chance.choice(sorted(p for p in other.rglob("*") if p.is_file()))
    path.write_bytes(same.read_bytes())
    return f"is {same.relative_to(other)} of another run"


def replace(path: Path, chance: random.Random, world: World) -> str:
    """Something else in a file's or a folder's place."""
    _remove(path)
    kind = chance.choice(
        ("folder", "nothing", "loop", "dangling", "device", "secret", "up", "passwd", "other")
    )
    links = {
        "loop": path.name, "dangling": "nowhere", "device": "/dev/zero", "passwd": "/etc/passwd",
        "secret": world.outside / "secret", "other": world.others[0] / path.name,
        "up": os.path.relpath(world.outside / "secret", path.parent),
    }  # fmt: skip
    if kind == "folder":
        path.mkdir()
    elif kind in links:
        path.symlink_to(links[kind])
    return f"is {kind}"


def forbid(path: Path, chance: random.Random, world: World) -> str:
    mode = chance.choice((0, 0o200, 0o777, 0o4777))
    path.chmod(mode)
    owner = chance.choice((0, 12345, 65534))
    os.chown(path, owner, owner)
    return f"mode {mode:o} of user {owner}"


def date(path: Path, chance: random.Random, world: World) -> str:
    when = chance.choice((0, 1, 2**31, 2**33, 2**40))
    os.utime(path, (when, when))
    return f"is of {when}"


def nest(folder: Path, chance: random.Random, world: World) -> str:
    """Folders in folders in folders, under a name that a run has a use for, or none."""
    name = chance.choice(("x", "rank-00000.log", "007", "update-000000004", "ranks-00512"))
    (folder / Path(*[name] * 150)).mkdir(parents=True)
    return f"{name} is 150 folders deep"


def lead_out(folder: Path, chance: random.Random, world: World) -> str:
    """A folder becomes a link: to a like one of another run, to somebody's files, to itself."""
    shutil.rmtree(folder)
    inside = next((p for p in folder.parents if p.name == "run"), folder)
    like = world.outside / "run" / folder.relative_to(inside)
    target = chance.choice((like, world.outside, Path("/etc"), Path(), Path("..")))
    if chance.random() < 0.5 and target.is_absolute():
        target = Path(os.path.relpath(target, folder.parent))
    folder.symlink_to(target)
    return f"is a link to {target}"


def add(folder: Path, chance: random.Random, world: World) -> str:
    path = folder / chance.choice(NAMES)
    if os.path.lexists(path):
        return forbid(path, chance, world)
    kind = chance.random()
    if kind < 0.3:
        path.mkdir()
    else:
        path.write_text("{}")
        if kind < 0.8:
            damage = chance.choice((rewrite, replace, grow))
            return f"{path.name!r} added, {damage(path, chance, world)}"
    return f"{path.name!r} added"


def handle(folder: Path, chance: random.Random, world: World) -> str:
    """A job of a scheduler whose configuration brings code along."""
    run = next((p for p in (folder, *folder.parents) if p.name == "run"), folder)
    (run / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=x\nPluginDir=/nowhere\n")
    job = chance.choice(("7", "-1", "7; touch canary", "$(touch canary)", "--version", ESCAPE))
    conf = chance.choice((str(run / "slurm.conf"), "null", "../slurm.conf", "/etc/passwd", ESCAPE))
    text = {"kind": "slurm", "job_id": job, "attempt": 0, "slurm_conf": conf, "time": 1.0}
    from orchestrator.rundir.files import write_json

    if not os.path.lexists(run / "handle.json"):
        write_json(run / "handle.json", text)
    return f"handle.json added: job {job!r} of {conf!r}"


def lock(folder: Path, chance: random.Random, world: World) -> str:
    """A lock that names a process which is none of the run's."""
    run = next((p for p in (folder, *folder.parents) if p.name == "run"), folder)
    words = chance.choice(("1", "1 1 x y", "-1 0 0 0", f"{os.getppid()} 0 0 0", "9" * 300, ESCAPE))
    if not (run / ".lock").is_symlink():
        (run / ".lock").write_text(words)
    return f".lock says {words!r:.30}"


Damage = Callable[[Path, random.Random, World], str]
OF_FILES: tuple[Damage, ...] = (
    flip, flip, flip, cut, cut, empty, grow, rewrite, rewrite, rewrite, mistype, mistype, mistype,
    swap_within, swap_between, swap_between, replace, replace, forbid, date,
)  # fmt: skip
OF_FOLDERS: tuple[Damage, ...] = (
    lead_out,
    lead_out,
    add,
    add,
    add,
    replace,
    forbid,
    handle,
    lock,
    nest,
)


def spoil(run: Path, chance: random.Random, world: World) -> str:
    """Do one thing to a run, to a file or to a folder of it; say what."""
    entries = sorted(p for p in run.rglob("*") if not p.is_symlink())
    files = [p for p in entries if _is_plain(p)]
    folders = [p for p in entries if p.is_dir()]
    of_file = bool(files) and (chance.random() < 0.75 or not folders)
    place = chance.choice(files if of_file else [run, *folders])
    damage = chance.choice(OF_FILES if of_file else OF_FOLDERS)
    if place == run and damage in (lead_out, replace):
        damage = add
    try:
        return f"{place.relative_to(run)} {damage(place, chance, world)}"
    except (OSError, UnicodeError, MemoryError) as error:  # the damage before it stands in its way
        return f"{place.relative_to(run)} already so ({type(error).__name__})"
