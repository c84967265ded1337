"""Measurements on one rank: the environment, the network's passes, matrices, and training as it is.

Everything is given for one environment step of this rank: a rollout's passes are divided by its steps.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from pala.a2c.agent import A2CAgent
from pala.a2c.learning_rate import ONE_LEARNER
from pala.comm.base import Communicator
from pala.config import Config, ExchangeConfig
from pala.envs.vector import Envs, Step
from pala.exchange.budget import ExchangeState, Stop
from pala.exchange.gossip.codecs import make_codec
from pala.exchange.gossip.messages import Kind, gossip_sizes
from pala.exchange.gossip.models import ReceiveBuffer, SendBuffer
from pala.exchange.wire import Message, Wire
from pala.gorila.agent import GorilaAgent
from pala.networks.conv_tape import fast_linear
from pala.networks.make import actor_critic
from pala.networks.network import Network
from pala.networks.optimisers import clip_gradient_, rmsprop_
from pala.run.agent import Agent, make_generator
from pala.run.metrics import SECTIONS, Record
from pala.system.errors import PalaError

_MATRIX = 1024  # rows and columns
_PREPARED_ACTIONS = 64
_LOG_INTERVALS = 10  # of a training measurement; the first is warm-up
_PATIENCE_S = 300.0
_CACHE_BYTES = 1 << 26  # more than any cache of a core
_QUANTILES = 21


def flops_per_step(
    observation_space: gymnasium.Space, action_space: gymnasium.Space, config: Config
) -> tuple[int, int]:
    """Return the floating-point operations of one forward and one backward pass of one observation.

    Counted by torch's FlopCounterMode on autograd's path: twice the multiply-adds of matrices and convolutions. The
    backward pass has the gradients of all weights, and of all inputs but the observation.
    """
    return flops_of(actor_critic(observation_space, action_space, config), observation_space)


def flops_of(network: Network, observation_space: gymnasium.Space) -> tuple[int, int]:
    """Return the floating-point operations of both passes of any network."""
    shape = observation_space.shape or ()
    observation = torch.zeros(1, *shape, dtype=torch.uint8 if network.is_image else torch.float32)
    counter = FlopCounterMode(display=False)
    with counter:
        outputs = network.outputs(observation)
        forward = counter.get_total_flops()
        torch.cat(outputs, -1).sum().backward()  # type: ignore[no-untyped-call]
    return forward, counter.get_total_flops() - forward


class ContinuedEnvs(Envs):
    """Games that continue from one measurement to the next: to begin 16 Atari games again takes more than a second.

    They can slow their rank down: after each step it then sleeps, for a multiple of its computing time since the last
    sleep.
    """

    def __init__(self, envs: Envs, seeds: np.ndarray, threads: int = 1, slowdown: float = 1.0) -> None:
        self.real, self.num_envs = envs, envs.num_envs
        self._sleep_per_cpu_s, self._cpu_s = (slowdown - 1) / threads, time.process_time()
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.begin_anew(seeds)
        self._stepped_at_s: list[float] = []

    def begin_anew(self, seeds: np.ndarray) -> None:
        """Begin new games in the environments themselves; the next run begins with them."""
        self.observations, self.action_masks = self.real.reset(seeds), self.real.action_masks  # the newest

    def reset(self, seeds: np.ndarray) -> np.ndarray:
        return self.observations

    def step_unslowed(self, actions: np.ndarray) -> Step:
        """Step without the sleep of a slow rank, and without counting its time."""
        step = self.real.step(actions)
        self.observations, self.action_masks = step.observations, self.real.action_masks
        return step

    def step(self, actions: np.ndarray) -> Step:
        step = self.step_unslowed(actions)
        if self._sleep_per_cpu_s > 0:
            cpu_s, self._cpu_s = self._cpu_s, time.process_time()
            time.sleep(self._sleep_per_cpu_s * (self._cpu_s - cpu_s))
        self._stepped_at_s.append(time.perf_counter())
        return step

    def take_durations_s(self, steps: int) -> list[float]:
        """Return the seconds of every `steps` steps since the last call, with all that was done between them."""
        ends = self._stepped_at_s[::-steps][::-1]
        self._stepped_at_s = ends[-1:]
        return [end - begin for begin, end in pairwise(ends)]

    def forget_durations(self) -> None:
        """Begin again: the time between two measurements is no duration, and nothing to sleep for."""
        self._stepped_at_s, self._cpu_s = [], time.process_time()

    def close(self) -> None:
        self.real.close()


def environment_us(envs: ContinuedEnvs, agent: A2CAgent | GorilaAgent, seconds: float) -> float:
    """Return microseconds a step of the environments alone, with random actions."""
    if envs.action_masks is not None:
        raise PalaError("The environment gives action masks, but the benchmark plays any actions; take another.")
    distribution = agent.network.distribution
    generator = torch.Generator(agent.device)
    no_preference = torch.zeros(envs.num_envs, distribution.num_outputs, device=agent.device)
    actions = [
        distribution.to_env(distribution.sample(no_preference, generator)).cpu().numpy()
        for _ in range(_PREPARED_ACTIONS)
    ]
    turns, begin = 0, time.perf_counter()
    while turns < 2 or time.perf_counter() < begin + seconds:
        envs.step_unslowed(actions[turns % _PREPARED_ACTIONS])
        turns += 1
    return 1e6 * (time.perf_counter() - begin) / (turns * envs.num_envs)


def network_us(agent: A2CAgent, config: Config, observations: np.ndarray, seconds: float) -> dict[str, float]:
    """Return microseconds a step of `forward` (all acting passes of a rollout and its bootstrap), `backward` and
    `optimiser` (clipping and RMSprop)."""
    tape = agent.a2c.tape
    flat = agent.flat
    settings = config.a2c
    now = clock(agent.device)
    images = torch.from_numpy(observations).to(agent.device)
    batch = (settings.rollout_steps, len(images))
    outputs = [head.out_features for head in agent.network.heads]
    gradients = [torch.randn(*batch, width, device=agent.device) / math.prod(batch) for width in outputs]
    sums = dict.fromkeys(("forward", "backward", "optimiser"), 0.0)
    turns = 0
    end = now() + seconds
    while turns < 2 or now() < end:
        times = [now()]
        tape.begin()
        for _ in range(settings.rollout_steps):
            tape.forward(images)
        tape.peek(images)
        times.append(now())
        flat.gradient.zero_()
        tape.backward(gradients)
        times.append(now())
        clip_gradient_(flat.gradient, settings.max_gradient_norm)
        rmsprop_(
            flat.data,
            flat.gradient,
            agent.a2c.mean_square,
            ONE_LEARNER,
            settings.rmsprop_alpha,
            settings.rmsprop_epsilon,
            settings.rmsprop_epsilon_inside_root,
        )
        times.append(now())
        turns += 1
        for name, first, last in zip(sums, times, times[1:], strict=False):
            sums[name] += last - first
    return {name: 1e6 * total / (turns * math.prod(batch)) for name, total in sums.items()}


def matrix_gflops(device: torch.device, precision: str, seconds: float) -> float:
    """Return the machine's rate: median over products of two square matrices, 10^9 floating-point operations a second,
    by the faster of the two ways that training has, torch's product and that of its linear layers."""
    dtype, now = getattr(torch, precision), clock(device)
    a, b, product = (torch.randn(_MATRIX, _MATRIX, device=device).to(dtype) for _ in range(3))
    ways: tuple[Callable[[], object], ...] = (lambda: torch.mm(a, b, out=product), lambda: fast_linear(a, b))
    products = 1 if device.type == "cpu" else 50  # of a timing: one is over too soon on a GPU
    rates: list[list[float]] = [[] for _ in ways]
    end = now() + seconds
    while len(rates[0]) < 3 or now() < end:
        for multiply, timings in zip(ways, rates, strict=True):
            begin = now()
            for _ in range(products):
                multiply()
            timings.append(products * 2 * _MATRIX**3 / (now() - begin) / 1e9)
    return max(map(statistics.median, rates))


def clock(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds that first waits until the device has done all that was asked of it."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def model_us(parameters: torch.Tensor, config: ExchangeConfig, seconds: float) -> dict[str, float]:
    """Return microseconds of a whole model that gossip sends, by its own code, without MPI: `send`, the snapshot;
    `receive`, its bytes copied, checked and added; `mix`. Medians. Caches are emptied before each, as by an update."""
    now, other = clock(parameters.device), torch.zeros(_CACHE_BYTES // 4)
    mixed, codec = parameters.clone(), make_codec(config, parameters)
    wire = Wire(2, parameters.numel(), 0, gossip_sizes(codec.sizes))
    buffer, inbox = SendBuffer(wire, parameters.device), ReceiveBuffer(wire, codec, parameters.device)
    message = Message(Kind.MODEL, 0, 0, 1.0, Stop.NONE, np.zeros(2, np.uint64))

    def receive() -> None:
        data = inbox.data[: len(buffer.data)]
        data[:] = buffer.data
        decoded = wire.decode(data)
        refusal = inbox.check(decoded, len(data)) if isinstance(decoded, Message) else decoded
        assert refusal is None, refusal
        inbox.add(1.0)

    actions: dict[str, Callable[[], object]] = {
        "send": lambda: buffer.fill(message, codec.pack(parameters, whole=True)),
        "receive": receive,
        "mix": lambda: codec.mix(mixed, own_weight=1.0, measure=False),
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    end = now() + seconds
    while len(times["mix"]) < 3 or now() < end:
        for name, action in actions.items():
            other.add_(1.0)
            begin = now()
            action()
            times[name].append(now() - begin)
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


# ---- training --------------------------------------------------------------------------------------------------------


class Trial:
    """Training on all ranks as `pala.train` does it, without its files. Each run starts from the same weights."""

    steps_before = 0
    """Steps of all ranks before anything is learned."""

    def __init__(
        self, comm: Communicator, config: Config, envs: ContinuedEnvs, agent: A2CAgent, first_weights: torch.Tensor
    ) -> None:
        self._comm = comm
        self._config = config
        self._envs = envs
        self._agent = agent
        self._first_weights = first_weights
        self.message_bytes = 0
        self.steps_per_update = config.steps_per_update
        self._steps_per_duration = config.a2c.rollout_steps  # of an environment, in each duration that is recorded

    def run(self, global_steps: int, seconds: float, seeds: np.ndarray) -> list[Record]:
        """Train for `global_steps` steps, about `seconds` long (0: a record an update). Collective.

        Returns this rank's interval records, and before them one of the beginning.
        """
        config = replace(
            self._config,
            total_steps=global_steps,
            run=replace(
                self._config.run, spares=0, log_interval_s=seconds / _LOG_INTERVALS, checkpoint_interval_s=math.inf
            ),
        )
        agent = self._fresh_agent(config)
        agent.envs, agent.start = self._envs, ExchangeState([0] * self._comm.size)
        agent.generator = make_generator(config.seed, self._comm.rank, agent.device)
        exchange = agent.make_exchange(self._comm)
        loop = agent.make_loop(exchange)
        self.message_bytes = exchange.message_bytes
        records: list[Record] = [{"time_s": 0.0, "updates": 0, "local_steps": 0} | _process_figures()]

        def on_interval(new: list[Record]) -> None:
            durations_s = self._envs.take_durations_s(self._steps_per_duration)
            records.append(new[-1] | _process_figures() | {"durations_s": durations_s})

        self._envs.forget_durations()
        loop.run(self._envs.reset(seeds), on_interval, lambda: None)
        exchange.close(_PATIENCE_S)
        return records

    def _fresh_agent(self, config: Config) -> Agent[Any]:
        """Return an agent that has the first weights and has learned nothing."""
        agent = replace(self._agent, config=config)
        agent.flat.data.copy_(self._first_weights)
        agent.a2c.restart_mean_square()
        agent.a2c.restart_momentum()
        return agent


def _process_figures() -> dict[str, float]:
    """Return the processor time of this process, of PALA's own threads in it, and how many threads it has."""
    threads = [t.ident for t in threading.enumerate() if t.name.startswith("pala-") and t.ident is not None]
    return {
        "cpu_s": time.process_time(),
        "exchange_thread_s": sum(time.clock_gettime(time.pthread_getcpuclockid(thread)) for thread in threads),
        "num_threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
    }


def _seconds(records: list[Record]) -> float:
    """Return the seconds from the first to the last."""
    return float(records[-1]["time_s"] - records[0]["time_s"]) if records else 0.0


_TOTALS: dict[str, Callable[[list[float]], float]] = {
    "staleness_updates": max,
    "consensus_distance_relative": statistics.fmean,
}
"""Functions that put intervals together; what is not here is a number for each update."""


def figures_of(records: list[Record], until_s: float, threads: int) -> dict[str, Any]:
    """Return what a rank's records say of the time after the first interval, which is warm-up, and up to `until_s`,
    when the first rank was done: until then all ranks trained. Where that is less than a tenth of all, as of a very
    short run, what is after the first interval, or all."""
    choices = ([record for record in records[1:] if record["time_s"] <= until_s], records[1:])
    kept = next((choice for choice in choices if _seconds(choice) > 0.1 * _seconds(records)), records)
    first = kept[0]
    last = kept[-1]
    intervals = kept[1:]
    seconds = [max(1e-3, after["time_s"] - before["time_s"]) for before, after in zip(kept, intervals, strict=False)]
    wall_s, updates = sum(seconds), max(1, last["updates"] - first["updates"])
    figures = {
        "seconds": wall_s,
        "updates": updates,
        "steps_per_s": (last["local_steps"] - first["local_steps"]) / wall_s,
        "time": {s: float(np.average([r[f"time_{s}"] for r in intervals], weights=seconds)) for s in SECTIONS},
        "cpu_per_core": (last["cpu_s"] - first["cpu_s"]) / wall_s / threads,
        "exchange_thread_share": (last["exchange_thread_s"] - first["exchange_thread_s"]) / wall_s,
        "num_threads": max(record["num_threads"] for record in kept),
    }
    for key in ("models_sent", "models_mixed", "bytes_sent", "staleness_updates", "consensus_distance_relative"):
        if values := [record[key] for record in intervals if record.get(key) is not None]:
            figures[key] = _TOTALS.get(key, lambda values: sum(values) / updates)(values)
    durations_s = [duration for record in intervals for duration in record.get("durations_s", ())]
    if durations_s:
        figures["update_quantiles_s"] = np.quantile(durations_s, np.linspace(0, 1, _QUANTILES)).round(6).tolist()
    for key in ("own_movement", "movement"):
        if key in last:
            figures[key] = np.sum([record[key] for record in intervals], 0).tolist()
    return figures
