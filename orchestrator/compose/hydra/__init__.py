"""What of Hydra compositions are made with: its loader and files, what may reach its parsers."""
