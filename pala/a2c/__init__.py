"""Advantage actor-critic: its agent and loop, returns, loss, update and learning rate."""
