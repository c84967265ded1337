"""What torch and ale-py tell of a host. To import this module takes seconds, so one rank of a host does, and late."""

from __future__ import annotations

from dataclasses import replace

import torch

from pala.config import EnvConfig
from pala.doctor.facts import Host
from pala.envs.vector import make_envs
from pala.system.device import has_bfloat16
from pala.system.errors import PalaError


def with_torch(host: Host) -> Host:
    """The host, with what torch and ale-py tell of it."""
    return replace(
        host,
        torch_cuda=torch.version.cuda,
        # As training asks: a driver that is too old for torch is counted, but its name raises.
        gpus=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else [],
        bfloat16=has_bfloat16(torch.device("cpu")),
        atari_fault=_atari_fault(),
    )


def _atari_fault() -> str:
    """Why no game of Pong can be begun; empty if one was."""
    try:
        make_envs(EnvConfig(num_envs=1)).close()
    except (PalaError, ImportError, OSError, RuntimeError) as error:
        return str(error)
    return ""
