"""Measurements side by side: ratios within one run, medians, tables; no assertions."""
