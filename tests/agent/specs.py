"""Node specs for tests."""

from orchestrator.agent.node_spec import NodeSpec


def node_spec(run, *, nodes=3, ranks_per_node=1, **more):
    """The spec of the first node, with limits that suit a clock that the test sets."""
    return NodeSpec(
        **{
            "run": run,
            "attempt": 0,
            "index": 0,
            "names": tuple(f"node{i}" for i in range(nodes)),
            "ranks_per_node": ranks_per_node,
            "address": "127.0.0.1",
            "silence_s": 5.0,
            "heartbeat_s": 20.0,
            "hang_s": 60.0,
            "join_s": 30.0,
            "survive": True,
            "replacements": 0,
            **more,
        }
    )
