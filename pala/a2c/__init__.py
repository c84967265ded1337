"""Advantage actor-critic: returns, loss and update, the loop, and what its runs have of their own."""
