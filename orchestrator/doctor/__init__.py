"""What this machine, or the cluster that it belongs to, offers, and what would be used of it."""
