"""Environments in processes of their own (`env.vectorization` "async"): gymnasium's, with their errors told in a
sentence, and ended with the rank however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.vector import AutoresetMode

from pala.system.errors import PalaError
from pala.system.output import log

_PATIENCE_S = 3.0  # with all processes that are to end after a failure
_SAFE_PATH = "PYTHONSAFEPATH"  # environment variable, from Python 3.11 on


class _InProcess(gymnasium.Wrapper):
    """Around an environment in a process of its own. What it raises is shown there, and reaches the rank as a sentence:
    gymnasium's queue drops what cannot be pickled, and the rank would wait for it for ever."""

    def reset(self, **arguments: Any) -> Any:
        return self._shown("reset", lambda: self.env.reset(**arguments))

    def step(self, action: Any) -> Any:
        return self._shown("step", lambda: self.env.step(action))

    def _shown(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PalaError:
            raise
        except BaseException as error:  # sys.exit, too
            log(traceback.format_exc())
            name = type(error).__name__
            raise RuntimeError(f"'{what}' of an environment has raised {name} in its process, as above.") from None


def _check_can_travel(factory: Callable[[], gymnasium.Env]) -> None:
    """Raise PalaError if the factory cannot be sent to a process."""
    try:
        cloudpickle.dumps(factory)
    except Exception as error:  # it is the user's code: anything may happen
        raise PalaError(
            f"'env.vectorization' is 'async', but the environment's factory cannot be sent to a process ({error}): "
            "define it in a module that can be imported, make in it what it needs, or take 'sync'."
        ) from None


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Have Python processes that start inside the block leave the working directory out of their path.

    `multiprocessing` starts them by `python -c`, which puts it first: a module in it, perhaps in a run folder from
    elsewhere, would take the place of Python's own. The rank's path is theirs once they have begun.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        _restore(before)


def _restore(safe_path: str | None) -> None:
    os.environ.pop(_SAFE_PATH, None)
    if safe_path is not None:
        os.environ[_SAFE_PATH] = safe_path


class EnvProcesses(gymnasium.vector.AsyncVectorEnv):
    """Environments in processes of their own, which never outlive this one's wish. Raises PalaError if one cannot be
    made there."""

    def __init__(self, factory: Callable[[], gymnasium.Env], num_envs: int) -> None:
        rank, safe_path = os.getpid(), os.environ.get(_SAFE_PATH)

        def in_worker() -> gymnasium.Env:
            if os.getpid() != rank:  # which deals with signals itself and ends its workers
                _restore(safe_path)  # for programs that the environment starts
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
            return factory() if os.getpid() == rank else _InProcess(factory())

        self.parent_pipes, self.processes = [], []
        try:
            # spawn: a process that has started MPI must not fork. The factory travels with cloudpickle.
            with _safe_path():
                super().__init__([in_worker] * num_envs, context="spawn", autoreset_mode=AutoresetMode.SAME_STEP)
        except (EOFError, ConnectionError):  # of a pipe whose other end has died
            self.end()
            raise PalaError(
                "'env.vectorization' is 'async', and a process that was to make an environment has ended; its own "
                "error stands above. (A script that calls `pala.fit` or `pala.evaluate_policy` does so below "
                '`if __name__ == "__main__":`, for such processes import it.)'
            ) from None
        except BaseException:
            self.end()
            _check_can_travel(factory)
            raise

    def reset(self, **arguments: Any) -> Any:
        with self._telling_of_dead():
            return super().reset(**arguments)

    def step(self, actions: Any) -> Any:
        with self._telling_of_dead():
            return super().step(actions)

    @contextlib.contextmanager
    def _telling_of_dead(self) -> Iterator[None]:
        """Silence gymnasium's logger, and turn a process's death into one error. Errors are reported where they are
        raised or caught; the logger would repeat them, and stumble over a percent sign."""
        before = gymnasium.logger.min_level
        gymnasium.logger.min_level = gymnasium.logger.ERROR + 1
        try:
            yield
        except (EOFError, ConnectionError):
            raise RuntimeError(
                "The process of an environment has ended: it was killed, or something that it calls has crashed."
            ) from None
        finally:
            gymnasium.logger.min_level = before

    def end(self, patience_s: float | None = None) -> int:
        """End processes that are still there, without gymnasium, which would first wait for the steps under way, and
        for as long as an environment takes to close. Returns how many were killed."""
        self.closed = True
        pipes = [pipe for pipe in self.parent_pipes if pipe is not None]  # None: of one that raised
        for pipe in pipes:
            with contextlib.suppress(OSError):  # it has ended
                pipe.send(("close", None))
        begun = [process for process in self.processes if process.pid is not None]
        deadline = time.monotonic() + (_PATIENCE_S if patience_s is None else patience_s)
        try:
            for process in begun:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            late = [process for process in begun if process.is_alive()]
            for process in late:
                process.kill()  # they ignore SIGTERM
                process.join()
            for pipe in pipes:
                pipe.close()
        return len(late)
