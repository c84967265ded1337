"""Does it help to step one half of the environments while the network looks at the other half?

    taskset -c 0 python results/benchmark/overlap.py      # one core, as a rank has when there are as many as cores
    taskset -c 0,1 python results/benchmark/overlap.py    # two cores for one rank

Acting only (environments and forward passes, no update), 16 environments on Pong, float32: one batch of 16 in turn with
the environments, against two batches of 8 with `send` and `recv`. Prints steps/s of both, interleaved, and the ratio.
"""

import os
import statistics
import time

from pala.system.resources import prepare

prepare(1)

import ale_py  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from gymnasium.spaces import Box, Discrete  # noqa: E402

from pala.config import NetworkConfig  # noqa: E402
from pala.networks.conv_tape import ConvTape  # noqa: E402
from pala.networks.network import ActorCritic, FlatParameters  # noqa: E402

NUM_ENVS, STEPS, ROUNDS = 16, 150, 7


def acting(halves: int, network: ActorCritic, tape: ConvTape) -> float:
    """Steps/s with the environments in this many vector environments."""
    size = NUM_ENVS // halves
    envs = [
        ale_py.AtariVectorEnv("pong", num_envs=size, num_threads=max(1, len(os.sched_getaffinity(0)) // halves))
        for _ in range(halves)
    ]
    generator = torch.Generator().manual_seed(0)
    for env in envs:
        env.reset(seed=1)
        env.send(np.zeros(size, np.int64))
    tape.begin()
    begin = time.perf_counter()
    for _ in range(STEPS):
        for env in envs:
            observations = env.recv()[0]
            policy, _ = tape.peek(torch.from_numpy(observations))
            env.send(network.distribution.sample(policy, generator).numpy())
    seconds = time.perf_counter() - begin
    for env in envs:
        env.recv()
        env.close()
    return STEPS * NUM_ENVS / seconds


def main() -> None:
    """Interleaved rounds."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    network = ActorCritic(Box(0, 255, (4, 84, 84), np.uint8), Discrete(6), NetworkConfig())
    FlatParameters(network, torch.device("cpu"))
    example = torch.zeros(NUM_ENVS, 4, 84, 84, dtype=torch.uint8)
    tape = ConvTape(network.trunk, network.heads, "float32", 1, example)
    speeds = [(acting(1, network, tape), acting(2, network, tape)) for _ in range(ROUNDS)]
    ratios = [two / one for one, two in speeds]
    one, two = (statistics.median(values) for values in zip(*speeds, strict=True))
    print(f"{len(os.sched_getaffinity(0))} cores: one batch {one:,.0f} steps/s, two halves {two:,.0f}; ratio "
          f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) over {ROUNDS} rounds")  # fmt: skip


if __name__ == "__main__":
    main()
