"""Where ranks begin from: the newest sound checkpoint, the same on all of them."""

from __future__ import annotations

from orchestrator.engine.api import Engine
from orchestrator.rank.loop import Outcome
from orchestrator.rundir import checkpoints as checkpoint
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn

GOES_BACK = (
    "nobody has its part of the optimizer's state, so the run goes back to its newest checkpoint, "
    "after update {}; "
)


def restore(run: RunDir, engine: Engine, outcome: Outcome, rank: int) -> bool:
    """Load it where there is one; rank 0 chooses. Whether there is. Collective."""
    own = run.identity
    if rank == 0:
        checkpoint.make_again(run.checkpoints)
        checkpoint.remove_partial(run.checkpoints)
    found, passed_over = checkpoint.newest(run.checkpoints, own) if rank == 0 else (None, [])
    for sentence in passed_over:
        warn(sentence)
    if (updates := int(engine.gather([found.updates if found else -1])[0][0])) < 0:
        return False
    chosen = found or checkpoint.load(checkpoint.folder_of(run.checkpoints, updates), own)
    engine.load_state(chosen.folder, chosen.extra)
    outcome.updates, outcome.samples = chosen.updates, chosen.samples
    return True
