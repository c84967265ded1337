"""Which settings of runs decide how they go, which of them differ, and their names in few words."""

from __future__ import annotations

from typing import Any

from pala.config import Config, ExchangeConfig, to_table
from pala.config.kinds import KINDS
from pala.system.tables import flatten
from pala.system.text import counted

_WITHOUT_INFLUENCE = (
    "run.name", "run.dir", "run.console", "run.log_interval_s", "run.tensorboard", "run.checkpoint_interval_s",
    "run.start_timeout_s", "evaluation.episodes", "evaluation.num_envs", "evaluation.greedy", "evaluation.epsilon",
    "evaluation.timeout_s", "evaluation.max_episode_steps", "env.episode_info",
)  # fmt: skip
_SECTIONS_NOT_READ = {"a2c": ("gorila.",), "gorila": ("a2c.", "exchange.")}  # by algorithm
_OF_ATARI = (
    "terminal_on_life_loss", "frame_skip", "frame_stack", "noop_max", "fire_on_reset", "repeat_action_probability",
    "full_action_space", "max_episode_frames",
)  # fmt: skip
_OF_OUR_NETWORKS = ("conv_channels", "conv_hidden", "mlp_hidden", "passes")
_NOT_OF_ATARI = (
    "env.vectorization", "env.image_layout", "env.max_episode_steps", "network.mlp_hidden",
    "evaluation.max_episode_steps",
)  # fmt: skip
_MACHINE = ("run.", "evaluation.")  # sections that do not decide how a run learns


def settings_that_matter(facts: dict[str, Any], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings, with dotted keys, that decide how a run goes: none of another algorithm's, and of the exchange's
    only those that its kind reads."""
    graph = ExchangeConfig(kind=facts["exchange.kind"], topology=facts["exchange.topology"]).graph
    facts = facts | {"exchange.topology": graph}
    ignored = {*_WITHOUT_INFLUENCE, *without} | _not_read(facts)
    return {key: value for key, value in facts.items() if key not in ignored}


def _not_read(facts: dict[str, Any]) -> set[str]:
    """Settings, with dotted keys, at which such a run does not look."""
    read = {"exchange.kind", *(f"exchange.{name}" for name in KINDS[facts["exchange.kind"]].reads)}
    of_exchange = {key for key in facts if key.startswith("exchange.") and key not in read}
    of_network = {f"network.{name}" for name in _OF_OUR_NETWORKS if facts.get("network.custom")}
    of_algorithm = {key for key in facts if key.startswith(_SECTIONS_NOT_READ[facts["algorithm"]])}
    return of_exchange | of_network | of_algorithm


def set_in_vain(
    config: Config, before: Config, own_env: bool = False, own_network: bool = False
) -> list[str]:  # fmt: skip
    """Dotted keys of settings that are not what they were, and at which the run does not look. `own_env`: it plays an
    environment made in Python, whatever its id; `own_network`: its network is made in Python."""
    now, then = flatten(to_table(config)), flatten(to_table(before))
    unread = _not_read(now)
    is_atari = config.env.is_atari and not own_env
    unread |= set(_NOT_OF_ATARI) if is_atari else {f"env.{name}" for name in _OF_ATARI}
    unread |= {f"network.{name}" for name in _OF_OUR_NETWORKS if own_network}
    unread |= _without_their_condition(config)
    return [key for key in now if now[key] != then[key] and key in unread]


def _without_their_condition(config: Config) -> set[str]:
    """Settings that only together with another are read, which this run has not."""
    a2c, exchange, is_gorila = config.a2c, config.exchange_kind, config.algorithm == "gorila"
    other = "adagrad" if config.gorila.optimiser == "rmsprop" else "rmsprop"
    conditions = {
        ("evaluation.epsilon",): is_gorila,
        ("a2c.gradient_clipping",): a2c.max_gradient_norm > 0
        and not (exchange.averages_gradients or exchange.independent),
        ("gorila.loss_filter_horizon_updates",): config.gorila.loss_filter_deviations > 0,
        ("a2c.momentum_smoothing",): a2c.momentum > 0,
        ("a2c.learning_rate_most_scaling",): a2c.learning_rate_scaling == "ranks",
        ("exchange.top_k_fraction",): config.exchange.compression == "top_k",
        tuple(f"gorila.{other}_{name}" for name in ("learning_rate", "alpha", "epsilon")): False,
    }
    return {key for keys, holds in conditions.items() for key in keys if not holds}


def differences(found: Config, wanted: Config) -> dict[str, tuple[Any, Any]]:
    """Settings that decide how a run learns and differ, dotted key -> (found, wanted): the seed aside, and the budget
    unless a setting follows it. A precision of `auto` wants any: the machine decides."""
    follows_budget = any(c.algorithm == "a2c" and c.a2c.follows_budget for c in (found, wanted))
    without: tuple[str, ...] = ("seed",) if follows_budget else ("seed", "total_steps")
    if found.network.custom or wanted.network.custom:  # what one of them does not read tells nothing
        without += tuple(f"network.{name}" for name in _OF_OUR_NETWORKS)
    one, other = (settings_that_matter(flatten(to_table(c)), without) for c in (found, wanted))
    pairs = {key: (one.get(key), other.get(key)) for key in one | other if not key.startswith(_MACHINE)}
    return {
        key: pair
        for key, pair in pairs.items()
        if pair[0] != pair[1] and (key, pair[1]) != ("network.precision", "auto")
    }


def phrase(key: str, value: Any) -> str:
    """A setting in few words."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if key == "env.id":
        return text.removeprefix("ALE/")
    if key == "ranks":
        return counted(value, "rank")
    name = "exchange" if key == "exchange.kind" else key.split(".")[-1].replace("_", " ")
    return f"{name} {text}"
