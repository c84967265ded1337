"""Faults for one's own running job: ranks are killed, stopped, slowed; a report says how the others fared."""
