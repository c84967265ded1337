"""Whole games with a run's policy: how it acts and by which settings, and what is made of their returns."""

from __future__ import annotations

import math
import numbers
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pala.algorithms import ALGORITHMS
from pala.config import Config, EnvConfig, facts_of, from_table, to_table
from pala.envs.vector import AtariEnvs, Envs, Episode, make_envs
from pala.evaluation.policy import Policy, load_policy
from pala.evaluation.record import Evaluation
from pala.evaluation.references import SCORE_TABLE, human_normalised, reference_of
from pala.networks.own import MakeNetwork
from pala.run import run_folder, user_code
from pala.run.checkpoint import AnotherNetworkError
from pala.run.hooks import UserCode
from pala.run.provenance import now_utc
from pala.system.errors import PalaError
from pala.system.output import log
from pala.system.seeding import derive
from pala.system.tables import shown
from pala.system.text import counted, short_number

_PROGRESS_S = 20.0

_MAY_DIFFER = (key.split(".") for key, facts in facts_of(Config).items() if facts.evaluation_may_differ)
OTHER_SETTINGS = {name: section for section, name in _MAY_DIFFER}
"""Settings that an evaluation may have otherwise than the run, and their sections."""


@dataclass(frozen=True)
class Acting:
    """The choice of a run's policy, and how it acts. Raises PalaError for numbers that cannot be."""

    greedy: bool = False
    """The most probable action instead of a sampled one; of Gorila never a random one."""
    seed: int = 0
    """Seed of the environments and of sampled actions."""
    threads: int = 1
    """Threads of torch and Atari."""
    trust_run: bool = False
    """Run the code that the run names though it came from elsewhere."""
    best: bool = False
    """Take the best policy that was kept during training, not the final one."""
    other_settings: Mapping[str, float] = field(default_factory=dict)
    """Settings in place of the run's own: `OTHER_SETTINGS`."""
    env_id: str = ""
    """Play this environment in place of the run's own, with the run's settings; empty: the own one."""

    def __post_init__(self) -> None:
        check_numbers(seed=(self.seed, 0), threads=(self.threads, 1))

    def settings_of(self, run: Path) -> tuple[Config, dict[str, float | str]]:
        """Return the run's settings, with those that are others here, and these alone. Raises PalaError."""
        record = run_folder.read(run)
        config = run_folder.config_of(run, record)
        from_python = run_folder.from_python(record["segments"][-1]).environment
        other: dict[str, float | str] = {}
        plays_another = bool(self.env_id) and (from_python or self.env_id != config.env.id)
        if self.env_id:
            config = replace(config, env=replace(config.env, id=self.env_id))
        table = to_table(config)
        if self.greedy and self.other_settings.get("epsilon"):
            raise PalaError("'epsilon' is the probability of a random action, and greedy actions never are; give one.")
        for name, value in self.other_settings.items():
            if name not in OTHER_SETTINGS:
                known = ", ".join(OTHER_SETTINGS)
                raise PalaError(f"An evaluation has no setting '{name}' of its own; there are {known}.")
            section = OTHER_SETTINGS[name]
            if section == "env" and config.env.is_atari and from_python and not self.env_id:
                raise PalaError(
                    f"'{name}' is of PALA's own Atari games, and run '{run}' plays an environment made in Python."
                )
            explores = ALGORITHMS[config.algorithm].epsilon(config) is not None
            if not (config.env.is_atari if section == "env" else explores):
                raise PalaError(
                    f"'{name}' is of {'Atari games' if section == 'env' else 'Gorila'} only, and run '{run}' is none."
                )
            if table[section][name] != value:
                table[section][name] = other[name] = value
        if plays_another:
            other["env_id"] = self.env_id
        return (from_table(table, source="Evaluation") if self.other_settings else config), other

    def code_of(self, run: Path) -> UserCode:
        """Load the code that the run brings along; another environment is played without the run's `make_env`. Raises
        PalaError."""
        code = user_code.load_trusted(run, run_folder.config_of(run), self.trust_run)
        return code._replace(make_env=None) if self.env_id else code

    def policy_of(self, run: Path, config: Config, envs: Envs, make_network: MakeNetwork | None) -> Policy:
        """Load the policy that plays these environments. Raises PalaError, also if they do not fit it."""
        try:
            return load_policy(run, config, envs, make_network, self.best)
        except AnotherNetworkError:
            if not self.env_id:
                raise
            raise PalaError(
                f"The policy of run '{run}' cannot play '{self.env_id}': it was trained with other observations or "
                f"actions than {envs.observation_space} and {envs.action_space}."
            ) from None


def check_numbers(**values: tuple[int, int]) -> None:
    """Raise PalaError for a named (value, least value) that is no whole number, or too small."""
    for name, (value, least) in values.items():
        if not isinstance(value, numbers.Integral) or value < least:
            raise PalaError(f"'{name}' is {shown(value)} but must be a whole number, at least {least}.")


def evaluate(run: Path, episodes: int, num_envs: int, acting: Acting, timeout_s: float = math.inf) -> Evaluation:
    """Play `episodes` whole episodes with the policy of a run, at most `num_envs` of them at the same time.

    Equal arguments give equal returns, unless the environment has chance of its own. Raises PalaError, also when the
    episodes are not over after `timeout_s`. Writes nothing; see `record.save`.
    """
    config, other = acting.settings_of(run)
    check_numbers(episodes=(episodes, 1), num_envs=(num_envs, 1))
    run = run.absolute()  # an environment may change the working directory
    make_env, make_network = acting.code_of(run)
    games, limit = whole_games(config.env, min(num_envs, episodes)), longest_game(config)
    with make_envs(games, acting.threads, make_env, limit) as envs:
        torch.set_num_threads(acting.threads)  # not before: an environment's module may have set it otherwise
        policy = acting.policy_of(run, config, envs, make_network)
        policy.seed(int(derive(acting.seed, 0, "evaluation actions")[0]))
        begin = time.perf_counter()
        seeds = derive(acting.seed, 0, "evaluation environments", envs.num_envs)
        played, steps = play_episodes(envs, policy, acting.greedy, seeds, episodes, timeout_s)
        seconds = time.perf_counter() - begin
    cut = sum(episode.length_steps >= limit for episode in played)
    if cut and not isinstance(envs, AtariEnvs):
        log(
            f"Evaluation: {cut} of {episodes} episodes were cut after {limit:,} steps ('evaluation.max_episode_steps' "
            "or 'env.max_episode_steps')."
        )
    return Evaluation(
        finished=now_utc(),
        policy=policy.source,
        global_steps=policy.global_steps,
        num_envs=envs.num_envs,
        greedy=acting.greedy,
        epsilon=0.0 if acting.greedy and policy.epsilon is not None else policy.epsilon,
        seed=acting.seed,
        steps_per_s=round(steps / seconds, 1),
        other_settings=other,
        **_statistics(played),
        **_game_facts(config.env, played, envs.name, isinstance(envs, AtariEnvs)),
    )


def _statistics(played: list[Episode]) -> dict[str, Any]:
    returns = [episode.episode_return for episode in played]
    if bad := sum(not math.isfinite(value) for value in returns):
        raise PalaError(
            f"{bad} of {counted(len(returns), 'return')} {'are' if bad > 1 else 'is'} not finite: the environment gave "
            "rewards that are NaN or infinite, and there is no score."
        )
    means = {key: sum(episode.info[key] for episode in played) / len(played) for key in played[0].info}
    error = statistics.stdev(returns) / len(returns) ** 0.5 if len(returns) > 1 else None
    return {
        "episodes": len(returns),
        "mean_return": statistics.fmean(returns),
        "standard_error": error,
        "min_return": min(returns),
        "median_return": statistics.median(returns),
        "max_return": max(returns),
        "mean_length_steps": statistics.fmean(episode.length_steps for episode in played),
        "returns": returns,
        "mean_info": {key: mean for key, mean in means.items() if math.isfinite(mean)},
    }


def _game_facts(env: EnvConfig, played: list[Episode], name: str, is_atari: bool) -> dict[str, Any]:
    """Return what was played, and the fields that only Atari has."""
    if not is_atari:
        return {"environment": name}
    facts: dict[str, Any] = {
        "environment": env.id.removeprefix("ALE/").split("-v")[0],
        "frames_per_step": env.frame_skip,
        "noop_max": env.noop_max,
        "repeat_action_probability": env.repeat_action_probability,
    }
    reference = reference_of(env.id)
    if reference is not None:
        random, human = reference
        mean = statistics.fmean(episode.episode_return for episode in played)
        facts |= {
            "random_score": random,
            "human_score": human,
            "human_normalised_score": human_normalised(mean, random, human),
            "score_table": SCORE_TABLE,
        }
    return facts


def whole_games(env: EnvConfig, num_envs: int) -> EnvConfig:
    """Return the training environment's settings with whole games and unclipped rewards."""
    return replace(env, num_envs=num_envs, terminal_on_life_loss=False, clip_rewards="none")


def longest_game(config: Config) -> int:
    """Return the number of steps after which a game is cut; Atari's have a limit of their own."""
    return min(steps for steps in (config.evaluation.max_episode_steps, config.env.max_episode_steps) if steps)


def play_episodes(
    envs: Envs, policy: Policy, greedy: bool, seeds: np.ndarray, episodes: int, timeout_s: float = math.inf
) -> tuple[list[Episode], int]:
    """Return (`episodes` whole episodes, environment steps made).

    Each environment contributes a number of episodes fixed beforehand; those it plays beyond are ignored. Taking
    the first `episodes` to end instead would favour short ones. `seeds` int32 [B]. Raises PalaError after `timeout_s`.
    """
    quota = [episodes // envs.num_envs + (i < episodes % envs.num_envs) for i in range(envs.num_envs)]
    played: list[Episode] = []
    steps = 0
    next_line = time.monotonic() + _PROGRESS_S
    deadline = time.monotonic() + timeout_s
    observations = envs.reset(seeds)
    while len(played) < episodes:
        step = envs.step(policy.actions(observations, envs.action_masks, greedy))
        policy.reset(step.began)
        observations, steps = step.observations, steps + envs.num_envs
        for episode in step.episodes:
            if quota[episode.env_index] > 0:
                quota[episode.env_index] -= 1
                played.append(episode)
        if (now := time.monotonic()) > deadline and len(played) < episodes:
            raise PalaError(
                f"given up after {timeout_s:g} s ('evaluation.timeout_s') with {len(played)} of {episodes} episodes."
            )
        if now > next_line:
            log(_progress(envs.name, played, episodes))
            next_line += _PROGRESS_S
    return played, steps


def _progress(name: str, played: list[Episode], episodes: int) -> str:
    """Return how far a long evaluation has come, in words."""
    so_far = f"{name}: {len(played):,} of {episodes:,} episodes"
    if not played:
        return f"Evaluation of {so_far}."
    mean = statistics.fmean(episode.episode_return for episode in played)
    return f"Evaluation of {so_far}, mean return so far {short_number(mean)}."
