"""The methods that are predicted: gossip by topology, and synchronous A2C.

Synchronous A2C: each update waits for the slowest rank, then all sum their gradients by all-reduce.

Within a host, ranks reduce and spread through its memory; between hosts it is the faster of two algorithms for p hosts
and b bytes, latency α and β seconds a byte:

    ring                           2 (p-1) α + 2 (p-1)/p b β        Patarasuk & Yuan 2009, section 3
    recursive halving, doubling    2 log2(p) α + 2 (p-1)/p b β      Rabenseifner; Thakur et al. 2005, section 4.5

If p is no power of two, the second is for the largest power below it, and the hosts beyond hand their vector to another
before it and get the sum after it: 2 (α + b β) more. Nothing is overlapped with the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from pala.lab.simulate.costs import Costs
from pala.lab.simulate.gossip import Cluster, Prediction, predict_gossip


def ring_s(hosts: int, num_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Return the time of an all-reduce by a ring."""
    return 2 * (hosts - 1) * (latency_s + num_bytes / hosts / bytes_per_s)


def halving_doubling_s(hosts: int, num_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Return the time of an all-reduce by recursive halving and doubling."""
    rounds = hosts.bit_length() - 1
    power = 1 << rounds
    beyond = 0.0 if hosts == power else 2 * (latency_s + num_bytes / bytes_per_s)
    return 2 * rounds * latency_s + 2 * (power - 1) / power * num_bytes / bytes_per_s + beyond


def predict_allreduce(cluster: Cluster, costs: Costs, seed: int) -> Prediction:
    """Predict synchronous A2C: every update of every rank is drawn, and the longest counts."""
    n, hosts = cluster.ranks, cluster.num_hosts
    link = (hosts, costs.model_bytes, cluster.latency_s, cluster.bandwidth_bytes_per_s)
    network_s = min(ring_s(*link), halving_doubling_s(*link))
    slowness = np.array(cluster.slowness)
    # Each rank copies and adds the others' share of the vector once, wherever it comes from, and hands on its own.
    handling_s = (n - 1) / n * (costs.send_s + costs.receive_s) * slowness
    generator = np.random.default_rng(seed)
    busy_s, duration_s = np.zeros(n), 0.0
    for _ in range(cluster.updates_a_rank):
        update_s = costs.draw(generator.random(n)) * slowness + handling_s
        busy_s += update_s
        duration_s += float(update_s.max()) + network_s
    per_s = cluster.updates_a_rank / duration_s
    in_host = min(n, cluster.ranks_per_host)
    link_bytes = 2 * (hosts - 1) / hosts * costs.model_bytes
    memory_bytes = 2 * (in_host - 1) * costs.model_bytes  # of all ranks of a host
    return Prediction(
        steps_per_s=n * costs.steps_per_update * per_s,
        wait_share=1 - float(busy_s.mean()) / duration_s,
        bytes_per_s=hosts * (link_bytes + memory_bytes) * per_s,
        busiest_link_bytes_per_s=link_bytes * per_s,
        distance=0.0,
    )


METHODS: dict[str, Callable[[Cluster, Costs, int], Prediction]] = {
    **{topology: partial(predict_gossip, topology) for topology in ("random", "exponential", "ring")},
    "allreduce": predict_allreduce,
}
"""Name -> how it is simulated: called with the cluster, the costs and the seed."""
