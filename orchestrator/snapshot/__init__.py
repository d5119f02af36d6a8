"""What was submitted is what runs: the copy of the code, without secrets."""
