"""A run: one rank of it from start to end, its loop, checkpoints, folder, metrics and console."""
