"""Pretended nodes on this machine."""
