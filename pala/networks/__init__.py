"""Networks, their flat parameters, and tapes: forward passes whose activations are saved for one backward pass."""
