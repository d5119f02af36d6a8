"""What a command line asks for; the verbs that look at runs and at machines; completion."""
