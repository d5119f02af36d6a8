"""Output for people: progress, tables, comparisons, pages."""
