"""Gorila DQN (Nair et al. 2015, arXiv 1507.04296): actors, replay memories, learners and a sharded parameter server."""
