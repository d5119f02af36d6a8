"""Shared by both engines; no framework is imported."""
