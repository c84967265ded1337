"""Use a trained policy in a program of your own, without MPI: `python examples/load_and_act.py RUN`.

RUN is of CartPole, as `python -m pala.train --env.id CartPole-v1 --total-steps 200000` makes it.
"""

from __future__ import annotations

import sys

import gymnasium

import pala


def main(run: str) -> None:
    """Play an episode, then score the policy on twenty."""
    policy = pala.load_policy(run, seed=0)
    env = gymnasium.make("CartPole-v1")  # as the run was trained on
    observation, _ = env.reset(seed=0)
    total, is_over = 0.0, False
    while not is_over:
        observation, reward, terminated, truncated, _ = env.step(policy.act(observation, greedy=True))
        total, is_over = total + float(reward), terminated or truncated
    print(f"return {total:.0f} by the policy after {policy.global_steps:,} steps")
    print(pala.evaluate_policy(run, episodes=20))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/load_and_act.py RUN")
    main(sys.argv[1])
