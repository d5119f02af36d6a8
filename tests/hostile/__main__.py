"""`python -m tests.hostile --seed N --lines 1000`: hostile command lines, and what went wrong.

With `--folders 1000` instead: damaged run folders.
"""

import argparse
import collections
import shutil
import sys
import tempfile
from pathlib import Path

from tests.hostile.arena import run
from tests.hostile.folders import cases, sources, tried
from tests.hostile.lines import lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--folders", type=int, default=0)
    parser.add_argument("--resumed", type=float, default=0.03, help="share of folders gone on with")
    parser.add_argument("--show", type=int, default=400, help="characters of words to show")
    parser.add_argument("--all", action="store_true", help="also what is right")
    given = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="hostile-"))
    if given.folders:
        return damaged(given, base)
    kinds: collections.Counter[str] = collections.Counter()
    bad = 0
    for number, line in enumerate(lines(given.seed, given.lines, base)):
        folder = base / f"{number:05d}.run"
        folder.mkdir()
        ended = run(line, folder)
        faults = ended.faults(folder)
        kinds[f"exit {ended.code}"] += 1
        if given.all and not faults:
            shown = [a if len(a) < 120 else f"{a[:60]}…({len(a)})" for a in line.arguments]
            print(f"{line.module} {shown} -> {ended.code}: {ended.words.strip()[: given.show]}")
        if faults:
            bad += 1
            kinds.update(f.split(":")[0] for f in faults)
            shown = [a if len(a) < 120 else f"{a[:60]}…({len(a)})" for a in line.arguments]
            print(f"{number}: {line.module} {shown} {line.folder} {line.environment}")
            print(f"   {'; '.join(faults)} ({ended.seconds:.1f} s)")
            print("   " + ended.words.strip()[-given.show :].replace("\n", "\n   "), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(base, ignore_errors=True)
    print(f"{bad} of {given.lines} wrong: {dict(kinds)}")
    return int(bad > 0)


def damaged(given: argparse.Namespace, base: Path) -> int:
    """The same of damaged run folders."""
    kinds: collections.Counter[str] = collections.Counter()
    made = sources(base, finished=True)
    bad = 0
    for number, case in enumerate(cases(given.seed, given.folders, base, made, given.resumed)):
        ended, faults = tried(case)
        kinds[f"{case.verb}: exit {ended.code}"] += 1
        bad += bool(faults)
        if faults or given.all:
            print(f"{number}: {case.verb} of {case.source.path.name}: {'; '.join(case.damages)}")
            print(f"   {'; '.join(faults) or 'fine'} ({ended.code}, {ended.seconds:.1f} s)")
            print("   " + ended.words.strip()[-given.show :].replace("\n", "\n   "), flush=True)
        shutil.rmtree(case.run.parent, ignore_errors=True)
    shutil.rmtree(base, ignore_errors=True)
    print(f"{bad} of {given.folders} wrong: {dict(sorted(kinds.items()))}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
