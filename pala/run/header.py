"""The first lines of a run: what will be trained, with what, and where it is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pala.a2c.learning_rate import learning_rate_factor
from pala.config import Config, load_with_ranks
from pala.config.catalogue import kind_of
from pala.config.influence import unused_overrides
from pala.system.text import counted

_MOST_HOSTS = 4  # that are named


def first_line(config: Config, ranks: int) -> str:
    """What can be said before torch is loaded. `ranks`: that train."""
    spares = f" and {counted(config.run.spares, 'spare')}" * (config.run.spares > 0)
    steps = f"{config.total_steps:,} steps"
    return f"PALA  {config.env.id}, {steps}, {counted(ranks, 'rank')}{spares}: starts"


def header(
    config: Config, run: Path, hosts: Sequence[str], threads: int, device: str, parameters: int, steps_made: int
) -> str:
    """What is known when everything has been made. `hosts`: of the ranks that train; `parameters`: of the network;
    `steps_made`: by earlier starts of the run."""
    names = list(dict.fromkeys(hosts))
    shown = ", ".join(names[:_MOST_HOSTS]) + ", …" * (len(names) > _MOST_HOSTS)
    where = f"on {shown}" if len(names) == 1 else f"on {len(names)} hosts ({shown})"
    learns = ""
    if config.algorithm == "gorila" and steps_made == 0:  # later it depends on what is left of the replay
        learns = f"; learning begins after {config.gorila.min_replay_steps:,}"
    made = f", {steps_made:,} of them made before" * (steps_made > 0)
    if steps_made >= config.total_steps:
        made = f", and {steps_made:,} were made before: none is left to train (a larger `--total-steps` goes on)"
    lines = [
        f"PALA  {run}",
        f"      {_method(config)}; {counted(len(hosts), 'rank')} {where}, {counted(threads, 'thread')} and "
        f"{counted(config.env.num_envs, 'environment')} each",
        f"      network of {parameters:,} parameters, {config.network.precision}, on {device}",
        f"      {config.total_steps:,} steps over all ranks{made}{learns}",
    ]
    return "\n".join(lines)


def _method(config: Config) -> str:
    if config.algorithm == "gorila":
        return "Gorila DQN"
    return f"{config.algorithm.upper()}, exchange {config.exchange.kind}"


def note_on_vain(config: Config, before: Config, own_env: bool = False, own_network: bool = False) -> str:
    """A sentence if the command line changes settings of `before` that the run does not read; else empty. `own_env`:
    it plays an environment made in Python; `own_network`: its network is."""
    if not (vain := unused_overrides(config, before, own_env, own_network)):
        return ""
    names = ", ".join(f"'{key}'" for key in vain)
    them, run = "it" if len(vain) == 1 else "them", f"{_method(config)}, {config.env.id}"
    return f"{names}: set, but nothing reads {them} in this run ({run})."


def note_on_ranks(preset: Path | None, config: Config, ranks: int) -> str:
    """A sentence if the preset's learning rate was chosen for another number of ranks than train; else empty. Raises
    PalaError."""
    if preset is None or config.algorithm != "a2c":
        return ""
    chosen, meant = load_with_ranks(preset)
    rate = config.a2c.learning_rate
    if meant is None or rate != chosen.a2c.learning_rate:
        return ""
    if kind_of(config.exchange).independent:
        return "" if meant == 1 or kind_of(chosen.exchange).independent else (
            f"Preset '{preset}' has the learning rate {rate:g} for {meant} ranks, but here each learns alone: by "
            f"GALA's rule, the square root of their number, use `--a2c.learning-rate {rate / math.sqrt(meant):.2g}`."
        )  # fmt: skip
    if config.a2c.learning_rate_scaling == "ranks":
        return "" if meant == 1 or learning_rate_factor(config.exchange, ranks) == 1 else (
            f"Preset '{preset}' has the learning rate {rate:g} for {meant} ranks already, and it is scaled once more: "
            f"one learner's would be `--a2c.learning-rate {rate / math.sqrt(meant):.2g}`."
        )  # fmt: skip
    if meant == ranks:
        return ""
    other = f"--a2c.learning-rate {rate * math.sqrt(ranks / meant):.2g}"
    return (
        f"Preset '{preset}' has the learning rate {rate:g} for {counted(meant, 'rank')}, but {ranks} train: by GALA's "
        f"rule, the square root of their number, that would be `{other}`. docs/learning.md has the rates that were "
        f"measured."
    )
