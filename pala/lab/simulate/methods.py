"""The methods that are predicted: how each is simulated, named and drawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pala.lab.simulate.allreduce import predict_allreduce
from pala.lab.simulate.cluster import Cluster, Prediction
from pala.lab.simulate.costs import Costs
from pala.lab.simulate.gossip import predict_gossip, predict_shared_memory
from pala.lab.simulate.server import predict_server
from pala.report.pictures import COLOURS

Simulate = Callable[[Cluster, Costs, int, int], Prediction]


class Method(NamedTuple):
    """One of `METHODS`."""

    simulate: Simulate
    """Called with the cluster, the costs, the seed and the number of shards, which only `servers` has."""
    label: str
    colour: str
    marker: str
    marker_size: int
    is_hollow: bool = False  # it lies on top of others
    is_compressed: bool = False  # what it sends, if the settings of gossip say so


def _gossip(topology: str, cluster: Cluster, costs: Costs, seed: int, shards: int) -> Prediction:
    del shards
    return predict_gossip(cluster, costs, topology, seed)


METHODS = {
    "random": Method(partial(_gossip, "random"), "gossip, random", COLOURS[0], "o", 4, is_compressed=True),
    "exponential": Method(
        partial(_gossip, "exponential"), "gossip, exponential", COLOURS[5], "s", 7, is_hollow=True, is_compressed=True
    ),
    "ring": Method(partial(_gossip, "ring"), "gossip, ring", COLOURS[2], "^", 9, is_hollow=True, is_compressed=True),
    "complete": Method(partial(_gossip, "complete"), "gossip, complete", COLOURS[3], "D", 5, is_compressed=True),
    "shared_memory": Method(
        lambda cluster, costs, seed, shards: predict_shared_memory(cluster, costs, seed),
        "shared memory (GALA)", COLOURS[6], "o", 12, is_hollow=True,
    ),
    "allreduce": Method(
        lambda cluster, costs, seed, shards: predict_allreduce(cluster, costs, seed),
        "all-reduce (synchronous A2C)", COLOURS[1], "v", 5,
    ),
    "server": Method(
        lambda cluster, costs, seed, shards: predict_server(cluster, costs, 1, seed),
        "one parameter server", COLOURS[4], "P", 5,
    ),
    "servers": Method(
        lambda cluster, costs, seed, shards: predict_server(cluster, costs, shards, seed),
        "parameter servers", "#777777", "X", 5,
    ),
}  # fmt: skip
