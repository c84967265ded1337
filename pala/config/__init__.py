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

__all__ = [
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
