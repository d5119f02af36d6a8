"""Lines of squeue's answer, for tests."""

from orchestrator.clusters.slurm.scheduler import QUEUE_FIELDS


def queue_line(**values: str) -> str:
    """Return the line of job 7, which runs, with other values where given.

    Whose script it runs is not known.
    """
    usual = {
        "JobArrayID": "7",
        "State": "RUNNING",
        "NodeList": "n0",
        "TimeLeft": "1:00",
        "EndTime": "N/A",
        "PreemptTime": "N/A",
        "RestartCnt": "0",
        "Requeue": "1",
        "exit_code": "0",
        "Reason": "None",
        "Command": "(null)",
    }
    return "|".join(values.get(name, usual[name]) for name in QUEUE_FIELDS)
