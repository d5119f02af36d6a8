"""What a user has written, a job or a program, by its source: nothing of it is imported."""
