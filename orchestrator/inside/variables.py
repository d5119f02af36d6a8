"""The variables by which a program finds the run that it is a part of."""

RUN = "ORCHESTRATOR_RUN"
ATTEMPT = "ORCHESTRATOR_ATTEMPT"
RANK = "ORCHESTRATOR_RANK"
WORLD = "ORCHESTRATOR_WORLD_SIZE"
