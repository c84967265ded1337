"""Environments: vectors of them as training and evaluation step them, their spaces and wrappers."""
