"""Networks, their flat parameters, and forward passes that are kept for one backward pass."""
