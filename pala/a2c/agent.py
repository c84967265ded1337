"""What acts and learns on a rank: environments, network, its tape, optimiser, on a device of torch's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from pala.a2c.update import A2C
from pala.config import Config
from pala.envs import Envs, MakeEnv, make_envs
from pala.networks.make import make_tape
from pala.networks.network import ActorCritic, FlatParameters
from pala.networks.tape import Tape
from pala.system.errors import PalaError
from pala.system.runtime import say
from pala.system.seeding import derive
from pala.transport.agreement import collectively
from pala.transport.base import Communicator


@dataclass(frozen=True)
class Agent:
    """The learning half: what has parameters."""

    device: torch.device
    network: ActorCritic
    flat: FlatParameters
    tape: Tape
    a2c: A2C


def build_envs(comm: Communicator, config: Config, threads: int, make_env: MakeEnv | None = None) -> Envs:
    """This rank's environments; torch gets as many threads. Collective."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    return collectively(comm, lambda: make_envs(config.env, threads, make_env))


def build_agent(comm: Communicator, config: Config, envs: Envs) -> Agent:
    """Network, tape and optimiser, with the seed's first weights. Collective."""
    device = prepare_device(comm, config)
    torch.manual_seed(int(derive(config.seed, 0, "weights")[0]))
    network = collectively(comm, lambda: ActorCritic(envs.observation_space, envs.action_space, config.network))
    flat = FlatParameters(network, device)
    shape = (envs.num_envs, *(envs.observation_space.shape or ()))
    observations = torch.zeros(shape, dtype=torch.uint8, device=device)
    tape = collectively(comm, lambda: make_tape(network, config.network, config.a2c.rollout_steps, observations))
    return Agent(device, network, flat, tape, A2C(network.distribution, tape, flat, config.a2c))


def prepare_device(comm: Communicator, config: Config) -> torch.device:
    """The configuration's device, made the current one. Collective."""
    device = collectively(comm, lambda: choose_device(config.run.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams and graphs are made on the current device
    if config.network.precision == "bfloat16" and not has_bfloat16(device) and comm.rank == 0:
        say("'network.precision' is 'bfloat16', for which this machine has no instructions; float32 would be faster.")
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


def choose_device(name: str) -> torch.device:
    """`auto`: CUDA if there is any; `cuda`: the ranks of a node take its GPUs in turn. Raises PalaError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise PalaError(f"'run.device' is '{name}', but torch {torch.__version__} sees no CUDA device here.")
    if name == "cuda":
        local_rank = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or os.environ.get("MPI_LOCALRANKID") or 0)
        name = f"cuda:{local_rank % torch.cuda.device_count()}"
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise PalaError(f"'run.device' is '{name}': {error}") from None
