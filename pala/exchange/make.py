"""Makes the exchange that a configuration names, which alone is loaded."""

from __future__ import annotations

from pkgutil import resolve_name

from torch import Tensor

from pala.comm.base import Communicator
from pala.config import ExchangeConfig
from pala.config.catalogue import KINDS
from pala.exchange.base import ModelExchange, Setup
from pala.system.errors import PalaError

_MOST_PARAMETERS = 2**31 - 1
_IN_GROUPS = "pala.exchange.grouped:GroupedGossip"


def make_exchange(setup: Setup) -> ModelExchange:
    """Return the exchange that the configuration names. Collective."""
    config = setup.config.exchange
    exchange: ModelExchange = resolve_name(_IN_GROUPS if config.has_groups else KINDS[config.kind].made_by)(setup)
    return exchange


def check_size(parameters: Tensor) -> None:
    """Raise PalaError if there are more parameters than MPI's collectives and int32 indices can count."""
    if parameters.numel() > _MOST_PARAMETERS:
        raise PalaError(
            f"The model has {parameters.numel():,} parameters; more than {_MOST_PARAMETERS:,} cannot be exchanged."
        )


def check_placement(comm: Communicator, config: ExchangeConfig) -> None:
    """Raise PalaError if the ranks are where this exchange cannot work. Collective."""
    if KINDS[config.kind].one_host:
        from pala.exchange.shared_memory import check_one_host

        check_one_host(comm)
    if config.has_groups:
        from pala.exchange.groups import check_groups

        check_groups(comm.allgather(comm.host), config.group)
