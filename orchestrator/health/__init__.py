"""Checks of machines and clusters (`doctor`)."""
