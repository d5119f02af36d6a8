"""The configuration as values: its schema, and every rule that refuses one."""
