"""What has to be the same on every rank, compared before training."""
