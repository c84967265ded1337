"""What each kind of exchange needs and gives, and how far its ranks step."""

from __future__ import annotations

import typing

import pytest

from pala.a2c.learning_rate import kept_by_mixing, learning_rate_factor
from pala.config import Config, ExchangeConfig, facts_of
from pala.config.catalogue import KINDS, RULES, TOPOLOGIES, kind_of
from pala.lab.simulate.progress import measure


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


@pytest.mark.parametrize(
    ("exchange", "factor"),
    [
        (ExchangeConfig("none"), 1.0), (ExchangeConfig("allreduce"), 3.0), (ExchangeConfig(mixing="paired"), 9.0),
        (ExchangeConfig(), 9 / 0.8), (ExchangeConfig("shared_memory"), 9 / 0.8),
    ],
)  # fmt: skip
def test_nine_ranks_step_so_many_times_as_far_as_one(exchange: ExchangeConfig, factor: float) -> None:
    assert learning_rate_factor(exchange, 9) == pytest.approx(factor)
    assert learning_rate_factor(exchange, 1) == 1


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("mixing", ["uniform", "paired"])
def test_what_mixing_keeps_is_what_the_simulation_measures(mixing: typing.Any, ranks: int) -> None:
    measured = measure(mixing, "random", ranks, delay=0.05, slowness=1.0, updates=200, seed=1)
    assert kept_by_mixing(ExchangeConfig(mixing=mixing), ranks) == pytest.approx(measured.kept, abs=0.04)
    assert measured.apart_updates < 2
