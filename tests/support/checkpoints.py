"""The state of a rank as a checkpoint holds it, and checkpoints of ranks whose network a test does not know."""

from __future__ import annotations

from pathlib import Path

import torch

from pala.run import checkpoint
from pala.run.checkpoint import RankState

SIGNATURE = 2**64 - 3
PARAMETERS = 6


def make_state(
    rank: int = 0, ranks: int = 1, fill: float | None = None, steps: int = 0, weight: float = 1.0
) -> RankState:
    generator = torch.Generator().manual_seed(rank)
    parameters = torch.randn(PARAMETERS, generator=generator) if fill is None else torch.full((PARAMETERS,), fill)
    counters = {
        "updates": 7, "applied": 7, "num_squares": 7, "spares": 0, "lost": [], "local_steps": steps,
        "time_s": 1.25, "base_steps": 1000, "round": 3, "weight": weight,
        "steps_by_rank": [steps if r == rank else 10 for r in range(ranks)],
    }  # fmt: skip
    return RankState(
        rank, ranks, SIGNATURE, {"parameters": parameters, "mean_square": parameters.square()},
        {"actions": generator.get_state()[:8]}, counters,
    )  # fmt: skip


def load_state(folder: Path, rank: int = 0, ranks: int | None = None) -> RankState:
    """What `make_state` made."""
    return checkpoint.load_rank(folder, rank, SIGNATURE, ranks)


def read_state(file: Path) -> RankState:
    """Of any network."""
    return checkpoint.read_rank(file, checkpoint._read_head(file).signature)


def same(a: RankState, b: RankState) -> bool:
    """Equal to the last bit, NaN included."""
    names = sorted(a.random_states)
    assert a.tensors.keys() == b.tensors.keys()
    pairs = [(a.tensors[name], b.tensors[name]) for name in a.tensors]
    pairs += [(a.random_states[name], b.random_states.get(name, torch.zeros(0))) for name in names]
    alike = (a.rank, a.ranks, a.signature, a.counters, names) == (
        b.rank, b.ranks, b.signature, b.counters, sorted(b.random_states),
    )  # fmt: skip
    return alike and all(x.dtype == y.dtype and x.numpy().tobytes() == y.numpy().tobytes() for x, y in pairs)


def file_of(folder: Path, rank: int = 0) -> Path:
    return folder / f"rank-{rank:04d}.safetensors"
