"""What a configuration may hold: the range of every number, and settings that do not go together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pala.config.kinds import kind_of
from pala.exchange.gossip.mixing import RULES
from pala.system.errors import PalaError
from pala.system.tables import flatten, shown

if TYPE_CHECKING:
    from pala.config import Config, ExchangeConfig, GorilaConfig

_RANGES: dict[str, tuple[float, float]] = {
    "total_steps": (1, 1e14), "seed": (0, 2**63 - 1),
    "env.num_envs": (1, 1e6), "env.frame_skip": (1, 1000), "env.frame_stack": (1, 1000), "env.noop_max": (0, 1e6),
    "env.repeat_action_probability": (0, 1), "env.max_episode_frames": (1, 1e9), "env.max_episode_steps": (0, 1e12),
    "network.conv_hidden": (1, 1e6),
    "a2c.rollout_steps": (1, 1e6), "a2c.gamma": (0, 1), "a2c.gae_lambda": (0, 1), "a2c.learning_rate": (0, 1e6),
    "a2c.learning_rate_warmup_updates": (0, 1e9), "a2c.learning_rate_most_scaling": (1, 1e6),
    "a2c.momentum": (0, 0.999), "a2c.momentum_smoothing": (0, 0.999),
    "a2c.rmsprop_alpha": (0, 0.999999), "a2c.rmsprop_epsilon": (1e-15, 1), "a2c.value_coefficient": (0, 1e6),
    "a2c.entropy_coefficient": (0, 1e6), "a2c.max_gradient_norm": (0, 1e9),
    "exchange.exchanges_per_update": (1, 1000),
    "exchange.max_staleness": (0, 1e9), "exchange.patience_s": (0.5, 1e6), "exchange.top_k_fraction": (1e-9, 1),
    "gorila.num_actors": (0, 1e6), "gorila.num_learners": (0, 1e6), "gorila.num_replays": (0, 1e6),
    "gorila.num_shards": (1, 1e6), "gorila.replay_capacity_steps": (1, 1e12), "gorila.min_replay_steps": (1, 1e12),
    "gorila.minibatch_size": (1, 1e6), "gorila.update_period_steps": (1, 1e9),
    "gorila.parameters_period_updates": (1, 1e9), "gorila.gamma": (0, 1), "gorila.target_period_updates": (1, 1e12),
    "gorila.patience_s": (1, 1e6), "gorila.adagrad_learning_rate": (0, 1e6), "gorila.adagrad_epsilon": (1e-15, 1),
    "gorila.rmsprop_learning_rate": (0, 1e6), "gorila.rmsprop_alpha": (0, 0.999999),
    "gorila.rmsprop_epsilon": (1e-15, 1), "gorila.max_staleness_updates": (0, 1e12),
    "gorila.loss_filter_deviations": (0, 1e6), "gorila.loss_filter_horizon_updates": (2, 1e9),
    "gorila.epsilon_first": (0, 1), "gorila.epsilon_last": (0, 1), "gorila.epsilon_decay_steps": (1, 1e12),
    "run.spares": (0, 1e6), "run.start_timeout_s": (1, 1e6),
    "run.threads": (0, 4096), "run.log_interval_s": (0.1, 86400), "run.checkpoint_interval_s": (0.1, 1e7),
    "evaluation.episodes": (0, 1e6), "evaluation.num_envs": (1, 1e4), "evaluation.epsilon": (0, 1),
    "evaluation.max_episode_steps": (1, 1e12), "evaluation.timeout_s": (1, 1e6),
}  # fmt: skip


def check(config: Config, source: str) -> None:
    """Raise PalaError for a value outside its range."""
    values = flatten(dataclasses.asdict(config))
    for key, (low, high) in _RANGES.items():
        if not low <= values[key] <= high:
            raise PalaError(f"{source}: '{key}' is {shown(values[key])} but must lie between {low:g} and {high:g}.")
    for key in ("network.conv_channels", "network.mlp_hidden"):
        if not all(1 <= width <= 1e6 for width in values[key]):
            raise PalaError(f"{source}: '{key}' is {shown(values[key])} but every width must lie between 1 and 1e+06.")
    check_exchange(config.exchange, source)
    _check_gorila(config.gorila, source)
    _check_normalization(config, source)
    _check_spares(config, source)
    least, period = config.gorila.min_replay_steps, config.gorila.update_period_steps
    if config.algorithm == "gorila" and config.total_steps < least + period:
        raise PalaError(
            f"{source}: 'total_steps' is {config.total_steps}, but learning begins after 'gorila.min_replay_steps' "
            f"({least}) and 'gorila.update_period_steps' ({period}), so nothing would be learned; raise the one or "
            "lower the others."
        )
    name = config.run.name
    if name in (".", "..") or "/" in name:
        raise PalaError(f"{source}: 'run.name' is {name!r} but must be a plain folder name; 'run.dir' says where.")


def check_exchange(exchange: ExchangeConfig, source: str) -> None:
    """Raise PalaError for settings of the exchange that do not go together."""
    rule = RULES[exchange.mixing]
    if rule.of_whole_models and exchange.compression == "top_k":
        raise PalaError(
            f"{source}: 'exchange.mixing' is {exchange.mixing!r}, whose weights belong to whole models, but "
            "'exchange.compression' is 'top_k', which sends parts; set the one to 'uniform' or the other to 'bfloat16'."
        )
    if rule.by_pairs and exchange.graph == "complete":
        raise PalaError(
            f"{source}: 'exchange.mixing' is {exchange.mixing!r}, where a rank has one open offer, but "
            "'exchange.topology' is 'complete', which sends to everybody; set the one to 'uniform' or the other to "
            "'random'."
        )
    if not rule.by_pairs and exchange.exchanges_per_update > 1:
        raise PalaError(
            f"{source}: 'exchange.exchanges_per_update' is {exchange.exchanges_per_update}, but 'exchange.mixing' is "
            f"{exchange.mixing!r}, by which a rank sends once an update; set the one to 1 or the other to 'paired'."
        )
    for key, values in kind_of(exchange).allows.items():
        if (value := getattr(exchange, key)) not in values:
            raise PalaError(
                f"{source}: 'exchange.{key}' is {value!r}, but 'exchange.kind' is {exchange.kind!r}, which has "
                f"{_listed(values)} only; 'gossip' has all."
            )


def _check_spares(config: Config, source: str) -> None:
    """Raise PalaError for spare ranks where none can take a place."""
    if config.run.spares and not config.exchange_kind.replaces_ranks:
        raise PalaError(
            f"{source}: 'run.spares' is {config.run.spares}, but 'exchange.kind' is {config.exchange.kind!r}, in which "
            "no rank can take another's place while training runs; 'gossip' can. Leave it out, and let "
            "`launch/supervise.py` restart the job."
        )


def _check_normalization(config: Config, source: str) -> None:
    """Raise PalaError where nothing would be normalised."""
    for key in ("normalize_observations", "normalize_rewards"):
        if config.algorithm == "gorila" and getattr(config.env, key):
            raise PalaError(
                f"{source}: 'env.{key}' is true, but 'algorithm' is 'gorila', whose replay holds what was seen before; "
                "leave it out, or wrap the environment with a fixed scale, as RescaleObservation or TransformReward."
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
    if gorila.epsilon_last > gorila.epsilon_first:
        raise PalaError(
            f"{source}: 'gorila.epsilon_last' is {gorila.epsilon_last:g}, above 'gorila.epsilon_first' "
            f"({gorila.epsilon_first:g}), but epsilon falls; lower the one or raise the other."
        )


def _check_roles(gorila: GorilaConfig, source: str) -> None:
    """Raise PalaError for a role that nobody has, or that cannot be counted so."""
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


def _listed(values: tuple[str, ...]) -> str:
    return " and ".join(map(repr, values))
