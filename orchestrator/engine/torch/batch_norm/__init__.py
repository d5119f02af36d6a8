"""Batch norm, which sees one micro-batch: named, frozen or replaced."""
