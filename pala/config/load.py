"""Reading of configurations from a preset, from tables or from Python; each is checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pala.config import presets
from pala.config.checks import check
from pala.config.schema import Config
from pala.system.errors import PalaError
from pala.system.tables import build, merged


def load_preset(preset: str | Path) -> Config:
    """Read a TOML preset, given by path or by name (`pong`), over the preset that its key `base` names, if any, and
    the defaults. Raises PalaError that names the file and the key."""
    table = dict[str, Any]()
    config = Config()
    for name, above in presets.chain(preset):
        table = merged(table, above)
        config = from_table(table, f"Preset '{name}'")
    return config


def from_table(table: dict[str, Any], source: str) -> Config:
    """Return a checked Config from nested dictionaries (TOML or JSON). Raises PalaError that names `source`."""
    config = build(Config, table, source)
    check(config, source)
    return config


def checked(config: Config) -> Config:
    """Return a Config made in Python, with every value checked and of its type. Raises PalaError."""
    if not isinstance(config, Config):
        preset = f"; `pala.load_preset({config!r})` reads one" if isinstance(config, str) else ""
        raise PalaError(f"The configuration is of type '{type(config).__name__}' but must be a pala.Config{preset}.")
    return from_table(to_table(config), source="Config")


def to_table(config: Config) -> dict[str, Any]:
    """Return the configuration as nested dictionaries, ready for JSON."""
    return dataclasses.asdict(config)
