"""Score a run's policy on whole games with unclipped rewards: `python -m pala.evaluate runs/pong-...`.

    100 episodes, greedy actions      python -m pala.evaluate RUN --episodes 100 --greedy
    and a video of one more episode   python -m pala.evaluate RUN --video pong.mp4
    the video alone                   python -m pala.evaluate RUN --video pong.mp4 --episodes 0

Prints one line; `RUN/evaluation.json` holds the newest result, `RUN/evaluations.jsonl` every one.

The policy is `RUN/policy.safetensors`; a run that has not completed is scored on the mean of its ranks' newest
checkpoints. It is computed on the CPU. A run that was trained on an environment made in Python brings it along as
`make_env.pkl`, and loading a pickle runs code: evaluate such a run only if you trust whoever made it.

numpy, torch and what imports them are imported inside the functions: `prepare` (pala.system.runtime) must come first.
"""

from __future__ import annotations

import csv
import importlib.resources
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pala.config import Config, EnvConfig, EvaluationConfig
from pala.system.errors import PalaError
from pala.system.runtime import prepare, say

if TYPE_CHECKING:
    import numpy as np

    from pala.envs import Envs, Episode
    from pala.networks.network import FlatParameters, Network

    Actor = Callable[[np.ndarray], np.ndarray]  # observations [B, *obs] -> actions [B] or [B, A]

SCORE_TABLE = "dqn_zoo random/human scores, 57 games"
_PROGRESS_S = 30.0


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found, and what it depends on. A return is the unclipped sum of a whole game's rewards."""

    finished: str  # UTC, ISO 8601
    environment: str
    policy: str  # "final", or "mean of checkpoints of N ranks"
    global_steps: int  # of training, over all ranks
    frames_per_step: int | None  # Atari: emulator frames a step, so global_steps * frames_per_step are the frames
    episodes: int
    num_envs: int
    greedy: bool
    epsilon: float | None  # Gorila: probability of a random action; None of a policy that is sampled
    seed: int
    noop_max: int | None  # Atari
    repeat_action_probability: float | None  # Atari
    mean_return: float
    standard_error: float | None  # of the mean, by the sample deviation (ddof 1); None for a single episode
    min_return: float
    median_return: float
    max_return: float
    mean_length_steps: float
    human_normalised_score: float | None  # percent: 0 is random play, 100 the human; None if not in the table
    random_score: float | None
    human_score: float | None
    score_table: str | None
    steps_per_s: float
    returns: list[float]

    def to_table(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """The one line for people."""
        error = "" if self.standard_error is None else f" ± {short_number(self.standard_error)} (standard error)"
        episodes = f"{self.episodes} episode{'s' if self.episodes > 1 else ''}"
        parts = [f"{self.environment}: mean return {short_number(self.mean_return)}{error} over {episodes}"]
        if self.human_normalised_score is not None:
            parts.append(f"{self.human_normalised_score:.1f} % human-normalised (dqn_zoo table)")
        parts.append(action_words(self.greedy, self.epsilon))
        if self.noop_max:
            parts.append(f"up to {self.noop_max} no-ops")
        if self.repeat_action_probability:
            parts.append(f"sticky actions {self.repeat_action_probability:g}")
        policy = "final policy" if self.policy == "final" else self.policy
        return f"{', '.join(parts)}; {policy} after {self.global_steps:,} steps"


def action_words(greedy: bool, epsilon: float | None) -> str:
    """How actions were chosen."""
    if epsilon:
        return f"{epsilon:.0%} random actions"
    return "greedy actions" if greedy or epsilon is not None else "sampled actions"


def short_number(value: float) -> str:
    """Enough digits to tell returns apart."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 1 or size == 0 else f"{value:.3g}"


# ---- the policy ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """A network with the parameters of a run."""

    network: Network
    global_steps: int  # of training, over all ranks
    source: str  # "final", or of which checkpoints
    environment: str | None = None  # what the run calls an environment made in Python
    epsilon: float = 0.0  # of a Q-network

    def actor(self, greedy: bool, seed: int) -> Actor:
        """A function from observations to actions, with a random stream of its own: sampled from the policy or, if
        `greedy`, the most probable; of a Q-network the best, but with probability `epsilon` any, unless `greedy`."""
        import numpy as np
        import torch

        from pala.gorila.dqn import epsilon_greedy
        from pala.gorila.networks import QNetwork

        generator = torch.Generator().manual_seed(seed)
        network, distribution = self.network, self.network.distribution

        def choose(observations: torch.Tensor) -> torch.Tensor:
            if isinstance(network, QNetwork):
                return epsilon_greedy(network(observations), 0.0 if greedy else self.epsilon, generator)
            policy_output, _ = network(observations)
            return distribution.sample(policy_output, generator, greedy)

        def act(observations: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                actions = choose(torch.from_numpy(np.ascontiguousarray(observations)))
                env_actions: np.ndarray = distribution.to_env(actions).numpy()
                return env_actions

        return act


def load_policy(run: Path, config: Config, envs: Envs) -> Policy:
    """A completed run's final policy, or what its ranks' newest checkpoints hold. Raises PalaError."""
    import torch

    from pala.gorila.networks import QNetwork
    from pala.networks.network import ActorCritic, FlatParameters
    from pala.run import checkpoint, run_folder

    kind = QNetwork if config.algorithm == "gorila" else ActorCritic
    network = kind(envs.observation_space, envs.action_space, config.network)
    flat = FlatParameters(network, torch.device("cpu"))
    file = run / "policy.safetensors"
    if file.exists() and run_folder.read(run)["completed"]:  # a resumed run still has its earlier policy
        named, header = checkpoint.load_policy(file)
        _check_layout(file, dict(network.state_dict()), named)
        network.load_state_dict(named)
        policy = Policy(network, header["global_steps"], "final", header.get("environment"), config.evaluation.epsilon)
    else:
        steps, source = _load_checkpoints(run, config, flat)
        policy = Policy(network, steps, source, epsilon=config.evaluation.epsilon)
    if not flat.data.isfinite().all():
        raise PalaError(f"The policy of run '{run}' ({policy.source}) has parameters that are not finite numbers.")
    return policy


def _load_checkpoints(run: Path, config: Config, flat: FlatParameters) -> tuple[int, str]:
    """Into `flat`: the weighted mean of the ranks' parameters, of independent learners rank 0's; of Gorila the shards
    put together. Returns (global steps, words for it)."""
    from pala.gorila.shard import assemble
    from pala.run import checkpoint

    states = checkpoint.load_all(checkpoint.newest_segment(run), flat.signature)
    ranks = f"{len(states)} rank{'s' if len(states) > 1 else ''}"
    steps = checkpoint.joint_counters(states)["base_steps"]
    if config.algorithm == "gorila":
        flat.data.copy_(assemble(states).parameters)
        return steps, f"checkpoints of {ranks}"
    independent = config.exchange.kind == "none"
    flat.data.copy_(checkpoint.average(states, independent).tensors["parameters"])
    return steps, f"checkpoint of rank 0 of {ranks}" if independent else f"mean of checkpoints of {ranks}"


def _check_layout(file: Path, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    for name in sorted(wanted.keys() | found.keys()):
        sides = [list(side[name].shape) if name in side else "missing" for side in (wanted, found)]
        if sides[0] != sides[1]:
            raise PalaError(
                f"Policy '{file}' is of another network than its run's settings and environment give: '{name}' should "
                f"be {sides[0]} and is {sides[1]}."
            )


# ---- playing ---------------------------------------------------------------------------------------------------------


def whole_games(env: EnvConfig, num_envs: int) -> EnvConfig:
    """The training environment, but a lost life ends nothing and no reward is clipped."""
    return replace(env, num_envs=num_envs, terminal_on_life_loss=False, clip_rewards="none")


def play(envs: Envs, act: Actor, seeds: np.ndarray, episodes: int) -> tuple[list[Episode], int]:
    """(`episodes` whole episodes, environment steps made).

    Each environment contributes a number of episodes fixed beforehand; those it plays beyond are ignored. Taking
    the first `episodes` to end instead would favour short ones. `seeds` int32 [B].
    """
    quota = [episodes // envs.num_envs + (i < episodes % envs.num_envs) for i in range(envs.num_envs)]
    played: list[Episode] = []
    steps, next_line = 0, time.monotonic() + _PROGRESS_S
    observations = envs.reset(seeds)
    while len(played) < episodes:
        step = envs.step(act(observations))
        observations, steps = step.observations, steps + envs.num_envs
        for episode in step.episodes:
            if quota[episode.env_index] > 0:
                quota[episode.env_index] -= 1
                played.append(episode)
        if time.monotonic() > next_line:
            say(f"Evaluation: {len(played)} of {episodes} episodes.")
            next_line += _PROGRESS_S
    return played, steps


# ---- the scores ------------------------------------------------------------------------------------------------------


def score_table(file: str) -> dict[str, dict[str, float]]:
    """A table that comes with PALA: the ROM's name of each game -> column -> score."""
    text = importlib.resources.files("pala").joinpath(file).read_text(encoding="utf-8")
    return {row.pop("game"): {k: float(v) for k, v in row.items()} for row in csv.DictReader(text.splitlines())}


def reference_scores(rom: str) -> tuple[float, float] | None:
    """(random, human) score of an Atari game by its ROM's name, `space_invaders`; None if the table lacks it."""
    scores = score_table("atari_scores.csv").get(rom)
    return (scores["random"], scores["human"]) if scores else None


def human_normalised(score: float, random: float, human: float) -> float:
    """Percent of the way from random play to the human (Mnih et al. 2015, Nature 518, figure 3)."""
    return 100 * (score - random) / (human - random)


# ---- all together ----------------------------------------------------------------------------------------------------


def evaluate(run: Path, episodes: int, num_envs: int, greedy: bool, seed: int, threads: int) -> Evaluation:
    """Play `episodes` whole episodes with the policy of a run, at most `num_envs` of them at the same time.

    Equal arguments give equal returns, unless the environment has chance of its own. `threads`: of torch and Atari.
    Raises PalaError. Writes nothing; see `save`.
    """
    import torch

    from pala.envs import make_envs
    from pala.run import run_folder
    from pala.run.run_folder import load_make_env
    from pala.system.seeding import derive

    config = run_folder.config_of(run)
    check_numbers(episodes=(episodes, 1), num_envs=(num_envs, 1), seed=(seed, 0), threads=(threads, 1))
    torch.set_num_threads(threads)
    make_env = load_make_env(run)
    envs = make_envs(whole_games(config.env, min(num_envs, episodes)), threads, make_env)
    try:
        policy = load_policy(run, config, envs)
        act = policy.actor(greedy, int(derive(seed, 0, "evaluation actions")[0]))
        begin = time.perf_counter()
        played, steps = play(envs, act, derive(seed, 0, "evaluation environments", envs.num_envs), episodes)
        seconds = time.perf_counter() - begin
    finally:
        envs.close()
    return Evaluation(
        finished=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        policy=policy.source,
        global_steps=policy.global_steps,
        num_envs=envs.num_envs,
        greedy=greedy,
        epsilon=(0.0 if greedy else config.evaluation.epsilon) if config.algorithm == "gorila" else None,
        seed=seed,
        steps_per_s=round(steps / seconds, 1),
        **_statistics(played),
        **_game_facts(config.env, played, policy.environment or "environment made in Python" if make_env else None),
    )


def check_numbers(**values: tuple[int, int]) -> None:
    """Raise PalaError for a named (value, least value) that is too small."""
    for name, (value, least) in values.items():
        if value < least:
            raise PalaError(f"'{name}' is {value} but must be at least {least}.")


def _statistics(played: list[Episode]) -> dict[str, Any]:
    returns = [episode.episode_return for episode in played]
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
    }


def _game_facts(env: EnvConfig, played: list[Episode], made_in_python: str | None) -> dict[str, Any]:
    """The fields that only Atari has; None elsewhere."""
    from pala.envs import atari_rom

    names = (
        "frames_per_step", "noop_max", "repeat_action_probability",
        "random_score", "human_score", "human_normalised_score", "score_table",
    )  # fmt: skip
    facts: dict[str, Any] = dict.fromkeys(names)
    if made_in_python is not None or not env.id.startswith("ALE/"):
        return facts | {"environment": made_in_python or env.id}
    facts |= {
        "environment": env.id.removeprefix("ALE/").split("-v")[0],
        "frames_per_step": env.frame_skip,
        "noop_max": env.noop_max,
        "repeat_action_probability": env.repeat_action_probability,
    }
    reference = reference_scores(atari_rom(env.id))
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


def save(run: Path, evaluation: Evaluation) -> None:
    """Replace `RUN/evaluation.json` and append to `RUN/evaluations.jsonl`. Raises PalaError."""
    from pala.system.files import write_atomically

    table = evaluation.to_table()
    try:
        write_atomically(run / "evaluation.json", (json.dumps(table, indent=2) + "\n").encode())
        with open(run / "evaluations.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(table, separators=(",", ":")) + "\n")
    except OSError as error:
        raise PalaError(f"The evaluation cannot be written to '{run}': {error}.") from None


# ---- the program -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """Score a run's policy on whole games. Defaults come from the run's own `evaluation` settings."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    episodes: int = 100
    """Whole episodes; 0, together with `--video`, makes the video alone."""
    num_envs: int = EvaluationConfig.num_envs
    """Episodes played at the same time."""
    greedy: bool = EvaluationConfig.greedy
    """The most probable action instead of a sampled one; Gorila: no random actions."""
    seed: int = 0
    """Equal seeds give equal episodes."""
    video: Path | None = None
    """Also record one more episode into this MP4 file."""
    threads: int = 0
    """Threads of torch and Atari; 0: all cores."""


def _parse(arguments: list[str]) -> Command:
    """The command line over the run's settings; prepares the process before torch is imported. Raises PalaError."""
    prog = "python -m pala.evaluate"
    first = tyro.cli(Command, args=arguments, prog=prog)
    threads = first.threads or len(os.sched_getaffinity(0))
    prepare(threads)
    from pala.run import run_folder

    settings = run_folder.config_of(first.run).evaluation
    default = Command(first.run, settings.episodes or Command.episodes, settings.num_envs, settings.greedy)
    return replace(tyro.cli(Command, args=arguments, prog=prog, default=default), threads=threads)


def main() -> None:
    """What `python -m pala.evaluate` runs."""
    try:
        command = _parse(sys.argv[1:])
        common = command.greedy, command.seed, command.threads
        if command.episodes != 0 or command.video is None:
            evaluation = evaluate(command.run, command.episodes, command.num_envs, *common)
            print(evaluation, flush=True)
            save(command.run, evaluation)
        if command.video is not None:
            from pala.video import record_video

            print(record_video(command.run, command.video, *common))
    except PalaError as error:
        say(f"pala: error: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
