"""The variables by which a program finds the run that it is a part of."""

RUN = "ORCHESTRATOR_RUN"
ATTEMPT = "ORCHESTRATOR_ATTEMPT"
RANK = "ORCHESTRATOR_RANK"
WORLD = "ORCHESTRATOR_WORLD_SIZE"
SIGNAL = "ORCHESTRATOR_STOP_SIGNAL"
WARNINGS = "ORCHESTRATOR_WARNINGS"

# Names in an attempt's folder; `rundir/folder.py` has the paths.
STOP_ASKED = "stop-asked"
STOP_AFTER = "stop-after"
HEEDS = "heeds-{:05d}"
WIDTH = 40
NOT_YET = -1
