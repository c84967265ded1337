"""What a run has left in its folder: records, counts, checkpoints."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path

import torch

from pala.run.checkpoint import RankState, load_policy, newest_segment, rank_path
from pala.run.metrics import read_run
from pala.system.errors import PalaError
from support.checkpoints import read_state
from support.helpers import record_of


def intervals(run: Path, rank: int) -> list[dict]:
    """A rank's records of intervals."""
    return [record for record in read_run(run)[rank] if record["type"] == "interval"]


def all_intervals(run: Path) -> list[dict]:
    """Those of all ranks, rank after rank."""
    return [record for records in read_run(run) for record in records if record["type"] == "interval"]


def total(run: Path, key: str, rank: int | None = None) -> int:
    """Sum of a count over all intervals, of a rank or of all."""
    return sum(record.get(key, 0) for record in (all_intervals(run) if rank is None else intervals(run, rank)))


def local_steps(run: Path) -> list[int]:
    """One value for each rank, as in its last record."""
    return [intervals(run, rank)[-1]["local_steps"] for rank in range(len(read_run(run)))]


def longest_gap_s(run: Path, rank: int) -> float:
    """Between two records of a rank, which makes one five times a second unless it waits."""
    times = [record["time_s"] for record in intervals(run, rank)]
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def all_train(run: Path, ranks: int) -> bool:
    """True when every rank has made a record of an interval."""
    return len(list(run.glob("metrics/rank-*.jsonl"))) == ranks and all(intervals(run, rank) for rank in range(ranks))


def states_of(run: Path, ranks: int) -> list[RankState]:
    """The ranks' newest checkpoints, also while they save."""
    folder = newest_segment(run)
    return [_newest(folder, rank) for rank in range(ranks)]


def _newest(folder: Path, rank: int) -> RankState:
    """A rank that saves makes its checkpoint the one before, and then puts the new one in its place."""
    with suppress(PalaError):
        return read_state(rank_path(folder, rank))
    with suppress(PalaError):
        return read_state(rank_path(folder, rank, previous=True))
    return read_state(rank_path(folder, rank))


def parameters_of(run: Path, rank: int) -> torch.Tensor:
    """A rank's parameters in its newest checkpoint."""
    return states_of(run, rank + 1)[rank].tensors["parameters"]


def assert_trained_one_policy(run: Path, ranks: int) -> None:
    """The run is complete, its budget of 6000 steps met, models were mixed, none refused, and the policy is there."""
    record = record_of(run)
    segment = record["segments"][0]
    assert record["completed"] and segment["ranks"] == ranks and len(segment["hosts"]) == ranks
    steps = local_steps(run)
    assert len(steps) == ranks and sum(steps) == segment["global_steps"] >= 6000
    if ranks > 1:
        assert total(run, "models_mixed") > 3 * ranks  # within 11 updates one is promised
        assert total(run, "models_refused") == 0
    named, header = load_policy(run / "policy.safetensors")
    assert header["global_steps"] >= 6000 and all(bool(tensor.isfinite().all()) for tensor in named.values())
