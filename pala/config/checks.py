"""Checks of a configuration: the range of every number, and settings that do not go together."""

from __future__ import annotations

import dataclasses

from pala.config.catalogue import RULES, TOPOLOGIES, kind_of
from pala.config.facts import facts_of
from pala.config.schema import Config, ExchangeConfig, GorilaConfig
from pala.system.errors import PalaError
from pala.system.tables import flatten, shown


def check(config: Config, source: str) -> None:
    """Raise PalaError for a value outside its range, and for settings that do not go together."""
    values = flatten(dataclasses.asdict(config))
    for key, facts in facts_of(Config).items():
        if facts.between is None:
            continue
        value = values[key]
        low, high = facts.between
        values_of_key = value if isinstance(value, tuple) else (value,)
        numbers = [number for number in values_of_key if not isinstance(number, str)]  # a word has been checked
        if not all(low <= number <= high for number in numbers):
            every = "every number " if isinstance(value, tuple) else ""
            raise PalaError(f"{source}: '{key}' is {shown(value)} but {every}must lie between {low:g} and {high:g}.")
    check_exchange(config.exchange, source)
    if config.algorithm == "gorila":
        _check_gorila(config.gorila, source)
        _check_replay(config, source)
    _check_spares(config, source)
    _check_groups(config, source)
    name = config.run.name
    if name in (".", "..") or "/" in name:
        raise PalaError(f"{source}: 'run.name' is {name!r} but must be a plain folder name; 'run.dir' says where.")


def check_exchange(exchange: ExchangeConfig, source: str) -> None:
    """Raise PalaError for settings of the exchange that do not go together."""
    if exchange.kind == "gossip":
        _check_mixing(exchange, source)
    for key, values in kind_of(exchange).allows.items():
        if (value := getattr(exchange, key)) not in values:
            raise PalaError(
                f"{source}: 'exchange.{key}' is {value!r}, but 'exchange.kind' is {exchange.kind!r}, which has "
                f"{_listed(values)} only; 'gossip' has all."
            )


def _check_mixing(exchange: ExchangeConfig, source: str) -> None:
    """Raise PalaError for settings that gossip's mixing rule cannot do."""
    rule = RULES[exchange.mixing]
    if rule.of_whole_models and exchange.compression == "top_k":
        raise PalaError(
            f"{source}: 'exchange.mixing' is {exchange.mixing!r}, whose weights belong to whole models, but "
            "'exchange.compression' is 'top_k', which sends parts; set the one to 'uniform' or the other to 'bfloat16'."
        )
    if rule.by_pairs and TOPOLOGIES[exchange.graph].to_all:
        raise PalaError(
            f"{source}: 'exchange.mixing' is {exchange.mixing!r}, where a rank has one open offer, but "
            f"'exchange.topology' is {exchange.graph!r}, which sends to everybody; set the one to 'uniform' or the "
            "other to 'random'."
        )


def _check_replay(config: Config, source: str) -> None:
    """Raise PalaError if Gorila would end before it learns, or is to normalise what its replay holds."""
    least = config.gorila.min_replay_steps
    period = config.gorila.update_period_steps
    if config.total_steps < least + period:
        raise PalaError(
            f"{source}: 'total_steps' is {config.total_steps}, but learning begins after 'gorila.min_replay_steps' "
            f"({least}) and 'gorila.update_period_steps' ({period}), so nothing would be learned; raise the one or "
            "lower the others."
        )
    if config.network.memory != "none":
        raise PalaError(
            f"{source}: 'network.memory' is {config.network.memory!r}, but 'algorithm' is 'gorila', whose replay holds "
            "steps without what came before; leave it out, or set 'algorithm' to 'a2c'."
        )
    for key in ("normalize_observations", "normalize_rewards"):
        if getattr(config.env, key):
            raise PalaError(
                f"{source}: 'env.{key}' is true, but 'algorithm' is 'gorila', whose replay holds what was seen before; "
                "leave it out, or wrap the environment with a fixed scale, as RescaleObservation or TransformReward."
            )


def _check_spares(config: Config, source: str) -> None:
    """Raise PalaError for spare ranks where none can take a place."""
    if config.run.spares and not config.exchange_kind.replaces_ranks:
        raise PalaError(
            f"{source}: 'run.spares' is {config.run.spares}, but 'exchange.kind' is {config.exchange.kind!r}, in which "
            "no rank can take another's place while training runs; 'gossip' can. Leave it out, and let "
            "`pala train -n` restart the job."
        )


def _check_groups(config: Config, source: str) -> None:
    """Raise PalaError for groups of ranks where there can be none."""
    if not config.exchange.has_groups:
        return
    group = f"{source}: 'exchange.group' is {config.exchange.group!r}"
    if config.exchange_kind.of_algorithm:
        raise PalaError(f"{group}, but 'algorithm' is {config.algorithm!r}, whose ranks form no groups; leave it out.")
    if config.run.spares:
        raise PalaError(
            f"{group} and 'run.spares' is {config.run.spares}, but a spare cannot join a group; set one of them to its "
            "default. A group continues without a rank that dies."
        )


def _check_gorila(gorila: GorilaConfig, source: str) -> None:
    """Raise PalaError for settings of Gorila that do not go together."""
    _check_roles(gorila, source)
    if gorila.min_replay_steps > gorila.replay_capacity_steps:
        raise PalaError(
            f"{source}: 'gorila.min_replay_steps' is {gorila.min_replay_steps}, but 'gorila.replay_capacity_steps' is "
            f"{gorila.replay_capacity_steps}, so learning would never begin; lower the one or raise the other."
        )
    if gorila.parameters_period_updates > gorila.max_staleness_updates + 1:
        raise PalaError(
            f"{source}: 'gorila.parameters_period_updates' is {gorila.parameters_period_updates}, but gradients more "
            f"than {gorila.max_staleness_updates} updates old are discarded ('gorila.max_staleness_updates'); lower "
            "the one or raise the other."
        )


def _check_roles(gorila: GorilaConfig, source: str) -> None:
    """Raise PalaError for a role that no rank has, or whose number is not the user's to set."""
    for key in ("num_actors", "num_learners", "num_replays"):
        number, uncounted = getattr(gorila, key), ""
        if gorila.roles == "bundled":
            uncounted = "'gorila.roles' is 'bundled', in which every rank acts, learns and holds replay"
        elif key == "num_replays" and gorila.replay == "local":
            uncounted = "'gorila.replay' is 'local': it is on the actors' ranks"
        if uncounted and number:
            raise PalaError(f"{source}: 'gorila.{key}' is {number}, but {uncounted}; leave it out.")
        if not uncounted and number == 0:
            raise PalaError(
                f"{source}: 'gorila.{key}' is 0, but 'gorila.roles' is 'separate', which needs at least one; set it, "
                "or set 'gorila.roles' to 'bundled'."
            )
    if gorila.num_replays > gorila.num_actors:
        raise PalaError(
            f"{source}: 'gorila.num_replays' is {gorila.num_replays}, but each is filled by actors of its own and "
            f"'gorila.num_actors' is {gorila.num_actors}; lower the one or raise the other."
        )


def _listed(values: tuple[object, ...]) -> str:
    """Return values as words: 'a' and 'b'."""
    return " and ".join(map(repr, values))
