"""`python -m tests.hostile.reading RUN`: what decides how a run goes on, as `resume` reads it."""

import hashlib
import json
import sys
from pathlib import Path

from orchestrator.cli import start as running
from orchestrator.cli.resume import resumption
from orchestrator.errors import OrchestratorError
from orchestrator.rundir import checkpoints as checkpoint
from orchestrator.rundir.folder import RunDir


def read(path: Path) -> dict[str, object]:
    """All of it, short: what was told, and where the run goes on. Raises `OrchestratorError`."""
    run = RunDir(path).existing()
    running.check_own(run)
    config = running.config_of(run)
    asked = resumption(run, config, ())
    said = running._of_checkpoints(run, config, contents=True)
    found, _ = checkpoint.newest(run.checkpoints, run.identity)
    told = (
        run.identity, repr(config), run.read_submission(), run.read_plan(), run.read_result(),
        repr(asked.plan),
    )  # fmt: skip
    state = {} if found is None else [found.updates, found.samples, found.extra]
    return {
        "told": hashlib.sha256(json.dumps(told).encode()).hexdigest(),
        "updates": found.updates if found else 0,
        "state": hashlib.sha256(json.dumps(state).encode()).hexdigest(),
        "said": len(said),
    }


def main() -> int:
    try:
        print(json.dumps(read(Path(sys.argv[1]))))
    except OrchestratorError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
