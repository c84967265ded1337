"""Makes the exchange that a configuration names. A kind other than gossip is loaded where it is asked for."""

from __future__ import annotations

from torch import Tensor

from pala.comm.base import Communicator
from pala.config import Config, ExchangeConfig
from pala.config.catalogue import kind_of
from pala.exchange.base import ModelExchange
from pala.exchange.budget import ExchangeState
from pala.exchange.gossip.exchange import GossipExchange
from pala.system.errors import PalaError
from pala.system.interrupt import Interrupt

_MOST_PARAMETERS = 2**31 - 1


def make_exchange(
    comm: Communicator,
    parameters: Tensor,
    signature: int,
    config: Config,
    start: ExchangeState,
    interrupt: Interrupt,
    num_exact: int = 0,
) -> ModelExchange:
    """Return the exchange that the configuration names, on a flat parameter vector, of which the last `num_exact`
    elements are never rounded or left out. Collective."""
    kind, budget_steps = config.exchange.kind, config.total_steps
    if kind == "none":
        from pala.exchange.none import NoExchange

        return NoExchange(comm, parameters, budget_steps, start, interrupt)
    if kind == "allreduce":
        from pala.exchange.allreduce import AllReduce

        return AllReduce(comm, parameters, budget_steps, start, interrupt)
    if kind == "shared_memory":
        from pala.exchange.shared_memory import SharedMemory

        return SharedMemory(comm, parameters, config.exchange, budget_steps, start, interrupt, num_exact)
    if kind == "gossip" and config.exchange.has_groups:
        from pala.exchange.grouped import GroupedGossip
        from pala.exchange.groups import groups_of

        return GroupedGossip(
            comm,
            parameters,
            signature,
            config.exchange,
            start,
            interrupt,
            groups_of(comm.allgather(comm.host), config.exchange.group),
            total_steps=budget_steps,
            seed=config.seed,
            num_exact=num_exact,
        )
    if kind == "gossip":
        return GossipExchange(
            comm,
            parameters,
            signature,
            config.exchange,
            start,
            interrupt,
            total_steps=budget_steps,
            seed=config.seed,
            spares=config.run.spares,
            num_exact=num_exact,
        )
    raise AssertionError(f"nothing here makes an exchange of kind {kind!r}")


def check_size(parameters: Tensor) -> None:
    """Raise PalaError if there are more parameters than MPI's collectives and int32 indices can count."""
    if parameters.numel() > _MOST_PARAMETERS:
        raise PalaError(
            f"The model has {parameters.numel():,} parameters; more than {_MOST_PARAMETERS:,} cannot be exchanged."
        )


def check_placement(comm: Communicator, config: ExchangeConfig) -> None:
    """Raise PalaError if the ranks are where this exchange cannot work. Collective."""
    if kind_of(config).one_host:
        from pala.exchange.shared_memory import check_one_host

        check_one_host(comm)
    if config.has_groups:
        from pala.exchange.groups import check_groups

        check_groups(comm.allgather(comm.host), config.group)
