"""A user's own job, small, disturbed from outside at drawn moments, and compared (rehearse.md)."""
