"""Vector environments and episode accounting.

`Envs` steps `num_envs` environments together. Every row it returns is a true transition: environments reset in the
same step in which an episode ends (autoreset mode SAME_STEP), so there is no row to be masked out of the loss, and
the last observation of a truncated episode is handed over for bootstrapping.

Three ends are told apart:
- `terminated`: the return ends here and is not bootstrapped (a game over, or a lost life if so configured);
- `truncated`: a time limit; the value of the last observation stands for the rest of the return;
- an *episode* ends with the whole game; only then are its unclipped return and length reported.

A step in which an environment failed (`failures.py`) is the exception: it is no transition, ends nothing, and its
episode is not reported.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from pala.config import EnvConfig
from pala.envs.failures import CLOSE_S, FAILURES, FailedTooOftenError, Failure, told_if_it_takes_long
from pala.envs.masks import KEY, missing
from pala.envs.spaces import Inputs
from pala.envs.wrappers import with_options, wrapped
from pala.system.errors import PalaError, nearest, reason
from pala.system.interrupt import take_back_signals
from pala.system.names import import_module, named_call
from pala.system.output import log

MakeEnv = Callable[[], gymnasium.Env]


class Episode(NamedTuple):
    """A whole episode: unclipped sum of rewards, length in steps, which environment played it, and the numbers in its
    last info that are asked for (`env.episode_info`)."""

    episode_return: float
    length_steps: int
    env_index: int
    info: dict[str, float] = {}  # noqa: RUF012 - nobody changes it

    def record(self) -> dict[str, float]:
        """Return the episode as metrics have it."""
        told = {f"info_{key}": value for key, value in self.info.items()}
        return {"return": self.episode_return, "length_steps": self.length_steps} | told


class Step(NamedTuple):
    """The outcome of one step of all B environments."""

    observations: np.ndarray  # [B, *obs] after the step (after the reset where an episode ended)
    rewards: np.ndarray  # [B] float32, clipped as configured
    terminated: np.ndarray  # [B] bool
    truncated: np.ndarray  # [B] bool, never together with terminated
    final_observations: np.ndarray  # [truncated.sum(), *obs] last observations of the truncated ones
    episodes: list[Episode]
    failed: np.ndarray  # [B] bool: no transition; `observations` has the first of a new environment's episode

    @property
    def began(self) -> np.ndarray:
        """Environments that show the first observation of an episode, [B] bool. A lost life begins none."""
        began = self.failed.copy()
        began[[episode.env_index for episode in self.episodes]] = True
        return began


class Envs:
    """`num_envs` environments behind one `reset` and one `step`. As a context manager: closed at the end of the block,
    or abandoned."""

    action_masks: np.ndarray | None = None
    """Masks of the actions that each environment allows next, bool [B, A] (`masks.py`); None: it gives none."""
    num_failures = 0
    """Failures of environments so far."""
    sender = ""
    """Beginning of messages about failures, such as `[rank 1] `."""

    def __init__(
        self,
        vector_env: gymnasium.vector.VectorEnv,
        clip_rewards: bool,
        name: str = "",
        inputs: Inputs | None = None,
        episode_info: Sequence[str] = (),
    ) -> None:
        """`name`: the environment's name for people; `inputs`: the mapping by which its observations became
        `vector_env`'s; `episode_info`: names of numbers in its final infos."""
        self.vector_env = vector_env
        self.name = name
        self._episode_info = episode_info
        self._end_processes: Callable[..., int] | None = getattr(vector_env, "end", None)  # of `EnvProcesses`
        self._clip = clip_rewards
        self.num_envs = vector_env.num_envs
        assert isinstance(vector_env.single_observation_space, gymnasium.spaces.Box)
        self.observation_space = vector_env.single_observation_space
        self.action_space = vector_env.single_action_space
        self.inputs = inputs or Inputs(self.observation_space, self.observation_space)
        self._returns = np.zeros(self.num_envs, np.float64)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._none_failed = np.zeros(self.num_envs, np.bool_)
        self._trace_shown = False

    def try_out(self, seed: int) -> None:
        """Reset and step the first environment once, before training. Raises PalaError for what fails there: a mistake
        of the user's, which making it again does not mend."""
        self.first_frame(seed)

    def first_frame(self, seed: int) -> np.ndarray:
        """Try out the first environment, and return its first observation; of stacked frames it may be one. Raises
        PalaError."""
        first: Any = self.vector_env
        if self._end_processes is None:
            first = first.envs[0]
        observation: np.ndarray = first.try_out(seed)
        take_back_signals()
        return observation

    def reset(self, seeds: np.ndarray) -> np.ndarray:
        """Begin episodes, and return the first observations [B, *obs]; `seeds` int32 [B], one an environment."""
        try:
            observations, info = self.vector_env.reset(seed=self._seed_argument(seeds))
        except FailedTooOftenError as error:
            raise self._last(error) from None
        if FAILURES in info:
            self._count_failures(info)
        take_back_signals()
        self._returns[:] = 0
        self._lengths[:] = 0
        self.action_masks = self._masks_of(info, KEY in info)
        self._begin(info)
        return observations

    def step(self, actions: np.ndarray) -> Step:
        """Step all environments; `actions` [B, ...] as the action space has them."""
        try:
            observations, rewards, terminated, truncated, info = self.vector_env.step(actions)
        except FailedTooOftenError as error:
            raise self._last(error) from None
        self.action_masks = self._masks_of(info, self.action_masks is not None)
        failed = self._none_failed
        if FAILURES in info:  # where it ended, only the reset after it failed
            failed = self._count_failures(info) & ~(terminated | truncated)
        truncated = truncated & ~terminated
        ended = self._episode_ended(terminated, truncated, info)
        self._returns += rewards
        self._lengths += 1
        episodes = [
            Episode(float(self._returns[i]), int(self._lengths[i]), int(i), self._info_of(int(i), info))
            for i in np.flatnonzero(ended)
        ]
        over = ended | failed
        self._returns[over] = 0
        self._lengths[over] = 0
        if episodes or failed is not self._none_failed:  # those environments were reset
            take_back_signals()
        rewards = np.sign(rewards) if self._clip else rewards
        final = self._final_observations(truncated, info)
        return Step(observations, rewards.astype(np.float32), terminated, truncated, final, episodes, failed)

    def __enter__(self) -> Envs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def close(self) -> None:
        """Free the environments and their threads or processes. What they raise is only reported, since they are not
        needed any more."""
        if self._end_processes is not None:
            if killed := self._end_processes(CLOSE_S):
                log(f"{killed} of the environments did not close within {CLOSE_S:g} s; their processes were killed.")
            return
        try:
            with told_if_it_takes_long():
                self.vector_env.close()
        except (Exception, SystemExit) as error:  # it is the user's code
            log(f"The environments cannot be closed ({type(error).__name__}: {error}).")
        finally:
            self.vector_env.closed = True

    def abandon(self) -> None:
        """Close after a failure, without waiting for a worker that has died in a step or does not come back."""
        if self._end_processes is not None:
            self._end_processes()
        else:
            self.close()

    def _last(self, error: FailedTooOftenError) -> PalaError:
        """Return the error of the failure that ends this rank."""
        self._show_trace(error.trace)
        return PalaError(f"{self.sender}{error}")

    def _show_trace(self, trace: str) -> None:
        """Show the traceback of a failure, unless one was shown before."""
        if trace and not self._trace_shown:
            log(trace)
            self._trace_shown = True

    def _count_failures(self, info: dict[str, Any]) -> np.ndarray:
        """Count and report the failures in an info; return which environments had some, [B]."""
        has_some = info[f"_{FAILURES}"]
        for index in np.flatnonzero(has_some):
            for failure in info[FAILURES][index]:
                self._report(int(index), failure)
        return np.asarray(has_some)

    def _report(self, index: int, failure: Failure) -> None:
        self.num_failures += 1
        if self.num_failures.bit_count() > 1:  # the 1st, 2nd, 4th, 8th ... are told
            return
        self._show_trace(failure.trace)
        so_far = f" {self.num_failures:,} failures were so far; the next line comes after as many more."
        so_far *= self.num_failures > 1
        what = f"Environment {index} ('{self.name}') has failed: {failure.text}."
        log(f"{self.sender}{what} It is made again; the episode that it played is left out.{so_far}")

    def _seed_argument(self, seeds: np.ndarray) -> Any:
        return seeds.tolist()

    def _masks_of(self, info: dict[str, Any], are_expected: bool) -> np.ndarray | None:
        """Return all environments' masks. Raises PalaError unless all give one or none does, as in the first reset."""
        masks: np.ndarray | None = info.get(KEY)
        if (masks is not None) != are_expected or (masks is not None and not info[f"_{KEY}"].all()):
            raise missing(self.name, are_expected)
        return masks

    def _begin(self, info: dict[str, Any]) -> None:
        """Look at the reset's info."""

    def _episode_ended(self, terminated: np.ndarray, truncated: np.ndarray, info: dict[str, Any]) -> np.ndarray:
        del info
        return terminated | truncated

    def _info_of(self, env_index: int, info: dict[str, Any]) -> dict[str, float]:
        return {key: float(info["final_info"][key][env_index]) for key in self._episode_info}

    def _final_observations(self, truncated: np.ndarray, info: dict[str, Any]) -> np.ndarray:
        if not truncated.any():
            return np.empty((0, *(self.observation_space.shape or ())), self.observation_space.dtype)
        return np.stack(list(info["final_obs"][truncated]))


def make_atari(config: EnvConfig, num_threads: int, **look: Any) -> Any:
    """Make ale-py's vector environment of a game as it is played by these settings. `look`: ale-py's arguments for the
    observations; they do not change the game. Raises PalaError."""
    from ale_py import AtariVectorEnv  # loaded for games of Atari alone

    return AtariVectorEnv(
        atari_rom(config.id),
        num_envs=config.num_envs,
        num_threads=min(num_threads, config.num_envs),
        max_num_frames_per_episode=config.max_episode_frames,
        repeat_action_probability=config.repeat_action_probability,
        full_action_space=config.full_action_space,
        autoreset_mode=AutoresetMode.SAME_STEP,
        frameskip=config.frame_skip,
        noop_max=config.noop_max,
        use_fire_reset=config.fire_on_reset,
        reward_clipping=False,  # it would hide the true reward
        **look,
    )


class AtariEnvs(Envs):
    """Atari on ale-py's own vector environment (C++ threads)."""

    def __init__(self, config: EnvConfig, num_threads: int) -> None:
        # `episodic_life` would reset the whole game at a lost life; this only reports it.
        games = make_atari(
            config, num_threads, stack_num=config.frame_stack, life_loss_info=config.terminal_on_life_loss
        )
        super().__init__(games, clip_rewards=config.clip_rewards != "none", name=config.id)
        self._config = config
        self._frames_before_episode = np.zeros(config.num_envs, np.int64)

    def try_out(self, seed: int) -> None:
        """Do nothing: these games are PALA's own."""

    def first_frame(self, seed: int) -> np.ndarray:
        """Return a frame [1, H, W] of another game: in a stack those before a game's first are black."""
        game = make_atari(replace(self._config, num_envs=1), 1, stack_num=1)
        try:
            return game.reset(seed=np.array([seed], np.int32))[0][0]
        finally:
            game.close()

    def _seed_argument(self, seeds: np.ndarray) -> Any:
        return seeds

    def _begin(self, info: dict[str, Any]) -> None:
        self._frames_before_episode = info["frame_number"] - info["episode_frame_number"]

    def _episode_ended(self, terminated: np.ndarray, truncated: np.ndarray, info: dict[str, Any]) -> np.ndarray:
        # A lost life is reported as a termination but the emulator continues; a reset moves the episode's first frame.
        frames_before = info["frame_number"] - info["episode_frame_number"]
        ended: np.ndarray = frames_before != self._frames_before_episode
        self._frames_before_episode = frames_before
        return ended


def make_envs(
    config: EnvConfig, num_threads: int = 1, make_env: MakeEnv | None = None, max_episode_steps: int | None = None
) -> Envs:
    """Make the environments of one rank. A `make_env` of the user's wins over `config.id`. Other than Atari, episodes
    are truncated after `max_episode_steps`, if not before. Raises PalaError."""
    if make_env is None and config.is_atari:
        if "(" in config.id:
            raise PalaError(
                f"'env.id' is '{config.id}', but Atari games take no arguments: the section 'env' has their settings."
            )
        if config.episode_info:
            raise PalaError(
                f"'env.episode_info' is {list(config.episode_info)}, but '{config.id}' is played by ale-py's vector "
                "environment, whose infos have nothing to tell of an episode."
            )
        if config.wrappers:
            raise PalaError(
                f"'env.wrappers' is {list(config.wrappers)}, but '{config.id}' is played by ale-py's own vector "
                "environment, which has no single environments to wrap; from Python, give a `make_env` that makes the "
                "game with gymnasium.wrappers.AtariPreprocessing."
            )
        return AtariEnvs(config, num_threads)

    from pala.envs.single import Factory  # not loaded for Atari

    limit = min((steps for steps in (max_episode_steps, config.max_episode_steps) if steps), default=None)
    factory = Factory(_single(config, make_env), config, limit)
    with _saying_what_cannot_be_made(config, make_env):
        try:
            vector_env: gymnasium.vector.VectorEnv
            if config.vectorization == "async":
                from pala.envs.processes import EnvProcesses

                vector_env = EnvProcesses(factory, config.num_envs)
            else:
                vector_env = _in_this_process(factory, config.num_envs)
        except BaseException:
            factory.close()
            raise
    take_back_signals()
    return Envs(vector_env, config.clip_rewards == "sign", factory.name, factory.inputs, config.episode_info)


def as_gymnasium(config: EnvConfig, num_threads: int, make_env: MakeEnv | None = None) -> gymnasium.vector.VectorEnv:
    """Make the environments in this process as gymnasium has them: with infos and unconverted observations.
    Raises PalaError."""
    if make_env is None and config.is_atari:
        return make_envs(config, num_threads).vector_env
    make, limit = _single(config, make_env), config.max_episode_steps

    def limited() -> gymnasium.Env:
        return gymnasium.wrappers.TimeLimit(make(), limit) if limit else make()

    with _saying_what_cannot_be_made(config, make_env):
        return _in_this_process(limited, config.num_envs)


def _single(config: EnvConfig, make_env: MakeEnv | None) -> MakeEnv:
    """Return a function that makes one environment, with its wrappers and options."""

    def by_id() -> gymnasium.Env:
        try:
            return make_by_id(config.id)
        except ImportError as error:  # registered, but a package that it needs is not there
            raise PalaError(f"'env.id': the environment '{config.id}' cannot be made: {error}") from None

    return with_options(wrapped(make_env or by_id, config.wrappers), config.reset_options)


@contextlib.contextmanager
def _saying_what_cannot_be_made(config: EnvConfig, make_env: MakeEnv | None) -> Iterator[None]:
    try:
        yield
    except gymnasium.error.Error as error:
        what, advice = f"'env.id': the environment '{config.id}'", ""
        if make_env is not None:
            what = "The environment made in Python"
            if isinstance(error, gymnasium.error.UnregisteredEnv):  # of a script's own imports a process knows nothing
                advice = " What registers it has to be imported in the factory, or named in the id: `module:Id-v0`."
        raise PalaError(f"{what} cannot be made: {error}{advice}") from None


def _in_this_process(make: MakeEnv, num_envs: int) -> gymnasium.vector.VectorEnv:
    return gymnasium.vector.SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def make_by_id(env_id: str, **more: Any) -> gymnasium.Env:
    """Make the environment of `id`, `module:id` or `id(key=value, ...)`. Raises PalaError if it is not registered, and
    what it raises itself."""
    name, arguments = named_call(env_id, "'env.id'", "`Id-v0`, `module:Id-v0` or `Id-v0(key=value)`")
    try:
        return gymnasium.make(checked_id(name), **(arguments | more))
    except gymnasium.error.DependencyNotInstalled as error:  # which Gymnasium says of what does not load, too
        cause = error.__cause__
        if isinstance(cause, ImportError) and not isinstance(cause, ModuleNotFoundError):
            raise PalaError(
                f"'env.id' is '{env_id}', whose package is installed, but does not load: {cause}."
            ) from None
        raise


def atari_rom(env_id: str) -> str:
    """Return the ROM of an id, `ALE/SpaceInvaders-v5` -> `space_invaders`, checked against the ROMs that ale-py
    brings."""
    checked_id(env_id)
    rom = str(gymnasium.spec(env_id).kwargs["game"])
    from ale_py import roms

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ale-py warns of a missing ROM; the sentence below says it
            path = roms.get_rom_path(rom)
    except OSError as error:  # missing, or not the game
        why = " ".join(reason(error).split())
        raise PalaError(
            f"The ROM of '{env_id}' ('{rom}') cannot be read: {why}; look at ALE_ROMS_DIR, or reinstall ale-py."
        ) from None
    if path is None:
        raise PalaError(f"The ROM of '{env_id}' ('{rom}') does not come with ale-py; reinstall ale-py.")
    return rom


def checked_id(env_id: str) -> str:
    """Return the id of a registered environment. Imports the module of a `module:id` first, which runs its code. Raises
    PalaError for any other."""
    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module, "'env.id'")
    try:
        if name.startswith("ALE/") or name not in gymnasium.registry:  # perhaps a game under its former name
            import ale_py

            gymnasium.register_envs(ale_py)
        now = _as_now_named(name)  # ale-py has the former names, too, without any preprocessing
        if now != name or (module and name.startswith("ALE/")):
            raise PalaError(f"'env.id': no environment '{env_id}' is registered; did you mean '{now}'?")
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        hint = nearest(name, gymnasium.registry, 0.75)  # ids are alike by their "-v0" alone
        raise PalaError(f"'env.id': no environment '{env_id}' is registered{hint or f' ({error}).'}") from None
    except ImportError as error:
        raise PalaError(f"'env.id' is '{env_id}', but its package cannot be imported: {error}.") from None
    return env_id


def _as_now_named(env_id: str) -> str:
    """Give Atari games under former names, such as `Pong-v5` and `PongNoFrameskip-v4`, today's name; leave others as
    they are."""
    if env_id in gymnasium.registry and not str(gymnasium.registry[env_id].entry_point).startswith("ale_py"):
        return env_id
    game = re.sub(r"(-ram)?((NoFrameskip|Deterministic)?-v\d+)?$", "", env_id.removeprefix("ALE/"))
    return now if (now := f"ALE/{game}-v5") in gymnasium.registry else env_id
