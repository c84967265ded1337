"""The configuration: its dataclasses, what is known of each setting, and how presets are read."""

from pala.config.facts import facts_of
from pala.config.load import checked, from_table, load_preset, to_table
from pala.config.schema import (
    A2CConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    ExchangeConfig,
    GorilaConfig,
    NetworkConfig,
    Precision,
    RunConfig,
)

ENV_OPERATION = tuple(key for key, facts in facts_of(EnvConfig).items() if facts.changes == "nothing")
"""Settings of `EnvConfig` that change no game: how many are played, and how."""
ENV_LEARNING = tuple(key for key, facts in facts_of(EnvConfig).items() if facts.changes == "view")
"""Settings of `EnvConfig` that change only what a learner sees of a game."""

__all__ = [
    "ENV_LEARNING",
    "ENV_OPERATION",
    "A2CConfig",
    "Config",
    "EnvConfig",
    "EvaluationConfig",
    "ExchangeConfig",
    "GorilaConfig",
    "NetworkConfig",
    "Precision",
    "RunConfig",
    "checked",
    "facts_of",
    "from_table",
    "load_preset",
    "to_table",
]
