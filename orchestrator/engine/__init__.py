"""Engines: turn windows of micro-steps into updates, one engine per framework."""
