"""Gorila DQN (Nair et al. 2015, arXiv 1507.04296)."""
