"""Gossip between groups of ranks that hold one model (`exchange.group`), for a prediction: a group is one slower rank.

An update of n ranks ends with the longest of n, so where one takes Q(p) at most with probability p, a group takes
Q(p^(1/n)), and its ranks hand on and add up their shares of the gradient, as in `allreduce.py` within a host. A
straggler slows its group by its factor. Waiting inside a group does not count as waiting.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pala.lab.simulate.costs import Costs
from pala.lab.simulate.gossip import Cluster

_QUANTILES = 101


def group_costs(costs: Costs, ranks: int) -> Costs:
    """Return the costs of a group of that number of ranks, of which one sends and mixes."""
    if ranks == 1:
        return costs
    grid = np.linspace(0, 1, _QUANTILES)
    handling_s = (ranks - 1) / ranks * (costs.send_s + costs.receive_s)
    longest_s = costs.draw(grid ** (1 / ranks)) + handling_s
    return replace(
        costs,
        update_quantiles_s=tuple(longest_s.tolist()),
        steps_per_update=ranks * costs.steps_per_update,
        threads=ranks * costs.threads,
    )


def of_groups(cluster: Cluster, ranks: int) -> Cluster:
    """Return the cluster in which each group of that number of ranks, which divides a host's, is one rank."""
    return replace(cluster, ranks=cluster.ranks // ranks, ranks_per_host=cluster.ranks_per_host // ranks)
