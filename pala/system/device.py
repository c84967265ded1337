"""The device of torch's that a rank computes on."""

from __future__ import annotations

from pathlib import Path

import torch

from pala.system.errors import PalaError
from pala.system.launcher import Launch
from pala.system.output import log


def set_torch(threads: int) -> None:
    """Set how torch computes in this process. To be called after environments are made: their modules may change it."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    torch.set_default_dtype(torch.float32)


def use_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device by `choose_device`, after a trial, as the current one, on which streams and graphs are made.

    If a GPU cannot be used, as one that torch is not built for, `auto` means the CPU. Raises PalaError."""
    device = choose_device(name, local_rank)
    if device.type == "cpu":
        return device
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError as error:
        fault = f"{device} cannot be used: {str(error).splitlines()[0]}"
        if name != "auto":
            raise PalaError(f"'run.device' is '{name}', but {fault}") from None
        log(f"{fault}. This rank computes on the CPU.")
        return torch.device("cpu")
    return device


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device that 'run.device' names. `auto`: CUDA if there is any; `cuda`: the ranks of a node take its
    GPUs in turn. `local_rank`: this rank's number on its node, if the launcher does not tell it. Raises PalaError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise PalaError(f"'run.device' is '{name}', but torch {torch.__version__} sees no CUDA device here.")
    if name == "cuda":
        told = Launch.detect().local_rank
        name = f"cuda:{(local_rank if told is None else told) % torch.cuda.device_count()}"
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
    """Return True if the processor or GPU has instructions for bfloat16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # torch also counts where it is emulated
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})  # bf16: Arm's
