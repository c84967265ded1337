"""Predictions beside what was measured: the jobs of a benchmark.json, with and without gossip. Pure.

The costs are those of the other predictions, of training without exchange. Each round of a measurement is simulated as
it was made: all ranks begin together, and about as many updates follow.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import replace
from typing import Any

from pala.config import ExchangeConfig
from pala.lab.benchmark.analysis import precision_of, ranks_of, training_of
from pala.lab.simulate.cluster import Cluster, Prediction
from pala.lab.simulate.costs import Costs, model_bytes_of
from pala.lab.simulate.gossip import GossipCluster, measured
from pala.system.text import Spread


def compare(name: str, benchmark: dict[str, Any], costs: Costs, seed: int) -> list[dict[str, Any]]:
    """A row for each job of a benchmark.json in its configured precision, with both of `none` and `gossip`, and as many
    threads a rank as the costs. No row if its messages differ in length (`top_k`)."""
    if benchmark["config"]["exchange"]["compression"] == "top_k":
        return []
    precision = precision_of(benchmark)
    jobs = [job for job in benchmark["jobs"] if precision in job["precisions"]]
    jobs = [job for job in jobs if {"none", "gossip"} <= set(job["exchanges"])]
    jobs = [job for job in jobs if job["of_ranks"][0]["threads"] == costs.threads]
    return [_compare_job(name, job, benchmark, costs, seed) for job in jobs]


def _compare_job(name: str, job: dict[str, Any], benchmark: dict[str, Any], costs: Costs, seed: int) -> dict[str, Any]:
    precision = precision_of(benchmark)
    by_exchange = {t.exchange: t for t in training_of(job) if t.precision == precision}
    none, gossip = by_exchange["none"], by_exchange["gossip"]
    assert gossip.of_none is not None
    config = benchmark["config"]["exchange"]
    topology = ExchangeConfig(topology=config["topology"]).graph
    cluster = cluster_of(job, benchmark)
    costs = replace(
        costs, model_bytes=model_bytes_of(job), max_staleness=config["max_staleness"], mixing=config["mixing"],
        patience_s=config.get("patience_s", costs.patience_s),
    )  # fmt: skip
    updates = [rank["updates"] for r in job["rounds"] for rank in ranks_of(r, precision, "gossip")]
    predicted = [
        _simulate_round(cluster, costs, topology, seed + round_, round(statistics.median(updates)))
        for round_ in range(len(job["rounds"]))
    ]
    none_steps_per_s = sum(costs.steps_per_s / slowness for slowness in cluster.slowness(costs.threads))
    speeds = Spread.of(p.steps_per_s for p in predicted)
    return {
        "file": name, "ranks": job["ranks"], "hosts": cluster.num_hosts,
        "cores_per_host": cluster.cores_per_host,
        "link_gbit": cluster.bandwidth_bytes_per_s * 8e-9 if cluster.num_hosts > 1 else None,
        "none": {"predicted": none_steps_per_s, "measured": vars(none.steps_per_s)},
        "gossip": {"predicted": vars(speeds), "measured": vars(gossip.steps_per_s)},
        "of_none": {"predicted": speeds.median / none_steps_per_s, "measured": vars(gossip.of_none)},
        "models_an_update": {
            "predicted": statistics.median(p.models_an_update or 0.0 for p in predicted),
            "measured": gossip.figures["models_sent"],
        },
    }  # fmt: skip


def _simulate_round(cluster: Cluster, costs: Costs, topology: str, seed: int, updates: int) -> Prediction:
    """The first tenth of a measurement is warm-up (`benchmark/measure.py`)."""
    warm_up = max(1, round(updates / 9))
    return measured(GossipCluster(cluster, costs, topology, seed, in_phase=True), warm_up, warm_up + updates)


def cluster_of(job: dict[str, Any], benchmark: dict[str, Any]) -> Cluster:
    """The machines of a job. Virtual hosts (`launch/virtual_hosts.py`) share the machine's cores, and their launcher's
    `--rate` is their link's; other links are not known from a benchmark.json, and taken to be as fast as memory."""
    hosts, launcher = len({rank["host"] for rank in job["of_ranks"]}), benchmark["options"]["launcher"]
    rate = re.search(r"--rate[ =](\d+)([kmg])bit", launcher)
    bits_per_s = int(rate[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate[2]] if rate else math.inf  # it is never used
    cores = benchmark["machine"]["cores"]
    return Cluster(
        job["ranks"], -(-job["ranks"] // hosts), cores / hosts if "virtual_hosts" in launcher else cores,
        bandwidth_bytes_per_s=bits_per_s / 8,
    )  # fmt: skip
