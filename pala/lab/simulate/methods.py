"""The methods that are predicted: how each is simulated, named and drawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pala.lab.simulate.allreduce import predict_allreduce
from pala.lab.simulate.cluster import Cluster, Prediction
from pala.lab.simulate.costs import Costs
from pala.lab.simulate.gossip import predict_gossip
from pala.report.pictures import COLOURS

Simulate = Callable[[Cluster, Costs, int], Prediction]


class Method(NamedTuple):
    """One of `METHODS`."""

    simulate: Simulate
    """Called with the cluster, the costs and the seed."""
    label: str
    colour: str
    marker: str
    marker_size: int
    is_hollow: bool = False  # it lies on top of others
    is_compressed: bool = False  # what it sends, if the settings of gossip say so


def _gossip(topology: str, cluster: Cluster, costs: Costs, seed: int) -> Prediction:
    return predict_gossip(cluster, costs, topology, seed)


METHODS = {
    "random": Method(partial(_gossip, "random"), "gossip, random", COLOURS[0], "o", 4, is_compressed=True),
    "exponential": Method(
        partial(_gossip, "exponential"), "gossip, exponential", COLOURS[5], "s", 7, is_hollow=True, is_compressed=True
    ),
    "ring": Method(partial(_gossip, "ring"), "gossip, ring", COLOURS[2], "^", 9, is_hollow=True, is_compressed=True),
    "complete": Method(partial(_gossip, "complete"), "gossip, complete", COLOURS[3], "D", 5, is_compressed=True),
    "allreduce": Method(predict_allreduce, "all-reduce (synchronous A2C)", COLOURS[1], "v", 5),
}
