"""Whole episodes of a policy in pictures: as a file, `pala evaluate RUN --video FILE.mp4`, or in a window.

Atari is shown by a twin in colour of the policy's own environment; other environments render themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from pala.config import Config, EnvConfig
from pala.envs.vector import Envs, Episode, MakeEnv, make_atari, make_by_id, make_envs
from pala.evaluation.policy import Policy
from pala.evaluation.scoring import Acting, check_numbers, longest_game, whole_games
from pala.system.errors import PalaError, reason
from pala.system.seeding import derive
from pala.system.text import short_number

Screen = Callable[["np.ndarray | None"], np.ndarray]  # actions (None: before the first) -> RGB uint8 [H, W, 3]

_MOST_VIDEO_STEPS = 20_000
_LEAST_VIDEO_WIDTH = 320  # pixels
_ATARI_FRAMES_PER_S = 60
_UNSEEN = ("offscreen", "dummy")  # what SDL takes where there is no display
_WITHOUT = "`pala evaluate RUN --video FILE.mp4` does without"


def record_video(run: Path, file: Path, acting: Acting) -> str:
    """Write one whole episode as an MP4 file, a picture a step; returns a sentence that says what was played.

    At most 20,000 steps are recorded. Raises PalaError.
    """
    if file.suffix != ".mp4":
        raise PalaError(f"Video '{file}' must have a name that ends in '.mp4'.")
    target = file.absolute()  # an environment may change the working directory
    with filmed(run, 1, acting) as film:
        steps = _write_video(target, film.frames_per_s, itertools.islice(film.pictures, 1 + _MOST_VIDEO_STEPS))
    if not film.ended:
        return f"Video '{file}': the first {steps:,} steps of an episode; the rest is cut."
    return f"Video '{file}': {words_of(film.ended[0])}."


class Film(NamedTuple):
    """Episodes, played while their pictures are looked at."""

    pictures: Iterator[np.ndarray]  # RGB uint8 [H, W, 3], one a step
    frames_per_s: float  # at which people play
    ended: list[Episode]  # so far


def words_of(episode: Episode) -> str:
    """Return what was played, in words."""
    return f"an episode of {episode.length_steps:,} steps, return {short_number(episode.episode_return)}"


@contextmanager
def filmed(run: Path, episodes: int, acting: Acting) -> Iterator[Film]:
    """Film episodes of a run's policy, one after the other; 0: without an end. Raises PalaError, also while they are
    played."""
    check_numbers(episodes=(episodes, 0))
    config, _ = acting.settings_of(run)
    run = run.absolute()  # an environment may change the working directory
    seeds = derive(acting.seed, 0, "video environment")
    make_env, make_network = acting.code_of(run)
    envs, screen, frames_per_s = _stage(config, make_env, seeds, acting.threads)
    try:
        torch.set_num_threads(acting.threads)  # not before: an environment's module may have set it otherwise
        policy = acting.policy_of(run, config, envs, make_network)
        policy.seed(int(derive(acting.seed, 0, "video actions")[0]))
        ended: list[Episode] = []
        pictures = _film(envs, policy, acting.greedy, screen, seeds, ended, episodes)
        yield Film(pictures, frames_per_s, ended)
    finally:
        envs.close()


def _film(
    envs: Envs,
    policy: Policy,
    greedy: bool,
    screen: Screen,
    seeds: np.ndarray,
    ended: list[Episode],
    episodes: int,
) -> Iterator[np.ndarray]:
    """Yield the pictures; an episode is put into `ended` when it ends."""
    observations = envs.reset(seeds)
    yield screen(None)
    while True:
        actions = policy.actions(observations, envs.action_masks, greedy)
        step = envs.step(actions)
        policy.reset(step.began)
        observations = step.observations
        ended += step.episodes
        if len(ended) == episodes > 0:  # the environment has begun again: there is no picture of the last moment
            return
        yield screen(actions)


def _stage(config: Config, make_env: MakeEnv | None, seeds: np.ndarray, threads: int) -> tuple[Envs, Screen, float]:
    """Make one environment for the policy; return it, with what shows it, and pictures a second."""
    env = whole_games(config.env, 1)
    if make_env is None and env.is_atari:
        return make_envs(env, threads), _atari_screen(env, seeds), _ATARI_FRAMES_PER_S / env.frame_skip
    rendered = _rendered_env(env, make_env)
    env = replace(env, vectorization="sync", restarts=0)  # there is one that draws pictures
    envs = make_envs(env, threads, lambda: rendered, longest_game(config))
    return envs, _screen_of(rendered), float(rendered.metadata.get("render_fps") or 30)


def _atari_screen(env: EnvConfig, seeds: np.ndarray) -> Screen:
    """Make a twin in colour of the policy's own Atari, which cannot render: it gets the same seed and the same actions.

    Unlike `gymnasium.make` with `AtariPreprocessing`, which begins an episode without pressing FIRE and draws its
    no-ops and sticky actions otherwise, it shows just what the policy saw, the last two frames max-pooled.
    """
    twin = make_atari(replace(env, num_envs=1), 1, img_height=210, img_width=160, grayscale=False, stack_num=1)

    def screen(actions: np.ndarray | None) -> np.ndarray:
        observations = twin.reset(seed=seeds)[0] if actions is None else twin.step(actions)[0]
        return np.asarray(observations[0, 0])

    return screen


def _rendered_env(env: EnvConfig, make_env: MakeEnv | None) -> Any:
    """Make an environment that draws pictures. Raises PalaError if it cannot."""
    name = f"'{env.id}'" if make_env is None else "The run's environment, which was made in Python,"
    try:
        made: Any = make_by_id(env.id, render_mode="rgb_array") if make_env is None else make_env()
    except PalaError:
        raise
    except Exception as error:  # it takes no `render_mode`, or has no display: it is the user's code
        raise PalaError(f"{name} cannot be drawn for a video: {_words(error)}.") from error
    if make_env is not None and isinstance(made, gymnasium.Env) and made.render_mode != "rgb_array":
        made.close()
        raise PalaError(
            "The run's environment was made in Python and draws no pictures, so there can be no video; let its factory "
            'use `render_mode="rgb_array"`.'
        )
    return made


def _screen_of(rendered: Any) -> Screen:
    def screen(actions: np.ndarray | None) -> np.ndarray:
        del actions
        try:
            picture = rendered.render()
        except Exception as error:  # it is the user's code
            raise PalaError(f"The environment cannot be drawn for a video: {_words(error)}.") from error
        if not isinstance(picture, np.ndarray) or picture.ndim != 3:
            raise PalaError("The environment cannot be drawn for a video: its `render()` gives no RGB picture.")
        return picture

    return screen


def _words(error: Exception) -> str:
    known = isinstance(error, (gymnasium.error.Error, ImportError, TypeError))
    words = (str(error) if known else f"{type(error).__name__}: {error}").rstrip(".")
    draws_by_opengl = "mujoco" in sys.modules or "opengl" in words.lower()
    if draws_by_opengl and "MUJOCO_GL" not in os.environ:
        words += ". Without a display, MuJoCo draws if the environment variable `MUJOCO_GL=egl` is set"
    return words


def _write_video(file: Path, frames_per_s: float, pictures: Iterator[np.ndarray]) -> int:
    """Encode the pictures (H.264); returns how many steps lie between them. Raises PalaError."""
    imageio = importlib.import_module("imageio.v2")
    encoder = importlib.import_module("imageio_ffmpeg")
    neighbour = file.with_name(f".{file.stem}.{os.getpid()}.mp4")
    steps, shape = 0, None
    try:
        with imageio.get_writer(neighbour, fps=frames_per_s, codec="libx264", quality=8, macro_block_size=2) as writer:
            for steps, picture in enumerate(pictures):  # noqa: B007 - the last number is the result
                shape = shape or picture.shape
                if picture.shape != shape:
                    break
                writer.append_data(enlarged(picture))
        if shape is not None and picture.shape != shape:  # after the encoder has ended, which makes the file again
            raise PalaError(
                f"Video '{file}' cannot be written: the environment's pictures change their size, from {shape} to "
                f"{picture.shape}."
            )
        if encoder.count_frames_and_secs(str(neighbour))[0] < 1:  # its exit status is not looked at
            raise OSError("what was encoded cannot be read; the disk may be full")
        os.replace(neighbour, file)
    except (OSError, ValueError, RuntimeError) as error:  # pictures of unlike sizes; an encoder that fails
        raise PalaError(f"Video '{file}' cannot be written: {reason(error)}.") from None
    finally:
        with contextlib.suppress(OSError):  # what went wrong before is what to tell
            neighbour.unlink(missing_ok=True)
    return steps


def enlarged(picture: np.ndarray) -> np.ndarray:
    """Return a whole multiple of the picture, at least 320 wide, with even sides as H.264 wants them."""
    factor = -(-_LEAST_VIDEO_WIDTH // picture.shape[1])
    large = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    return large[: large.shape[0] // 2 * 2, : large.shape[1] // 2 * 2]


class Window:
    """Shows pictures until it is closed. Raises PalaError where there can be none."""

    def __init__(self, title: str) -> None:
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        try:
            self._pygame: Any = importlib.import_module("pygame")
        except ImportError:
            raise PalaError(f"A window needs pygame, `pip install pygame-ce`; {_WITHOUT}.") from None
        try:
            self._pygame.display.init()
        except self._pygame.error as error:
            raise PalaError(f"No window can be opened ({error}); {_WITHOUT}.") from None
        if self._pygame.display.get_driver() in _UNSEEN and "SDL_VIDEODRIVER" not in os.environ:
            raise PalaError(f"No window can be opened: there is no display; {_WITHOUT}.")
        self._title = title
        self._clock = self._pygame.time.Clock()
        self._screen = None

    def show(self, picture: np.ndarray, frames_per_s: float) -> bool:
        """Show a picture, RGB uint8 [H, W, 3], when it is time for it at `frames_per_s`. Returns False when the window
        was closed."""
        self._draw(enlarged(picture).swapaxes(0, 1))
        self._clock.tick(frames_per_s)
        return not any(self._is_end(event) for event in self._pygame.event.get())

    def close(self) -> None:
        """Close the window."""
        self._pygame.display.quit()

    def _draw(self, picture: np.ndarray) -> None:
        """Show a picture [W, H, 3], as pygame has it."""
        display = self._pygame.display
        if self._screen is None or self._screen.get_size() != picture.shape[:2]:
            display.quit()  # a second window of SCALED gets no renderer
            display.init()
            display.set_caption(self._title)
            self._screen = display.set_mode(picture.shape[:2], self._pygame.SCALED)
        self._pygame.surfarray.blit_array(self._screen, picture)
        display.flip()

    def _is_end(self, event: Any) -> bool:
        pygame = self._pygame
        return event.type == pygame.QUIT or (
            event.type == pygame.KEYDOWN and event.key in (pygame.K_ESCAPE, pygame.K_q)
        )
