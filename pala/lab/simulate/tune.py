"""A learning rate for an environment of one's own: `pala tune my_module:MyEnv-v0 --ranks 4`.

    on more ranks, with a longer budget     pala tune my_module:MyEnv-v0 --ranks 8 --total-steps 1000000
    other rates, more seeds                 pala tune my_module:MyEnv-v0 --rates 1e-4 3e-4 1e-3 --seeds 1 2 3 4

A few short trainings of simulated ranks in one process, by gossip as training has it (`simulate learn`). They say what
a step teaches, not how fast a machine is. Needs no MPI.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from pala.a2c.learning_rate import ONE_LEARNER, learning_rate
from pala.config import Config, EnvConfig
from pala.config.checks import check
from pala.lab.simulate.scenario import check_simulated
from pala.report.page import Column, table
from pala.system.command_line import check_least, exit_on_mistake, read_command
from pala.system.errors import PalaError
from pala.system.output import print_result
from pala.system.resources import loading, prepare
from pala.system.text import counted, duration

if TYPE_CHECKING:
    from pala.lab.simulate.learn import Learned

_PROGRAM = "pala tune"


@dataclass(frozen=True)
class Command:
    """Try learning rates on simulated ranks, and say which learned most."""

    environment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[ENV]")] = "CartPole-v1"
    """Gymnasium id, as `env.id` has it."""
    ranks: int = 4
    """Number of ranks that will train."""
    rates: tuple[float, ...] = tuple(times * ONE_LEARNER for times in (0.5, 1.0, 2.0, 4.0))
    """Learning rates to try, beside the one that `auto` stands for."""
    seeds: tuple[int, ...] = (1, 2)
    """Trainings at each rate."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=lambda: Config(total_steps=200_000))


_Row = tuple[float, list[float]]  # a learning rate, and the mean return of each training at it
_COLUMNS: list[Column[_Row]] = [
    Column("learning rate", lambda row: row[0], "g"),
    Column("mean return", lambda row: statistics.fmean(row[1]), ".2f"),
    Column("range", lambda row: f"{min(row[1]):.2f} to {max(row[1]):.2f}"),
]


def parse(arguments: list[str]) -> Command:
    """Return the checked command line, with the environment and `auto` in its configuration. Raises PalaError."""
    command = read_command(_PROGRAM, arguments, Command())
    config = dataclasses.replace(command.config, env=dataclasses.replace(command.config.env, id=command.environment))
    for key, given, default in (("env.id", command.config.env.id, EnvConfig().id), ("seed", command.config.seed, 1)):
        if given != default:
            raise PalaError(f"'--{key}' is given, but here the environment is the first word, and '--seeds' are more.")
    if config.a2c.learning_rate != "auto":
        raise PalaError("'--a2c.learning-rate' is given, but '--rates' names the learning rates here.")
    check(config, source="Command line")
    check_simulated(config)
    check_least("ranks", command.ranks, 1)
    if not command.rates or not command.seeds or min(command.rates) <= 0 or min(command.seeds) < 0:
        raise PalaError("'--rates' must be numbers above 0, and '--seeds' of at least 0; name one of each or more.")
    return dataclasses.replace(command, config=config)


def _train(command: Command, rate: float, seed: int) -> float:
    """Return the mean return of one training; minus infinity if its steps ruined it. Raises PalaError."""
    from pala.lab.simulate.learn import Conditions, NotFiniteError, learn

    a2c = dataclasses.replace(command.config.a2c, learning_rate=rate)
    config = dataclasses.replace(command.config, seed=seed, a2c=a2c)
    try:
        exchange = config.exchange
        method = exchange.mixing if exchange.kind == "gossip" else exchange.kind
        learned: Learned = learn(method, config, Conditions(ranks=command.ranks))
    except NotFiniteError:
        return -math.inf
    if not learned.episodes:
        raise PalaError(
            f"No episode ended within {config.total_steps:,} steps, so nothing tells what was learned: raise "
            "'--total-steps', or set '--env.max-episode-steps'."
        )
    return learned.auc(config.total_steps)


def advice(rows: list[_Row], auto: float) -> str:
    """Return what to do, by the rows of all learning rates, of which `auto` is one."""
    best = max(rows, key=lambda row: statistics.fmean(row[1]))
    rates = [rate for rate, _ in rows]
    if statistics.fmean(best[1]) == -math.inf:
        return f"No rate learned: each ruined a training. Try lower `--rates` than {min(rates):g}."
    if len(rates) > 1 and len({statistics.fmean(returns) for _, returns in rows}) == 1:
        return "No rate learned more than another: raise `--total-steps`, or leave `a2c.learning_rate` alone."
    of_auto = next(returns for rate, returns in rows if rate == auto)
    if best[0] == auto:
        return f"The default, {auto:g}, learned most: leave `a2c.learning_rate` alone."
    if max(of_auto) >= min(best[1]):
        return (
            f"{best[0]:g} learned most, but its trainings and those of the default, {auto:g}, overlap: leave "
            "`a2c.learning_rate` alone, or try more `--seeds`."
        )
    end = " It is the {} rate tried: try {} ones.".format(
        *(("lowest", "lower") if best[0] == min(rates) else ("highest", "higher"))
    )
    return f"Train with `--a2c.learning-rate {best[0]:g}`.{end if best[0] in (min(rates), max(rates)) else ''}"


def time_left(seconds: float, done: int, trainings: int) -> str:
    """Return the end of a line after `done` of the `trainings`, which took that long: the time that the others need."""
    return f"; about {duration(seconds / done * (trainings - done))} left" if done < trainings else ""


@exit_on_mistake(OSError)
def main() -> None:
    """Run `pala tune`."""
    command = parse(sys.argv[1:])
    prepare(1)
    with loading():
        import torch
    torch.set_num_threads(1)
    auto = learning_rate(command.config, command.ranks)
    rates = sorted({*command.rates, auto})
    trainings = counted(len(rates) * len(command.seeds), "training")
    print_result(f"PALA  {command.environment}, {counted(command.ranks, 'rank')}, {trainings} of simulated ranks")
    rows: list[_Row] = [(rate, []) for rate in rates]
    began_s = time.monotonic()
    for done, ((rate, returns), seed) in enumerate(itertools.product(rows, command.seeds), 1):
        returns.append(_train(command, rate, seed))
        left = time_left(time.monotonic() - began_s, done, len(rates) * len(command.seeds))
        print_result(f"PALA  learning rate {rate:g}, seed {seed}: mean return {returns[-1]:.2f}{left}")
    print_result("\n" + table(_COLUMNS, rows) + "\n\n" + advice(rows, auto))
