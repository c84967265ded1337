"""Costs of one rank, as `pala benchmark` measured them: read from the benchmark.json of a run. Pure, except for the
file.

Only training *without* exchange is read, and the parts alone: no measured figure of an exchange goes into a prediction.
"""

from __future__ import annotations

import gzip
import json
import statistics
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pala.exchange.gossip.messages import gossip_sizes
from pala.exchange.gossip.state import Rules
from pala.exchange.wire import NOTHING, Wire
from pala.lab.benchmark.analysis import precision_of, ranks_of
from pala.system.errors import PalaError


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of one rank with cores of its own."""

    update_quantiles_s: tuple[float, ...]
    """An update without exchange, with its environment steps: quantiles, evenly spaced from shortest to longest."""
    steps_per_update: int
    """Environment steps."""
    rollout_steps: int
    """After each of these steps of its environments a rank looks at its messages."""
    acting_share: float
    """Share of an update's time before the backward pass, in which those steps are."""
    send_s: float
    """A snapshot of the model."""
    receive_s: float
    """A model copied, checked and added to the inbox."""
    mix_s: float
    """The inbox averaged into the parameters."""
    protocol_s: tuple[float, float]
    """The protocol's own time for one model, on both sides together: at no ranks, and what each rank adds."""
    model_bytes: int
    """A model, or a gradient, without header and counters."""
    max_staleness: int
    mixing: str
    threads: int
    """Cores that a rank has for itself."""
    compression: str = "none"
    """Compression of gossip's models."""
    patience_s: float = Rules.patience_s
    """Seconds that a rank is waited for."""

    @property
    def update_s(self) -> float:
        """Mean time of an update without exchange."""
        return _mean(self.update_quantiles_s)

    @property
    def steps_per_s(self) -> float:
        """Speed of one rank without exchange."""
        return self.steps_per_update / self.update_s

    def draw(self, uniform: np.ndarray | float) -> np.ndarray:
        """Return update times, seconds, for numbers that are uniform in [0, 1]. Updates are taken to be independent."""
        return np.asarray(np.interp(uniform, self._grid, self.update_quantiles_s))

    @cached_property
    def _grid(self) -> np.ndarray:
        return np.linspace(0, 1, len(self.update_quantiles_s))


def read_benchmark(path: Path) -> dict[str, Any]:
    """Read a benchmark.json, or benchmark.json.gz. Raises PalaError."""
    try:
        data = path.read_bytes()
        benchmark: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        benchmark["jobs"][0]["rounds"], benchmark["config"], benchmark["machine"]["cores"]
    except FileNotFoundError:
        raise PalaError(f"'{path}' does not exist; `pala benchmark` writes a benchmark.json.") from None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise PalaError(
            f"'{path}' is not a benchmark.json of `pala benchmark` ({type(error).__name__}: {error})."
        ) from None
    return benchmark


def costs_of(benchmark: dict[str, Any], path: Path) -> Costs:
    """Return the costs of the job with the most ranks that have cores of their own: hosts of a cluster are full, too,
    and ranks of one host share its memory. `path` is for the message. Raises PalaError."""
    if benchmark["config"]["exchange"]["compression"] == "top_k":
        raise PalaError(f"'{path}' was measured with top_k, whose messages differ in length; that is not simulated.")
    slowdown = benchmark["options"].get("slowdown", 1)
    if slowdown > 1:
        raise PalaError(
            f"'{path}' was measured with '--slowdown {slowdown:g}', one rank slower than the others, but costs "
            "need ranks that are alike. Measure without it; one slow rank is simulated in any case."
        )
    precision, cores = precision_of(benchmark), benchmark["machine"]["cores"]
    fitting = [job for job in benchmark["jobs"] if _threads_of_a_host(job, benchmark) <= cores]
    if not fitting:
        raise PalaError(f"In '{path}' no job has a core for each rank; measure one by `pala benchmark`.")
    try:
        return _costs(max(fitting, key=lambda job: job["ranks"]), precision, benchmark)
    except (KeyError, StopIteration):
        raise PalaError(
            f"'{path}' lacks the times of single updates and models, the protocol's own (as where a job failed), or "
            f"training by gossip or without exchange in {precision}; measure again by `pala benchmark "
            "--exchanges none gossip`."
        ) from None


def _threads_of_a_host(job: dict[str, Any], benchmark: dict[str, Any]) -> int:
    """Return the threads of a job's ranks on its fullest host. Virtual hosts are one machine."""
    is_one = "virtual_hosts" in benchmark["options"].get("launcher", "")
    ranks = Counter("" if is_one else rank.get("host") for rank in job["of_ranks"])
    return int(max(ranks.values()) * job["of_ranks"][0]["threads"])


def _costs(job: dict[str, Any], precision: str, benchmark: dict[str, Any]) -> Costs:
    config, rounds = benchmark["config"], job["rounds"]
    ranks = [rank for round_ in rounds for rank in ranks_of(round_, precision, "none")]
    acting = [rank["time"]["environment"] + rank["time"]["inference"] for rank in ranks]
    models = [rank for round_ in rounds for rank in round_["model_us"]]
    steps = config["a2c"]["rollout_steps"] * config["env"]["num_envs"]
    counts = sorted(int(count) for count in benchmark["protocol_us"])
    if not counts:
        raise KeyError("protocol_us")
    slope, constant = np.polyfit(counts, [benchmark["protocol_us"][str(count)] for count in counts], 1)
    send_us, receive_us, mix_us = (statistics.median(m[part] for m in models) for part in ("send", "receive", "mix"))
    return Costs(
        update_quantiles_s=_quantiles(ranks, steps),
        steps_per_update=steps,
        rollout_steps=config["a2c"]["rollout_steps"],
        acting_share=statistics.median(acting),
        send_s=1e-6 * send_us,
        receive_s=1e-6 * receive_us,
        mix_s=1e-6 * mix_us,
        protocol_s=(1e-6 * float(constant), 1e-6 * max(0.0, float(slope))),
        model_bytes=job["message_bytes"]["gossip"] - control_bytes(job["ranks"]),
        max_staleness=config["exchange"]["max_staleness"],
        mixing=config["exchange"]["mixing"],
        threads=job["of_ranks"][0]["threads"],
        compression=config["exchange"]["compression"],
        patience_s=config["exchange"].get("patience_s", Rules.patience_s),
    )


def _quantiles(ranks: Sequence[dict[str, Any]], steps: int) -> tuple[float, ...]:
    """Return the mean over rounds and ranks of each quantile, scaled to the median speed of whole measurements."""
    quantiles = np.mean([rank["update_quantiles_s"] for rank in ranks], axis=0)
    update_s = steps / statistics.median(rank["steps_per_s"] for rank in ranks)
    return tuple(float(q) for q in quantiles * update_s / _mean(quantiles))


def _mean(quantiles: Sequence[float] | np.ndarray) -> float:
    """Return the mean of the distribution with these evenly spaced quantiles, joined by lines."""
    return float(np.mean((np.asarray(quantiles)[1:] + np.asarray(quantiles)[:-1]) / 2))


def control_bytes(ranks: int) -> int:
    """Return the size of a credit, or of a model's header and counters."""
    return Wire(ranks, 0, 0, gossip_sizes(NOTHING)).control_bytes
