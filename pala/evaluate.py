"""Score a run's policy on whole games with unclipped rewards: `python -m pala.evaluate runs/pong-...`.

    100 episodes, greedy actions      python -m pala.evaluate RUN --episodes 100 --greedy
    and a video of one more episode   python -m pala.evaluate RUN --video pong.mp4
    the video alone                   python -m pala.evaluate RUN --video pong.mp4 --episodes 0

Prints one line; `RUN/evaluation.json` holds the newest result, `RUN/evaluations.jsonl` every one.

The policy is `RUN/policy.safetensors`; a run that has not completed is scored on the mean of its ranks' newest
checkpoints. It is computed on the CPU. A run that was trained on an environment made in Python brings it along as
`make_env.pkl`, and loading a pickle runs code: evaluate such a run only if you trust whoever made it.

numpy, torch and what imports them are imported inside the functions, because `pala.runtime.prepare` must come first.
"""

from __future__ import annotations

import csv
import importlib
import importlib.resources
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pala.config import Config, EnvConfig, EvaluationConfig
from pala.errors import PalaError
from pala.runtime import prepare, say

if TYPE_CHECKING:
    import numpy as np

    from pala.envs import Envs, Episode, MakeEnv
    from pala.networks import ActorCritic

    Actor = Callable[[np.ndarray], np.ndarray]  # observations [B, *obs] -> actions [B] or [B, A]
    Screen = Callable[[np.ndarray | None], np.ndarray]  # actions (None: before the first) -> RGB uint8 [H, W, 3]

SCORE_TABLE = "dqn_zoo random/human scores, 57 games"
_PROGRESS_S = 30.0
_MOST_VIDEO_STEPS = 20_000
_LEAST_VIDEO_WIDTH = 320  # pixels
_ATARI_FRAMES_PER_S = 60


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
        error = "" if self.standard_error is None else f" ± {_short(self.standard_error)} (standard error)"
        plural = "s" if self.episodes > 1 else ""
        parts = [
            f"{self.environment}: mean return {_short(self.mean_return)}{error} over {self.episodes} episode{plural}"
        ]
        if self.human_normalised_score is not None:
            parts.append(f"{self.human_normalised_score:.1f} % human-normalised (dqn_zoo table)")
        parts.append("greedy actions" if self.greedy else "sampled actions")
        if self.noop_max:
            parts.append(f"up to {self.noop_max} no-ops")
        if self.repeat_action_probability:
            parts.append(f"sticky actions {self.repeat_action_probability:g}")
        policy = "final policy" if self.policy == "final" else self.policy
        return f"{', '.join(parts)}; {policy} after {self.global_steps:,} steps"


def _short(value: float) -> str:
    """Enough digits to tell returns apart."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 1 or size == 0 else f"{value:.3g}"


# ---- the policy ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """A network with the parameters of a run."""

    network: ActorCritic
    global_steps: int  # of training, over all ranks
    source: str  # "final", or "mean of checkpoints of N ranks"
    environment: str | None = None  # what the run calls an environment made in Python

    def actor(self, greedy: bool, seed: int) -> Actor:
        """A function from observations to actions, sampled with a random stream of its own or most probable."""
        import numpy as np
        import torch

        generator = torch.Generator().manual_seed(seed)
        network, distribution = self.network, self.network.distribution

        def act(observations: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                policy_output, _ = network(torch.from_numpy(np.ascontiguousarray(observations)))
                actions: np.ndarray = distribution.to_env(distribution.sample(policy_output, generator, greedy)).numpy()
                return actions

        return act


def load_policy(run: Path, config: Config, envs: Envs) -> Policy:
    """A run's final policy or, without one, the weighted mean of its ranks' newest checkpoints. Raises PalaError."""
    import torch

    from pala import checkpoint
    from pala.networks import ActorCritic, FlatParameters

    network = ActorCritic(envs.observation_space, envs.action_space, config.network)
    flat = FlatParameters(network, torch.device("cpu"))
    file = run / "policy.safetensors"
    if file.exists():
        named, header = checkpoint.load_policy(file)
        _check_layout(file, dict(network.state_dict()), named)
        network.load_state_dict(named)
        policy = Policy(network, header["global_steps"], "final", header.get("environment"))
    else:
        states = checkpoint.load_all(checkpoint.newest_segment(run), flat.signature)
        mean = checkpoint.average(states)
        flat.data.copy_(mean.parameters)
        ranks = f"{len(states)} rank{'s' if len(states) > 1 else ''}"
        policy = Policy(network, mean.counters["base_steps"], f"mean of checkpoints of {ranks}")
    if not flat.data.isfinite().all():
        raise PalaError(f"The policy of run '{run}' ({policy.source}) has parameters that are not finite numbers.")
    return policy


def _check_layout(file: Path, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    for name in sorted(wanted.keys() | found.keys()):
        sides = [list(side[name].shape) if name in side else "missing" for side in (wanted, found)]
        if sides[0] != sides[1]:
            raise PalaError(
                f"Policy '{file}' is of another network than its run's settings and environment give: '{name}' should "
                f"be {sides[0]} and is {sides[1]}."
            )


# ---- the environment -------------------------------------------------------------------------------------------------


def load_make_env(run: Path) -> MakeEnv | None:
    """The environment factory that a run was trained with from Python, if it was. Runs its code. Raises PalaError."""
    file = run / "make_env.pkl"
    if not file.exists():
        return None
    import cloudpickle

    try:
        make_env: MakeEnv = cloudpickle.loads(file.read_bytes())
    except Exception as error:  # it is the user's code: anything may happen
        raise PalaError(
            f"The environment of the run, '{file}', cannot be loaded ({type(error).__name__}: {error}); start from "
            "where the modules that it was made with can be imported."
        ) from error
    return make_env


def _whole_games(env: EnvConfig, num_envs: int) -> EnvConfig:
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


def reference_scores(rom: str) -> tuple[float, float] | None:
    """(random, human) score of an Atari game by its ROM's name, `space_invaders`; None if the table lacks it."""
    text = importlib.resources.files("pala").joinpath("atari_scores.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        if row["game"] == rom:
            return float(row["random"]), float(row["human"])
    return None


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

    from pala import run_folder
    from pala.envs import make_envs
    from pala.seeding import derive

    config = run_folder.config_of(run)
    _check_numbers(episodes=(episodes, 1), num_envs=(num_envs, 1), seed=(seed, 0), threads=(threads, 1))
    torch.set_num_threads(threads)
    make_env = load_make_env(run)
    envs = make_envs(_whole_games(config.env, min(num_envs, episodes)), threads, make_env)
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
        seed=seed,
        steps_per_s=round(steps / seconds, 1),
        **_statistics(played),
        **_game_facts(config.env, played, policy.environment or "environment made in Python" if make_env else None),
    )


def _check_numbers(**values: tuple[int, int]) -> None:
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
    from pala.files import write_atomically

    table = evaluation.to_table()
    try:
        write_atomically(run / "evaluation.json", (json.dumps(table, indent=2) + "\n").encode())
        with open(run / "evaluations.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(table, separators=(",", ":")) + "\n")
    except OSError as error:
        raise PalaError(f"The evaluation cannot be written to '{run}': {error}.") from None


# ---- the video -------------------------------------------------------------------------------------------------------


def record_video(run: Path, file: Path, greedy: bool, seed: int, threads: int) -> str:
    """Write one whole episode as an MP4 file, a picture a step; returns a sentence that says what was played.

    At most 20,000 steps are recorded. Raises PalaError.
    """
    import torch

    from pala import run_folder
    from pala.seeding import derive

    _check_numbers(seed=(seed, 0), threads=(threads, 1))
    if file.suffix != ".mp4":
        raise PalaError(f"Video '{file}' must have a name that ends in '.mp4'.")
    torch.set_num_threads(threads)
    config = run_folder.config_of(run)
    seeds = derive(seed, 0, "video environment")
    envs, screen, frames_per_s = _stage(_whole_games(config.env, 1), load_make_env(run), seeds, threads)
    try:
        act = load_policy(run, config, envs).actor(greedy, int(derive(seed, 0, "video actions")[0]))
        ended: list[Episode] = []
        steps = _write_video(file, frames_per_s, _film(envs, act, screen, seeds, ended))
    finally:
        envs.close()
    if not ended:
        return f"Video '{file}': the first {steps:,} steps of an episode; the rest is cut."
    return f"Video '{file}': an episode of {ended[0].length_steps:,} steps, return {_short(ended[0].episode_return)}."


def _film(envs: Envs, act: Actor, screen: Screen, seeds: np.ndarray, ended: list[Episode]) -> Iterator[np.ndarray]:
    """The pictures of one episode; it is put into `ended` if it ends within the limit."""
    observations = envs.reset(seeds)
    yield screen(None)
    for _ in range(_MOST_VIDEO_STEPS):
        actions = act(observations)
        step = envs.step(actions)
        observations = step.observations
        if step.episodes:  # the environment has begun anew: there is no picture of the last moment
            ended += step.episodes
            return
        yield screen(actions)


def _stage(env: EnvConfig, make_env: MakeEnv | None, seeds: np.ndarray, threads: int) -> tuple[Envs, Screen, float]:
    """One environment for the policy, what it is seen with, and pictures a second."""
    from pala.envs import make_envs

    if make_env is None and env.id.startswith("ALE/"):
        return make_envs(env, threads), _atari_screen(env, seeds), _ATARI_FRAMES_PER_S / env.frame_skip
    rendered = _rendered_env(env, make_env)
    envs = make_envs(replace(env, vectorization="sync"), threads, lambda: rendered)
    return envs, _screen_of(rendered), float(rendered.metadata.get("render_fps") or 30)


def _atari_screen(env: EnvConfig, seeds: np.ndarray) -> Screen:
    """A twin in colour of the policy's own Atari, which cannot render: it gets the same seed and the same actions.

    Unlike `gymnasium.make` with `AtariPreprocessing`, which begins an episode without pressing FIRE and draws its
    no-ops and sticky actions otherwise, it shows just what the policy saw, the last two frames max-pooled.
    """
    import numpy as np
    from ale_py import AtariVectorEnv
    from gymnasium.vector import AutoresetMode

    from pala.envs import atari_rom

    twin = AtariVectorEnv(
        atari_rom(env.id), num_envs=1, num_threads=1, max_num_frames_per_episode=env.max_episode_frames,
        repeat_action_probability=env.repeat_action_probability, full_action_space=env.full_action_space,
        autoreset_mode=AutoresetMode.SAME_STEP, frameskip=env.frame_skip, noop_max=env.noop_max, reward_clipping=False,
        img_height=210, img_width=160, grayscale=False, stack_num=1,
    )  # fmt: skip

    def screen(actions: np.ndarray | None) -> np.ndarray:
        observations = twin.reset(seed=seeds)[0] if actions is None else twin.step(actions)[0]
        return np.asarray(observations[0, 0])

    return screen


def _rendered_env(env: EnvConfig, make_env: MakeEnv | None) -> Any:
    """An environment that draws pictures. Raises PalaError if it cannot."""
    import gymnasium

    if make_env is None:
        try:
            return gymnasium.make(env.id, render_mode="rgb_array")
        except (gymnasium.error.Error, ImportError) as error:
            raise PalaError(f"'{env.id}' cannot be drawn for a video: {error}.") from None
    made = make_env()
    if getattr(made, "render_mode", None) != "rgb_array":
        made.close()
        raise PalaError(
            "The run's environment was made in Python and draws no pictures, so there can be no video; let its factory "
            'use `render_mode="rgb_array"`.'
        )
    return made


def _screen_of(rendered: Any) -> Screen:
    import gymnasium
    import numpy as np

    def screen(actions: np.ndarray | None) -> np.ndarray:
        del actions
        try:
            picture = rendered.render()
        except (gymnasium.error.Error, ImportError) as error:
            raise PalaError(f"The environment cannot be drawn for a video: {error}.") from None
        if not isinstance(picture, np.ndarray) or picture.ndim != 3:
            raise PalaError("The environment cannot be drawn for a video: its `render()` gives no RGB picture.")
        return picture

    return screen


def _write_video(file: Path, frames_per_s: float, pictures: Iterator[np.ndarray]) -> int:
    """Encode the pictures (H.264); returns how many steps lie between them. Raises PalaError."""
    try:
        imageio = importlib.import_module("imageio.v2")
        importlib.import_module("imageio_ffmpeg")  # the encoder
    except ImportError as error:
        raise PalaError(f"A video needs more packages ({error}): `pip install imageio imageio-ffmpeg`.") from None
    neighbour = file.with_name(f".{file.stem}.{os.getpid()}.mp4")
    steps = 0
    try:
        with imageio.get_writer(neighbour, fps=frames_per_s, codec="libx264", quality=8, macro_block_size=2) as writer:
            for steps, picture in enumerate(pictures):  # noqa: B007 - the last number is the result
                writer.append_data(_enlarged(picture))
        os.replace(neighbour, file)
    except OSError as error:
        raise PalaError(f"Video '{file}' cannot be written: {error}.") from None
    finally:
        neighbour.unlink(missing_ok=True)
    return steps


def _enlarged(picture: np.ndarray) -> np.ndarray:
    """A whole multiple of the picture, at least 320 wide, with even sides as H.264 wants them."""
    factor = -(-_LEAST_VIDEO_WIDTH // picture.shape[1])
    large = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    return large[: large.shape[0] // 2 * 2, : large.shape[1] // 2 * 2]


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
    """The most probable action instead of a sampled one."""
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
    from pala import run_folder

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
            print(record_video(command.run, command.video, *common))
    except PalaError as error:
        say(f"pala: error: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
