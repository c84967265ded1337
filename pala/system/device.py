"""The device of torch's that a rank computes on."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pala.system.errors import PalaError

_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")  # of Open MPI, Hydra, srun


def choose_device(name: str) -> torch.device:
    """`auto`: CUDA if there is any; `cuda`: the ranks of a node take its GPUs in turn. Raises PalaError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise PalaError(f"'run.device' is '{name}', but torch {torch.__version__} sees no CUDA device here.")
    if name == "cuda":
        local_rank = next((int(os.environ[key]) for key in _LOCAL_RANKS if os.environ.get(key)), 0)
        name = f"cuda:{local_rank % torch.cuda.device_count()}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise PalaError(f"'run.device' is '{name}': {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise PalaError(f"'run.device' is '{name}', but PALA computes on 'cpu' and 'cuda' alone.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise PalaError(f"'run.device' is '{name}', but the last of this machine's {there} is 'cuda:{there - 1}'.")
    return device


def has_bfloat16(device: torch.device) -> bool:
    """Whether the processor or GPU has instructions for bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})  # bf16: Arm's
