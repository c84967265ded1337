"""Use a trained policy in a program of your own, without MPI: `python examples/load_and_act.py RUN`.

RUN is a run's folder, as that of `python -m pala.train --env.id CartPole-v1 --total-steps 200000`, or of Atari.
"""

from __future__ import annotations

import sys

import pala


def main(run: str) -> None:
    """Play an episode, then score the policy on twenty."""
    policy = pala.load_policy(run, seed=0)
    envs = pala.make_envs(run)  # one, as the run was trained on
    observations, _ = envs.reset(seed=0)
    total, is_over = 0.0, False
    while not is_over:
        observations, rewards, terminated, truncated, _ = envs.step(policy.act(observations, greedy=True))
        total, is_over = total + float(rewards[0]), bool(terminated[0] or truncated[0])
    envs.close()
    print(f"return {total:.0f} by the policy after {policy.global_steps:,} steps")
    print(pala.evaluate_policy(run, episodes=20))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/load_and_act.py RUN")
    main(sys.argv[1])
