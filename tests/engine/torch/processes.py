"""Ranks as real processes over gloo, for tests: those that we ship."""

from orchestrator.testing.processes import collect, run_ranks, spec, start_ranks

__all__ = ["collect", "run_ranks", "spec", "start_ranks"]
