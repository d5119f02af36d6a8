"""Checks of machines (`doctor`) and of fault tolerance (`rehearse`)."""
