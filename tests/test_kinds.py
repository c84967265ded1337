"""What each kind of exchange needs and gives."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing

import pytest

from pala.config import ExchangeConfig
from pala.exchange.kinds import KINDS, kind_of


def test_every_kind_of_the_configuration_has_a_row() -> None:
    kinds = typing.get_args(typing.get_type_hints(ExchangeConfig)["kind"])
    assert sorted(KINDS) == sorted(kinds)
    assert all(kind_of(ExchangeConfig(kind)).name == kind for kind in kinds)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_names_settings_and_values_that_there_are(name: str) -> None:
    kind, hints = KINDS[name], typing.get_type_hints(ExchangeConfig)
    fields = {field.name for field in dataclasses.fields(ExchangeConfig)} - {"kind"}
    assert fields.issuperset(kind.reads)
    for setting, values in kind.allows.items():
        assert set(typing.get_args(hints[setting])).issuperset(values)
    assert kind.default_topology in typing.get_args(hints["topology"])
    if "topology" in kind.allows:
        assert kind.default_topology in kind.allows["topology"]


def test_gossip_reads_every_setting() -> None:
    assert {field.name for field in dataclasses.fields(ExchangeConfig)} == {"kind", *KINDS["gossip"].reads}


def test_the_table_needs_neither_torch_nor_mpi() -> None:
    code = "import sys, pala.config, pala.exchange.kinds; print({'torch', 'mpi4py', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
