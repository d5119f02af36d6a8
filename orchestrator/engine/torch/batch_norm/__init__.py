"""Batch norm, which sees one micro-batch: named, frozen, replaced, or made exact."""
