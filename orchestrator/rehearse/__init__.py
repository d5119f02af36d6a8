"""`rehearse`: inject faults into short runs of a job and compare the results."""
