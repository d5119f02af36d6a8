"""What people see once something is known: tables, of plans, runs, sweeps and comparisons."""
