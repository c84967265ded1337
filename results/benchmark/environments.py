"""How far ale-py's threads carry: microseconds a step of Pong by environments and threads, nothing beside it."""

import time

import numpy as np

from pala.config import EnvConfig
from pala.envs.vector import make_envs

for count in (16, 64):
    for threads in (1, 2, 4, 8, 16):
        envs = make_envs(EnvConfig(id="ALE/Pong-v5", num_envs=count), threads)
        envs.reset(np.arange(count))
        draw = np.random.default_rng(0)
        for _ in range(30):
            envs.step(draw.integers(0, 6, count))
        begin, steps, cpu = time.perf_counter(), 0, time.process_time()
        while time.perf_counter() - begin < 0.8:
            envs.step(draw.integers(0, 6, count))
            steps += 1
        wall_us = 1e6 * (time.perf_counter() - begin) / steps / count
        cpu_us = 1e6 * (time.process_time() - cpu) / steps / count
        print(f"{count} environments, {threads} threads: {wall_us:.0f} us a step, cpu {cpu_us:.0f} us", flush=True)
        envs.close()
