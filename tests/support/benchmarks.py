"""What a benchmark would have measured, with figures that make the sums easy."""

from __future__ import annotations

from typing import Any

from pala.config import Config, ExchangeConfig, NetworkConfig, to_table
from pala.run.metrics import SECTIONS

SPEEDS = {"none": (1000.0, 1200.0, 1100.0), "gossip": (950.0, 1100.0, 990.0)}  # of a rank, in three rounds

CONFIG = Config(network=NetworkConfig(precision="float32"), exchange=ExchangeConfig(mixing="uniform"))


def canned_job(ranks: int = 2, speeds: dict[str, tuple[float, ...]] = SPEEDS) -> dict[str, Any]:
    """What a job gives, with figures that make the sums easy: environment 200 us, operations 40e6 / 200e9 = 200 us."""

    def trained(exchange: str, speed: float) -> dict[str, Any]:
        split = dict.fromkeys(SECTIONS, 0.0) | {"environment": 0.25, "update": 0.75}
        gossip = {"models_sent": 0.95, "models_mixed": 0.9, "staleness_updates": 3, "bytes_sent": 2048.0}
        return {
            "steps_per_s": speed, "time": split, "cpu_per_core": 0.97, "exchange_thread_share": 0.01, "num_threads": 4,
        } | (gossip if exchange != "none" else {})  # fmt: skip

    network = {"forward": 100.0, "backward": 150.0, "optimiser": 10.0, "matrix_gflops": 200.0}
    of_rank = {
        "threads": 1, "gpu": None, "memory_peak_bytes": 400 * 2**20, "device_memory_peak_bytes": None,
        "seconds_to_first_step": 4.25,
    }  # fmt: skip
    return {
        "ranks": ranks, "precisions": ["float32"], "exchanges": list(speeds), "seconds": 5.0, "parameters": 10,
        "flops_per_step": {"forward": 15_000_000, "backward": 25_000_000}, "of_ranks": [of_rank] * ranks,
        "message_bytes": dict.fromkeys(speeds, 4096),
        "rounds": [
            {
                "environment_us": [200.0] * ranks, "network": {"float32": [network] * ranks},
                "training": [
                    {"precision": "float32", "exchange": e, "ranks": [trained(e, v[i])] * ranks}
                    for e, v in speeds.items()
                ],
            }
            for i in range(3)
        ],
    }  # fmt: skip


def canned(*jobs: dict[str, Any]) -> dict[str, Any]:
    return {
        "jobs": list(jobs), "config": to_table(CONFIG),
        "machine": {"cpu": "Some CPU", "cores": 2, "host": "h"},
        "options": {"rounds": 3, "seconds": 5.0}, "date": "2026-01-01", "git_commit": "abc", "git_dirty": True,
        "command": "pala benchmark",
        "protocol_us": {"2": 27.31, "64": 28.5},
    }  # fmt: skip
