"""What each kind of exchange needs and gives, and how far its ranks step."""

from __future__ import annotations

import typing
from dataclasses import replace
from pkgutil import resolve_name

import pytest

from pala.a2c.learning_rate import learning_rate
from pala.config import Config, ExchangeConfig, facts_of
from pala.config.catalogue import KINDS, RULES, TOPOLOGIES, kind_of
from pala.exchange.base import ModelExchange


def test_every_kind_of_the_configuration_has_a_row() -> None:
    kinds = typing.get_args(typing.get_type_hints(ExchangeConfig)["kind"])
    assert sorted(KINDS) == sorted(kinds)
    assert all(kind_of(ExchangeConfig(kind)).name == kind for kind in kinds)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_names_settings_and_values_that_there_are(name: str) -> None:
    kind, hints = KINDS[name], typing.get_type_hints(ExchangeConfig)
    for setting, values in kind.allows.items():
        choices = typing.get_args(hints[setting])
        assert all(value in choices or type(value) in choices for value in values)
    assert issubclass(resolve_name(kind.made_by), ModelExchange)
    assert kind.default_topology in typing.get_args(hints["topology"])
    if "topology" in kind.allows:
        assert kind.default_topology in kind.allows["topology"]


def test_every_setting_is_read_by_kinds_that_there_are() -> None:
    read = {key: facts.kinds for key, facts in facts_of(Config).items() if key.startswith("exchange.")}
    assert read.pop("exchange.kind") is None
    assert all(kinds and set(kinds) <= set(KINDS) for kinds in read.values())
    assert "exchange.topology" in read


def test_every_rule_and_topology_has_a_row_that_says_what_is_made_of_it() -> None:
    hints = typing.get_type_hints(ExchangeConfig)
    assert list(RULES) == list(typing.get_args(hints["mixing"]))
    assert ["auto", *TOPOLOGIES] == list(typing.get_args(hints["topology"]))
    for row in TOPOLOGIES.values():
        assert len(row.out_peers(0, range(4), 0, 1)) == (3 if row.to_all else 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("models", "times"), [(1, 1), (2, 1), (3, 1.5), (4, 2), (64, 2)])
def test_models_that_are_mixed_are_moved_by_longer_steps(kind: typing.Any, models: int, times: float) -> None:
    config = Config(exchange=ExchangeConfig(kind))
    expected = 7e-4 * (times if kind in ("gossip", "shared_memory") else 1)
    assert learning_rate(config, models) == pytest.approx(expected)
    fixed = replace(config, a2c=replace(config.a2c, learning_rate=0.25))
    assert learning_rate(fixed, models) == 0.25
