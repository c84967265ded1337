"""The benchmark's rounds: in each, every part and every kind of training once, so that noise meets them all alike.

Runs on every rank of a job; every method is collective.
"""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Any, cast

import torch

from pala.a2c.agent import A2CAgent, build, with_background
from pala.comm.base import Communicator
from pala.config import Config
from pala.config.checks import check_exchange
from pala.exchange.make import check_placement
from pala.gorila.agent import GorilaAgent
from pala.gorila.agent import build as build_gorila
from pala.lab.benchmark import gorila
from pala.lab.benchmark.analysis import BASELINE
from pala.lab.benchmark.measure import (
    ContinuedEnvs,
    Trial,
    environment_us,
    figures_of,
    flops_per_step,
    matrix_gflops,
    model_us,
    network_us,
)
from pala.run.agent import build_envs
from pala.system.device import has_bfloat16
from pala.system.errors import CollectiveError, PalaError
from pala.system.launcher import process_age_s
from pala.system.seeding import derive

_WARM_UP_UPDATES = 12
_PART_SHARE = 0.2  # of a training measurement's time

Key = tuple[str, str]  # precision, exchange


class Rounds:
    """A rank's environments, agents and trials, and what is measured with them."""

    def __init__(self, comm: Communicator, request: dict[str, Any], config: Config, threads: int) -> None:
        """Build all that is measured. `request`: the table that `pala benchmark` wrote."""
        self.comm = comm
        self.request = request
        self.threads = threads
        envs = build_envs(comm, config, threads)
        self.config = config = with_background(comm, config, envs)
        self.seeds = derive(config.seed, comm.rank, "environments", envs.num_envs)
        slowdown = request["slowdown"] if comm.rank == comm.size - 1 else 1.0
        self.envs = ContinuedEnvs(envs, self.seeds, threads, slowdown)
        self.left_out: dict[str, str] = {}
        self.is_gorila = config.exchange_kind.of_algorithm
        self.exchanges = [config.exchange_kind.name]
        if not self.is_gorila:
            self.exchanges = [kind for kind in request["exchanges"] if self._is_possible(kind)]
        if not self.exchanges:
            raise CollectiveError(f"No exchange is left to be measured. {' '.join(self.left_out.values())}")
        first = self._build(config)
        self.device, self.first_weights = first.device, first.flat.data.clone()
        self.precision = first.config.network.precision  # that `auto` means
        both = first.network.is_image and has_bfloat16(self.device)
        self.precisions = request["precisions"] or comm.bcast(("float32", "bfloat16") if both else ("float32",))
        self.agents: dict[str, A2CAgent | GorilaAgent] = {}
        self.trials: dict[Key, Trial] = {}
        for precision in self.precisions:
            self._add(precision)
        self.rates: dict[Key, float] = {}  # global steps/s of the last run, for the next one's budget

    def _is_possible(self, kind: str) -> bool:
        """Return whether the ranks are where this exchange works; if not, `left_out` says why."""
        exchange = replace(self.config.exchange, kind=cast(Any, kind))
        try:
            check_exchange(exchange, source=f"With '--exchanges {kind}'")
            check_placement(self.comm, exchange)
        except PalaError as error:
            self.left_out[kind] = str(error)
            return False
        return True

    def _add(self, precision: str) -> None:
        with_precision = replace(self.config.network, precision=cast(Any, precision))
        config = replace(self.config, network=with_precision)
        self.agents[precision] = agent = self._build(config)
        if isinstance(agent, GorilaAgent):
            self.trials[precision, config.exchange_kind.name] = gorila.GorilaTrial(self.comm, config, self.envs)
            return
        for kind in self.exchanges:
            exchange = replace(config.exchange, kind=cast(Any, kind))
            trial = Trial(self.comm, replace(config, exchange=exchange), self.envs, agent, self.first_weights)
            self.trials[precision, kind] = trial

    def _build(self, config: Config) -> A2CAgent | GorilaAgent:
        """Build an agent for any exchange: the preset's may be one of those that are left out here."""
        if self.is_gorila:
            return build_gorila(self.comm, gorila.with_short_replay(config), self.envs.real)
        return build(self.comm, replace(config, exchange=replace(config.exchange, kind=cast(Any, BASELINE))), self.envs)

    def run(self) -> dict[str, Any]:
        """Warm up, measure round by round, and gather. Every rank returns the whole result."""
        first_step_s = process_age_s()
        for key, trial in self.trials.items():
            warm_up = _WARM_UP_UPDATES * trial.steps_per_update * self.comm.size
            self._train(key, trial.steps_before + warm_up, seconds=0.0)
        rounds = [self._round(number) for number in range(self.request["rounds"])]
        result = self._description(first_step_s) | {"rounds": rounds}
        self.envs.close()
        return result

    def _round(self, number: int) -> dict[str, Any]:
        parts = self._measure_parts()
        keys = list(self.trials) if number % 2 == 0 else list(self.trials)[::-1]
        training = {key: self._measure_training(key) for key in keys}
        rows = [{"precision": p, "exchange": e, "ranks": training[p, e]} for p, e in self.trials]
        if self.comm.rank == 0:
            print(f"round {number + 1} of {self.request['rounds']} is done", flush=True)
        return parts | {"training": rows}

    def _measure_parts(self) -> dict[str, Any]:
        """Measure each part on all ranks at the same time: they share memory and its bandwidth, as in training."""
        seconds = _PART_SHARE * self.request["seconds"]
        self.comm.barrier()
        first = self.agents[self.precisions[0]]
        environment = environment_us(self.envs, first, seconds)
        parts: dict[str, Any] = {"environment_us": self.comm.allgather(environment), "network": {}}
        if not self.is_gorila:
            parts["model_us"] = self.comm.allgather(model_us(first.flat.data, self.config.exchange, seconds))
        for precision, agent in self.agents.items():
            agent.flat.data.copy_(self.first_weights)
            times = self._network_us(agent, seconds)
            self.comm.barrier()
            rate = matrix_gflops(self.device, precision, seconds)
            parts["network"][precision] = self.comm.allgather(times | {"matrix_gflops": rate})
        return parts

    def _network_us(self, agent: A2CAgent | GorilaAgent, seconds: float) -> dict[str, float]:
        if isinstance(agent, GorilaAgent):
            return gorila.network_us(agent, self.config, self.envs.observations, seconds)
        agent.a2c.mean_square.zero_()
        return network_us(agent, self.config, self.envs.observations, seconds)

    def _measure_training(self, key: Key) -> list[dict[str, Any]]:
        """Train for about the requested length; return the figures of every rank."""
        trial = self.trials[key]
        steps = trial.steps_per_update
        updates = max(_WARM_UP_UPDATES * self.comm.size, round(self.rates[key] * self.request["seconds"] / steps))
        return self._train(key, trial.steps_before + updates * steps, self.request["seconds"])

    def _train(self, key: Key, global_steps: int, seconds: float) -> list[dict[str, Any]]:
        self.comm.barrier()
        records = self.trials[key].run(global_steps, seconds, self.seeds)
        until_s = min(self.comm.allgather(records[-1]["time_s"]))
        ranks = self.comm.allgather(figures_of(records, until_s, self.threads))
        self.rates[key] = sum(figures["steps_per_s"] for figures in ranks)
        return ranks

    def _description(self, first_step_s: float) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        count = gorila.flops_per_step if self.is_gorila else flops_per_step
        forward, backward = count(self.envs.observation_space, self.envs.action_space, self.config)
        of_ranks = self.comm.allgather(
            {
                "host": self.comm.host,
                "device": str(self.device),
                "threads": self.threads,
                "gpu": torch.cuda.get_device_name(self.device) if cuda else None,
                "seconds_to_first_step": round(first_step_s, 2),
                "memory_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "device_memory_peak_bytes": torch.cuda.max_memory_allocated(self.device) if cuda else None,
            }
        )
        return {
            "ranks": self.comm.size,
            "of_ranks": of_ranks,
            "precision": self.precision,
            "precisions": list(self.precisions),
            "exchanges": self.exchanges,
            "left_out": self.left_out,
            "seconds": self.request["seconds"],
            "flops_per_step": {"forward": forward, "backward": backward},
            "parameters": self.first_weights.numel(),
            "message_bytes": {exchange: trial.message_bytes for (_, exchange), trial in self.trials.items()},
            "mpi": self.comm.facts()["mpi"],
        }
