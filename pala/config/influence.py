"""Influence of settings: which ones a run reads, which ones differ between runs, and short names of them."""

from __future__ import annotations

from typing import Any

from pala.config.facts import Facts, facts_of
from pala.config.load import to_table
from pala.config.schema import Config, ExchangeConfig
from pala.system.tables import flatten
from pala.system.text import counted


def settings_that_matter(facts: dict[str, Any], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the settings, with dotted keys, that decide how a run goes, except `without`. Those of another algorithm,
    of another kind of exchange, and of PALA's networks where the run has its own, decide nothing."""
    graph = ExchangeConfig(kind=facts["exchange.kind"], topology=facts["exchange.topology"]).graph
    known = facts_of(Config)

    def matters(key: str) -> bool:
        of_key = known.get(key, Facts())
        return key not in without and of_key.decides != "nothing" and _has_reader(of_key, facts)

    return {key: value for key, value in (facts | {"exchange.topology": graph}).items() if matters(key)}


def _has_reader(facts: Facts, values: dict[str, Any]) -> bool:
    """Return whether a run's algorithm, kind of exchange and network read a setting. `values`: settings by dotted
    keys."""
    return (
        (facts.algorithms is None or values["algorithm"] in facts.algorithms)
        and (facts.kinds is None or values["exchange.kind"] in facts.kinds)
        and (facts.own_network or not values.get("network.custom"))
    )


def unused_overrides(config: Config, before: Config, own_env: bool = False, own_network: bool = False) -> list[str]:
    """Return the dotted keys of settings that differ from `before` and that the run does not read. `own_env`: it plays
    an environment made in Python, whatever its id; `own_network`: its network is made in Python."""
    now = flatten(to_table(config))
    then = flatten(to_table(before))
    games = "atari" if config.env.is_atari and not own_env else "others"

    def is_read(facts: Facts) -> bool:
        return (
            _has_reader(facts, now)
            and facts.games in ("all", games)
            and (facts.own_network or not own_network)
            and not any(now[key] in values for key, values in facts.unless.items())
        )

    return [key for key, facts in facts_of(Config).items() if now[key] != then[key] and not is_read(facts)]


def follows_budget(config: Config) -> bool:
    """Return whether a setting that the run reads changes over the budget."""
    values = flatten(to_table(config))
    known = facts_of(Config).items()
    return any(values[key] in facts.follows_budget and _has_reader(facts, values) for key, facts in known)


def differences(found: Config, wanted: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that decide how a run learns and differ, dotted key -> (found, wanted). The seed is left out,
    and so is the budget unless a setting follows it. A precision of `auto` wants any: the machine decides."""
    is_of_budget = follows_budget(found) or follows_budget(wanted)
    without: tuple[str, ...] = ("seed",) if is_of_budget else ("seed", "total_steps")
    known = facts_of(Config)
    if found.network.custom or wanted.network.custom:  # what one of them does not read tells nothing
        without += tuple(key for key, facts in known.items() if not facts.own_network)
    one, other = (settings_that_matter(flatten(to_table(c)), without) for c in (found, wanted))
    pairs = {key: (one.get(key), other.get(key)) for key in one | other if known[key].decides == "learning"}
    return {
        key: pair
        for key, pair in pairs.items()
        if pair[0] != pair[1] and (key, pair[1]) != ("network.precision", "auto")
    }


def phrase(key: str, value: Any) -> str:
    """Return a setting in few words."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if key == "env.id":
        return text.removeprefix("ALE/")
    if key == "ranks":
        return counted(value, "rank")
    name = "exchange" if key == "exchange.kind" else key.split(".")[-1].replace("_", " ")
    return f"{name} {text}"
