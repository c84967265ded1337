"""`pala simulate learn`: whole trainings of up to 64 ranks in one process, on a simulated network.

    gossip beside synchronous A2C       pala simulate learn --ranks 16
    over a slow network                 ... --delay-updates 3
    with one rank four times slower     ... --slow-ranks 1

The learners are real: environments, network, A2C and RMSprop of training. The gossip between them is training's
protocol on a virtual clock, whose unit is one update of a rank. So it tells what a step teaches, at any number of ranks
and over any network, but nothing about the speed of a machine. Equal settings and seed give equal results.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from torch import Tensor

from pala.a2c.agent import make_agent, with_background
from pala.comm.alone import Alone
from pala.config import Config, EnvConfig, ExchangeConfig, load_preset
from pala.config.catalogue import RULES
from pala.config.checks import check
from pala.envs.vector import Envs, make_envs
from pala.exchange.base import ModelExchange
from pala.exchange.budget import ExchangeState, Stop
from pala.lab.simulate.scenario import Scenario, check_simulated, timed_in_updates
from pala.lab.simulate.virtual_cluster import VirtualCluster
from pala.networks.distributions import Categorical
from pala.report.page import Column, table
from pala.run.provenance import provenance
from pala.system.command_line import check_choices, check_least, read_command
from pala.system.errors import PalaError
from pala.system.files import check_output_file, write_json
from pala.system.interrupt import Interrupt
from pala.system.output import print_result
from pala.system.seeding import derive


class NotFiniteError(PalaError):
    """A training that a too long step has ruined."""


METHODS = (*RULES, "allreduce", "none")
_PROGRAM = "pala simulate learn"
_INTERVALS = 50  # of a learning curve
_LOOKS = 50  # at the distance between ranks, over a training
_SLOWNESS = 4.0  # factor by which slow ranks are slower


@dataclass(frozen=True)
class Conditions:
    """Conditions of ranks and network. The unit of time is one update of an ordinary rank."""

    ranks: int = 8
    """Number of ranks."""
    delay_updates: float = 0.05
    """Time that a model is under way."""
    slow_ranks: int = 0
    """Number of ranks that are four times slower than the others."""


@dataclass(frozen=True)
class Command:
    """Train on simulated ranks: gossip by each mixing rule, synchronous A2C, independent learners."""

    preset: Annotated[Path | None, tyro.conf.Positional] = None
    """TOML file with settings; the options below win over it. Default: CartPole."""
    methods: tuple[str, ...] = ("allreduce", "uniform", "paired")
    """Methods to compare: uniform, push_sum, paired (gossip's mixing rules), allreduce (synchronous A2C), none."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Trainings of each method."""
    conditions: Annotated[Conditions, tyro.conf.arg(name="")] = field(default_factory=Conditions)
    output: Path | None = None
    """JSON file for the results, with every episode's return."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Config(total_steps=200_000, env=EnvConfig(id="CartPole-v1"))
    )


@dataclass(frozen=True)
class Learned:
    """Result of one training."""

    episodes: list[tuple[int, float, float]]  # (global steps, time in updates, return)
    global_steps: int
    time_updates: float
    updates: list[int]  # of each rank
    models_sent: int
    progress_kept: float
    """Distance that the mean of the ranks' models went along the mean of their own steps, as a share of it; 1: all."""
    distances: list[float]
    """Between ranks: root mean square distance from their mean over its norm, at equal intervals."""
    divergences: list[float]
    """Mean KL divergence of the ranks' policies from that of the first, on the first's observations (Discrete)."""

    def curve(self, total_steps: int) -> list[float]:
        """Return the mean return in 50 equal intervals of the budget. An interval without an episode takes the value
        before it; at the beginning, the first episode's return. Raises PalaError if no episode ended."""
        if not self.episodes:
            raise PalaError("No episode ended: raise '--total-steps'.")
        curve, last = [], self.episodes[0][2]
        edges = [total_steps * i // _INTERVALS for i in range(_INTERVALS + 1)]
        steps = [episode[0] for episode in self.episodes]
        for low, high in itertools.pairwise(edges):
            first, end = np.searchsorted(steps, [low, high], side="right")
            if end > first:
                last = statistics.fmean(episode[2] for episode in self.episodes[first:end])
            curve.append(last)
        return curve

    def auc(self, total_steps: int) -> float:
        """Return the area under the learning curve, divided by the curve's length: a mean return."""
        return statistics.fmean(self.curve(total_steps))


class Learners:
    """The ranks' actor-learners, with a model each."""

    def __init__(self, config: Config, ranks: int, make: Callable[[EnvConfig], Envs]) -> None:
        """`make`: makes a rank's environments."""
        self.config, self.ranks, self._envs = config, list[_Rank](), list[Envs]()
        try:
            for rank in range(ranks):
                self._envs.append(make(config.env))
                config = with_background(Alone("simulated"), config, self._envs[-1])
                self.ranks.append(_Rank(config, rank, ranks, self._envs[-1]))
        except BaseException:
            self.close()
            raise
        self.episodes: list[tuple[int, float, float]] = []
        self.distances: list[float] = []
        self.divergences: list[float] = []
        self.own_steps = torch.zeros_like(self.ranks[0].flat.data)  # sum over ranks of what they learned
        self.beginning = self.ranks[0].flat.data.clone()
        self._num_learned = self.ranks[0].flat.num_learned
        self._next_look = 0.0

    def close(self) -> None:
        """End the environments, whose processes would outlive a training."""
        for envs in self._envs:
            envs.close()

    def update(self, number: int, parameters: Tensor, global_steps: int) -> None:
        """Make a rollout and an update of a rank after `global_steps` steps of all ranks; its `parameters` change in
        place. Raises PalaError if the gradient is not finite."""
        rank = self.ranks[number]
        rank.exchange.global_steps = global_steps
        rank.flat.data.copy_(parameters)
        loss = rank.learner.differentiate()
        assert loss is not None
        if not rank.learner.step(loss).applied:
            raise NotFiniteError(f"The gradient of rank {number} is not finite: lower 'a2c.learning_rate'.")
        self.own_steps += rank.flat.data - parameters
        parameters.copy_(rank.flat.data)

    def note(self, number: int, global_steps: int, time: float) -> None:
        """Collect a rank's episodes after its update."""
        for record in self.ranks[number].learner.take_records():
            if record["type"] == "episode":
                self.episodes.append((global_steps, round(time, 3), record["return"]))

    def look(self, models: Sequence[Tensor], global_steps: int) -> None:
        """Measure how far apart the models are, every now and then."""
        if global_steps < self._next_look or len(models) == 1:
            return
        self._next_look += self.config.total_steps / _LOOKS
        stacked = torch.stack(list(models))
        mean = stacked.mean(0)
        apart = (stacked - mean)[:, : self._num_learned].square().sum(1).mean().sqrt()
        self.distances.append(float(apart / mean[: self._num_learned].norm()))
        self.divergences.append(self._divergence(stacked))

    def _divergence(self, models: Tensor) -> float:
        first = self.ranks[0]
        if not isinstance(first.network.distribution, Categorical):
            return math.nan
        kept, observations = first.flat.data.clone(), first.learner.observations
        with torch.no_grad():
            log_probs = []
            for model in models:
                first.flat.data.copy_(model)
                log_probs.append(torch.log_softmax(first.network(observations)[0], -1))
        first.flat.data.copy_(kept)
        own, others = log_probs[0], torch.stack(log_probs[1:])
        return float((own.exp() * (own - others)).sum(-1).mean())

    def learned(self, mean: Tensor, steps: int, time: float, updates: list[int], models_sent: int) -> Learned:
        """Return the result of the training; `mean`: mean of the ranks' models at the end."""
        went, own = (vector[: self._num_learned] for vector in (mean - self.beginning, self.own_steps))
        own = own / len(self.ranks)
        kept = float(went.dot(own) / own.dot(own))
        return Learned(
            self.episodes, steps, round(time, 1), updates, models_sent, kept, self.distances, self.divergences
        )


class PassiveExchange(ModelExchange):
    """An exchange that sends nothing, and never ends."""

    global_steps = 0  # whoever passes models on counts
    living: Sequence[int] = ()
    stop = Stop.NONE

    def __init__(self, ranks: int) -> None:
        """`ranks`: number of ranks in the simulation."""
        self.living, self.interrupt = range(ranks), Interrupt()

    def stop_now(self, reason: Stop) -> None:
        raise NotImplementedError("whoever drives the learner ends it")

    def after_update(self, steps: int, healthy: bool) -> bool:
        return healthy

    def close(self, timeout_s: float) -> Stop:
        return Stop.BUDGET

    def final_parameters(self, timeout_s: float) -> Tensor:
        raise NotImplementedError("whoever drives the learner has its parameters")

    def state(self) -> ExchangeState:
        return ExchangeState([0])


class _Rank:
    def __init__(self, config: Config, rank: int, ranks: int, envs: Envs) -> None:
        agent = make_agent(rank, config, envs, torch.device("cpu"))
        agent.generator = torch.Generator()
        agent.generator.manual_seed(int(derive(config.seed, rank, "actions simulated")[0]))
        self.envs, self.exchange = envs, PassiveExchange(ranks)
        self.network, self.flat = agent.network, agent.flat
        self.learner = agent.make_loop(self.exchange)
        self.learner.begin(envs.reset(derive(config.seed, rank, "environments simulated", envs.num_envs)))


def learn(
    method: str, config: Config, conditions: Conditions, make: Callable[[EnvConfig], Envs] = make_envs
) -> Learned:
    """Train once; `method` is one of `METHODS`. In float32 unless bfloat16 is asked for: equal settings and seed give
    equal results on any machine. Raises PalaError."""
    if config.network.precision == "auto":
        config = dataclasses.replace(config, network=dataclasses.replace(config.network, precision="float32"))
    config = dataclasses.replace(config, exchange=_exchange(config, method))
    learners = Learners(config, conditions.ranks, make)
    try:
        if method in ("allreduce", "none"):
            return _learn_in_rounds(learners, conditions, averaged=method == "allreduce")
        return _gossip(learners, method, conditions)
    finally:
        learners.close()


def _exchange(config: Config, method: str) -> ExchangeConfig:
    """Return the settings of the exchange by which a method trains."""
    own: dict[str, Any] = {"kind": "gossip", "mixing": method} if method in RULES else {"kind": method}
    return dataclasses.replace(config.exchange, **own)


def scenario(config: Config, method: str, conditions: Conditions) -> Scenario:
    """Return the simulated network and ranks of a training by gossip."""
    n = conditions.ranks
    delay = conditions.delay_updates
    exchange = config.exchange
    made = Scenario(
        n,
        exchange.graph,
        method,
        exchange.max_staleness,
        config.total_steps,
        config.steps_per_update,
        config.seed,
        slowness=_slowness(conditions),
        patience_s=100.0 + 20 * delay,
    )
    return timed_in_updates(made, delay)


def _gossip(learners: Learners, method: str, conditions: Conditions) -> Learned:
    config, n = learners.config, conditions.ranks
    updates = [0] * n

    def update(number: int, model: np.ndarray) -> None:
        learners.update(number, torch.from_numpy(model), cluster.global_steps)
        updates[number] += 1
        learners.note(number, cluster.global_steps + config.steps_per_update, cluster.now)

    def observe() -> None:
        learners.look([torch.from_numpy(rank.model) for rank in cluster.ranks], cluster.global_steps)

    models = np.tile(learners.beginning.numpy(), (n, 1))
    cluster = VirtualCluster(scenario(config, method, conditions), models, update)
    cluster.observe = observe
    cluster.run()
    mean = torch.from_numpy(np.asarray(cluster.mean_model, np.float32))
    return learners.learned(mean, cluster.global_steps, cluster.ended_s, updates, cluster.models_sent)


def _learn_in_rounds(learners: Learners, conditions: Conditions, averaged: bool) -> Learned:
    """Train by synchronous A2C: all ranks hold one model, a round lasts as long as the slowest rank takes, and the sum
    of gradients takes a model's time there and back. If gradients are not `averaged`, train independent learners, which
    do not wait."""
    config, n = learners.config, conditions.ranks
    flats = [rank.flat for rank in learners.ranks]
    draw, slowness = random.Random(config.seed), _slowness(conditions) or (1.0,) * n
    steps = 0
    times = [0.0] * n
    rounds = 0
    while steps < config.total_steps:
        for rank in learners.ranks:
            rank.exchange.global_steps = steps
        losses = [rank.learner.differentiate() for rank in learners.ranks]
        mean = torch.stack([flat.gradient for flat in flats]).mean(0) if averaged else None
        for rank, loss in zip(learners.ranks, losses, strict=True):
            assert loss is not None
            if mean is not None:
                rank.flat.gradient.copy_(mean)
            before = rank.flat.data.clone()
            if not rank.learner.step(loss).applied:
                raise NotFiniteError("The gradient is not finite: lower 'a2c.learning_rate'.")
            learners.own_steps += rank.flat.data - before
        rounds, steps = rounds + 1, steps + n * config.steps_per_update
        times = [time + draw.uniform(0.95, 1.05) * factor for time, factor in zip(times, slowness, strict=True)]
        if averaged:
            times = [max(times) + 2 * conditions.delay_updates] * n
        learners.look([flat.data for flat in flats], steps)
        for number, time in enumerate(times):
            learners.note(number, steps, time)
    return learners.learned(torch.stack([flat.data for flat in flats]).mean(0), steps, max(times), [rounds] * n, 0)


def _slowness(conditions: Conditions) -> tuple[float, ...]:
    fast = conditions.ranks - conditions.slow_ranks
    return (_SLOWNESS,) * conditions.slow_ranks + (1.0,) * fast if conditions.slow_ranks else ()


def parse(arguments: list[str]) -> Command:
    """Return the checked command line. Raises PalaError."""
    first = read_command(_PROGRAM, arguments, Command())
    settings = Command().config if first.preset is None else load_preset(first.preset)
    command = read_command(_PROGRAM, arguments, dataclasses.replace(first, config=settings))
    if command.config.seed != settings.seed:
        raise PalaError(f"'--seed' is {command.config.seed}, but '--seeds' names the seeds of the trainings here.")
    conditions = command.conditions
    check_choices("methods", command.methods, METHODS)
    for method in [method for method in command.methods if method in RULES] or ["uniform"]:
        tried = dataclasses.replace(command.config, exchange=_exchange(command.config, method))
        check(tried, source=f"Command line, with '--methods {method}'")
        check_simulated(tried)
    check_least("ranks", conditions.ranks, 1)
    check_least("slow-ranks", conditions.slow_ranks, 0)
    check_least("delay-updates", conditions.delay_updates, 0)
    if conditions.slow_ranks >= conditions.ranks:
        raise PalaError(
            f"'--slow-ranks' is {conditions.slow_ranks} but must be less than '--ranks', which is {conditions.ranks}."
        )
    if min(command.seeds, default=0) < 0:
        raise PalaError("'--seeds' must be numbers of at least 0.")
    if not command.seeds or not command.methods:
        raise PalaError("Name at least one of '--seeds' and one of '--methods'.")
    if command.output is not None:
        check_output_file(command.output)  # trainings may take hours
    return command


_Row = tuple[str, list[Learned], int]  # a method, its trainings, and their budget in steps


def _aucs(row: _Row) -> list[float]:
    return [training.auc(row[2]) for training in row[1]]


def _mean(title: str, value: Callable[[Learned], float], form: str) -> Column[_Row]:
    """Return a column of the mean over trainings."""
    return Column(title, lambda row: statistics.fmean(map(value, row[1])), form)


_COLUMNS: list[Column[_Row]] = [
    Column("method", lambda row: row[0]),
    Column("AUC", lambda row: statistics.fmean(_aucs(row)), ".1f"),
    Column("range", lambda row: f"{min(_aucs(row)):.1f}-{max(_aucs(row)):.1f}"),
    Column("last return", lambda row: statistics.fmean(each.curve(row[2])[-1] for each in row[1]), ".1f"),
    _mean("kept", lambda training: training.progress_kept, ".2f"),
    _mean("distance", lambda training: statistics.fmean(training.distances or [0.0]), ".4f"),
    _mean("KL", lambda training: statistics.fmean(training.divergences or [0.0]), ".4f"),
    _mean("models an update", lambda training: training.models_sent / sum(training.updates), ".2f"),
    _mean("time", lambda training: training.time_updates, ",.0f"),
]


def run(arguments: list[str]) -> None:
    """Run `pala simulate learn`. Raises PalaError."""
    command = parse(arguments)
    torch.set_num_threads(1)
    rows: list[_Row] = []
    results: list[dict[str, Any]] = []
    for method in command.methods:
        trainings = []
        for seed in command.seeds:
            config = dataclasses.replace(command.config, seed=seed)
            trainings.append(learn(method, config, command.conditions))
            print_result(f"PALA  {method}, seed {seed}: AUC {trainings[-1].auc(config.total_steps):.1f}")
            results.append({"method": method, "seed": seed} | asdict(trainings[-1]))
            _write(command, results)  # what comes next may fail, or be stopped
        rows.append((method, trainings, command.config.total_steps))
    print_result("\n" + table(_COLUMNS, rows))


def _write(command: Command, results: list[dict[str, Any]]) -> None:
    if command.output is not None:
        options = json.loads(json.dumps(asdict(command), default=str))  # paths as text
        write_json(command.output, provenance() | {"options": options, "trainings": results})
