"""The source of jobs and of this package, read without importing it: modules, imports, git."""
