"""The configuration: its dataclasses, how presets are read, and what is known of each setting."""

from pala.config.schema import (
    ENV_LEARNING,
    ENV_OPERATION,
    A2CConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    ExchangeConfig,
    GorilaConfig,
    NetworkConfig,
    Precision,
    RunConfig,
    checked,
    from_table,
    load_preset,
    load_with_ranks,
    to_table,
)

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
    "from_table",
    "load_preset",
    "load_with_ranks",
    "to_table",
]
