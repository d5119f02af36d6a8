"""What people see: progress, tables, comparisons."""
