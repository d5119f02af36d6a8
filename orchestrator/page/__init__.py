"""What has been run, as one page or file to hand on: made from run folders alone."""
