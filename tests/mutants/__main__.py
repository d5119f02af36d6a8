"""`python -m tests.mutants [--share 0.1] [--seed 0] [FILE …]`: do the fast tests notice a change?

mutmut (https://mutmut.readthedocs.io) changes the functions of the files that `[tool.mutmut]` in
pyproject.toml names, one small thing at a time, and runs the tests that pass through the function.
There are thousands of such mutants, so a share of each file's is drawn by a seed; `--share 1` is
the full run. What survives is printed with its change, unless `survivors.toml` says why it may.
"""

import argparse
import collections
import contextlib
import functools
import io
import json
import math
import random
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mutmut.configuration import config
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir, walk_mutatable_files

WORK = Path("mutants")
SURVIVORS = Path(__file__).with_name("survivors.toml")
LEAST = 0.9
SHELL = {"batch_script.py", "shell_lines.py", "srun_lines.py"}
"""Files whose texts a machine reads: there a change of words is one of meaning."""
NOTICED = {1, 3, -24, -11, -9}
"""Exit codes of pytest, and signals of a test that never ended or crashed. All else is survival."""
COLUMNS = ("drawn", "words only", "equal", "killed", "survived")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One change, by mutmut's name for it: `was` and `now` are the lines that differ."""

    name: str
    file: Path
    was: str
    now: str

    @property
    def function(self) -> str:
        """Dotted, as in orchestrator.plan.split.shares."""
        module, _, mangled = self.name.partition("__mutmut_")[0].rpartition(".")
        return f"{module}.{mangled.removeprefix('x_').removeprefix('xǁ').replace('ǁ', '.')}"

    @property
    def words_only(self) -> bool:
        """Whether it changes nothing but a text of several words, which only people read."""
        wrapped = re.search("XX(.*)XX", self.now)
        if wrapped and self.now.replace(wrapped[0], wrapped[1], 1) == self.was:
            text = wrapped[1]
        elif self.was.lower() == self.now.lower():
            differ = [n for n, (a, b) in enumerate(zip(self.was, self.now, strict=True)) if a != b]
            text = self.was[differ[0] : differ[-1] + 1]
        else:
            return False
        return " " in text.strip() and self.file.name not in SHELL


def make() -> dict[Path, list[str]]:
    """The names of all mutants, by file; their code is in `WORK`."""
    from mutmut.__main__ import create_mutants  # which sets how processes are started, for good

    for pattern in config().only_mutate:
        if not any(Path().glob(pattern)):
            sys.exit(f"pyproject.toml: only_mutate of [tool.mutmut] names {pattern}: no such file")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        copy_src_dir()
        copy_also_copy_files()
        create_mutants(1)
    return {file: list(exit_codes(file)) for file in sorted(walk_mutatable_files())}


def exit_codes(file: Path) -> dict[str, int | None]:
    """How the tests of each of a file's mutants ended; None: not run."""
    found: dict[str, int | None] = json.loads((WORK / f"{file}.meta").read_text())[
        "exit_code_by_key"
    ]
    return found


def drawn(names: list[str], file: Path, share: float, seed: int) -> list[str]:
    """The share of a file's mutants that this seed gives, at least one where there are any."""
    chosen = random.Random(f"{seed} {file.name}").sample(names, math.ceil(share * len(names)))
    return sorted(chosen, key=names.index)


def mutant_of(name: str, file: Path) -> Mutant:
    lines = get_diff_for_mutant(name, path=file).splitlines()[2:]
    was, now = (
        " ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    return Mutant(name=name, file=file, was=was, now=now)


@functools.cache
def listed() -> list[dict[str, str]]:
    """The survivors that were looked at: in `function` ("*": anywhere), `was` became `now`."""
    found: list[dict[str, str]] = tomllib.loads(SURVIVORS.read_text())["survivor"]
    return found


def kind_of(mutant: Mutant) -> str | None:
    """How it is listed, "equal" or "left"; None for one that nobody has looked at."""
    for entry in listed():
        here = entry["function"] in ("*", mutant.function) and entry["was"] in mutant.was
        if here and mutant.was.replace(entry["was"], entry["now"]) == mutant.now:
            return entry["kind"]
    return None


def judged(mutants: list[Mutant]) -> dict[Mutant, str]:
    """Each mutant's column: what the tests said, or why they were not asked."""
    codes: dict[Path, dict[str, int | None]] = {}
    verdicts: dict[Mutant, str] = {}
    for mutant in mutants:
        if mutant.file not in codes:
            codes[mutant.file] = exit_codes(mutant.file)
        if mutant.words_only:
            verdicts[mutant] = "words only"
        elif codes[mutant.file][mutant.name] in NOTICED:
            verdicts[mutant] = "killed"
        else:
            verdicts[mutant] = "equal" if kind_of(mutant) == "equal" else "survived"
    return verdicts


def report(verdicts: dict[Mutant, str]) -> float:
    """Print what survived and a line a file; give the share of killed ones."""
    for mutant, verdict in verdicts.items():
        if verdict == "survived" and kind_of(mutant) is None:
            print(f"\n{mutant.file}: {mutant.function}\n  was: {mutant.was}\n  now: {mutant.now}")
    counts = {mutant.file: collections.Counter[str]() for mutant in verdicts}
    for mutant, verdict in verdicts.items():
        counts[mutant.file].update(["drawn", verdict])
    print("\n| file | " + " | ".join(COLUMNS) + " | killed of those that count |")
    print("|---|" + "---|" * (len(COLUMNS) + 1))
    whole = sum(counts.values(), collections.Counter[str]())
    for file, count in [*counts.items(), ("all", whole)]:
        numbers = " | ".join(str(count[column]) for column in COLUMNS)
        print(f"| {file} | {numbers} | {rate(count):.0%} |")
    return rate(whole)


def rate(count: collections.Counter[str]) -> float:
    asked = count["killed"] + count["survived"]
    return count["killed"] / asked if asked else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="only files with such a name")
    parser.add_argument("--share", type=float, default=0.1, help="of each file's mutants")
    parser.add_argument("--seed", type=int, default=0, help="which of them")
    parser.add_argument("--at-once", type=int, default=1, help="tested at the same time")
    given = parser.parse_args()
    if not 0 < given.share <= 1:
        parser.error(f"--share={given.share}: it must be above 0, and 1 at most")
    began = time.monotonic()
    mutants = [
        mutant_of(name, file)
        for file, names in make().items()
        if not given.files or any(part in str(file) for part in given.files)
        for name in drawn(names, file, given.share, given.seed)
    ]
    asked = [mutant.name for mutant in mutants if not mutant.words_only]
    if not asked:  # mutmut would take that for all of them
        parser.error("none of the files that pyproject.toml names is meant")
    mutmut = Path(sys.executable).with_name("mutmut")
    subprocess.run([mutmut, "run", f"--max-children={given.at_once}", *asked], check=True)
    killed = report(judged(mutants))
    print(f"\n{len(mutants)} mutants in {time.monotonic() - began:.0f} s; {killed:.1%} killed")
    return int(killed < LEAST)


if __name__ == "__main__":
    sys.exit(main())
