"""The environment that a rank's program gets, for tests of any style of starting."""

from orchestrator.agent.topology import Topology
from orchestrator.config.program import ProgramConfig
from orchestrator.trainer.program import ProgramStart, Rendezvous, environment


def variables_of(run, env, *, style, devices="rank"):
    """Return the variables of the second rank on the second of two nodes with two ranks each.

    Args:
        env: the variables of the rank itself, as a cluster or a user sets them.
    """
    run.write_config("job: {}\n")
    start = ProgramStart(
        program=ProgramConfig(command=("train.py",), style=style, devices=devices),
        topology=Topology(
            rank=3,
            size=4,
            local_rank=1,
            node_index=1,
            nodes=2,
            node="n1",
            address="127.0.0.1",
            job_id="1",
        ),
        rendezvous=Rendezvous("127.0.0.1", 4242),
        run=run,
        attempt=0,
        most_restarts=0,
        timeout_s=60,
    )
    return environment(env, start, {})
