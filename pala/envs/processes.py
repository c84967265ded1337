"""Environments in processes of their own (`env.vectorization` "async"): one whose process dies or does not answer is
made again in another, and all end with the rank however it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, clear_mpi_env_vars, iterate

from pala.envs.failures import FAILURES, FailedTooOftenError, Failure, error_of_start, failure_of, seed_after
from pala.envs.single import Factory, Renewed
from pala.system.errors import PalaError, reason
from pala.system.launcher import die_with_parent
from pala.system.output import log

_ANSWER_S = 300.0  # what an environment may take to be made, for a reset or for a step
_PATIENCE_S = 3.0  # with all processes that are to end after a failure
_SAFE_PATH = "PYTHONSAFEPATH"  # environment variable, from Python 3.11 on
_starting = threading.Lock()  # the variables of the whole process are other ones meanwhile: one thread at a time


class _LostError(Exception):
    """A process is lost, or has not made its environment."""

    def __init__(self, failure: Failure, has_spoken: bool = True, is_late: bool = False) -> None:
        super().__init__(failure.text)
        self.failure = failure
        self.has_spoken = has_spoken
        self.is_late = is_late


def _packed(factory: Factory) -> bytes:
    """Return the factory as it is sent to a process. Raises PalaError if it cannot be."""
    try:
        return bytes(cloudpickle.dumps(factory))
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


# ---- in the process of an environment --------------------------------------------------------------------------------


def _work(packed: bytes, in_a_row: int, index: int, pipe: Connection, memory: Any, safe_path: str | None) -> None:
    """Make an environment and do what the rank asks for: ("try out", seed), ("reset", seed), ("step", action) or
    ("close", None). An answer is ("is", (what was asked for, failures in a row)), or the name of what went wrong with
    its data."""
    die_with_parent()  # also from within a step that never ends
    _restore(safe_path)  # for programs that the environment starts
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the rank deals with signals, and ends its workers
    with contextlib.suppress(EOFError, ConnectionError):  # the rank has ended
        try:
            env: Renewed = cloudpickle.loads(packed)(in_a_row)
        except BaseException as error:  # it is the user's code: anything may happen
            pipe.send(("failed", failure_of("its factory", error)))
            return
        pipe.send(("is", ((env.observation_space, env.action_space), in_a_row)))
        try:
            _serve(env, pipe, _view(memory, env.observation_space)[index])
        except FailedTooOftenError as error:
            pipe.send(("failed too often", (str(error), error.trace)))
        except PalaError as error:
            pipe.send(("mistake", str(error)))
        except (EOFError, ConnectionError):
            raise
        except BaseException as error:  # the environment's: `Renewed` leaves some to whoever stepped it
            pipe.send(("failed", failure_of("it", error)))
        finally:
            _close(env)


def _serve(env: Renewed, pipe: Connection, observation: np.ndarray) -> None:
    """Answer until the rank says that this is the end; `observation`: the place of this environment's."""
    answer: Any
    while True:
        what, data = pipe.recv()
        if what == "close":
            return
        if what != "step" and data is not None:  # for environments that draw from the whole process's generators
            np.random.seed(data)  # noqa: NPY002 - that very one
            random.seed(data)
        if what == "try out":
            answer = env.try_out(data)
        elif what == "reset":
            observation[:], answer = env.reset(seed=data)
        else:
            last, reward, terminated, truncated, info = env.step(data)
            if terminated or truncated:
                first, of_reset = env.reset()
                info = {"final_obs": last, "final_info": info} | of_reset
                last = first
            observation[:] = last
            answer = float(reward), bool(terminated), bool(truncated), info
        pipe.send(("is", (answer, env.in_a_row)))


def _close(env: gymnasium.Env) -> None:
    try:
        env.close()
    except BaseException as error:  # it is the user's code
        log(f"An environment cannot be closed ({type(error).__name__}: {error}).")


def _view(memory: Any, space: gymnasium.Space) -> np.ndarray:
    """Return the observations [B, *obs] that lie in the shared memory."""
    return np.frombuffer(memory, space.dtype).reshape(-1, *(space.shape or ()))


# ---- in the rank -----------------------------------------------------------------------------------------------------


class EnvProcesses(gymnasium.vector.VectorEnv):
    """Environments in processes of their own, which never outlive this one's wish. Observations are of one Box. Raises
    PalaError if one cannot be made there, and FailedTooOftenError."""

    def __init__(self, factory: Factory, num_envs: int) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        first = factory()
        factory.discard(first)
        self.num_envs = num_envs
        self.metadata = {**first.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = first.observation_space, first.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._factory, self._packed = factory, _packed(factory)
        self._in_a_row = [0] * num_envs  # failures of each environment, as it last said
        self._seeds: list[int | None] = [None] * num_envs
        self._renewals = [0] * num_envs
        # spawn: a process that has started MPI must not fork. The factory travels with cloudpickle.
        self._context = multiprocessing.get_context("spawn")
        space = self.single_observation_space
        num_bytes = num_envs * int(np.prod(space.shape or ())) * np.dtype(space.dtype).itemsize
        self._memory = self._context.RawArray("b", num_bytes)
        self._observations = _view(self._memory, space)
        try:
            for index in range(num_envs):
                self._start(index)
            for index in range(num_envs):
                self._await_made(index)
        except _LostError as lost:
            self.end()
            raise _not_made(lost) from None
        except BaseException:
            self.end()
            raise

    def try_out(self, seed: int) -> np.ndarray:
        """Try out the first environment, as `Renewed.try_out`."""
        self._ask(0, ("try out", seed))
        try:
            return np.asarray(self._answer(0))
        except _LostError as lost:
            raise error_of_start(lost.failure, self._factory.name) from None

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin episodes; `seed`: one an environment. Returns observations [B, *obs] and infos."""
        self._seeds = list(seed) if seed is not None else [None] * self.num_envs
        for index in range(self.num_envs):
            self._ask(index, ("reset", self._seeds[index]))
        answers, lost = self._answers()
        answers |= self._renewed(lost)
        infos: dict[str, Any] = {}
        for index in range(self.num_envs):
            infos = self._add_info(infos, answers[index], index)
        return self._observations.copy(), infos

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all environments. One whose process is lost gives what `Renewed` gives for a failure."""
        for index, action in enumerate(iterate(self.action_space, actions)):
            self._ask(index, ("step", action))
        answers, lost = self._answers()
        if lost:
            answers |= {index: (0.0, False, False, info) for index, info in self._renewed(lost).items()}
        infos: dict[str, Any] = {}
        rewards = np.empty(self.num_envs, np.float64)
        ends = np.empty((2, self.num_envs), np.bool_)
        for index in range(self.num_envs):
            rewards[index], terminated, truncated, info = answers[index]
            ends[:, index] = terminated, truncated
            if info:
                infos = self._add_info(infos, info, index)
        return self._observations.copy(), rewards, ends[0], ends[1], infos

    def _start(self, index: int) -> None:
        """Start the process of one environment, in place of the one before. Raises PalaError if the system does not
        allow it."""
        try:
            here, there = self._context.Pipe()
            _limit_waits(here, _ANSWER_S)
            with _starting:
                safe_path = os.environ.get(_SAFE_PATH)
                arguments = (self._packed, self._in_a_row[index], index, there, self._memory, safe_path)
                name = f"Worker<EnvProcesses>-{index}"
                process = self._context.Process(target=_work, args=arguments, name=name, daemon=True)
                if index < len(self.processes):
                    self.processes[index], self.pipes[index] = process, here
                else:
                    self.processes.append(process)
                    self.pipes.append(here)
                with _safe_path(), clear_mpi_env_vars():
                    process.start()
        except OSError as error:
            raise PalaError(
                f"'env.vectorization' is 'async', but the process of environment {index + 1} of {self.num_envs} cannot "
                f"be started: {reason(error)}. Lower 'env.num_envs', raise the limit (`ulimit -a`), or take 'sync'."
            ) from None
        there.close()

    def _ask(self, index: int, question: tuple[str, Any]) -> None:
        with contextlib.suppress(OSError):  # that its process is lost shows where its answer is awaited
            self.pipes[index].send(question)

    def _answer(self, index: int, at_once: bool = False) -> Any:
        """Return what a process has answered; `at_once`: it has had the time. Raises _LostError, and what went wrong
        there."""
        try:
            if at_once and not self.pipes[index].poll():
                raise BlockingIOError
            kind, data = self.pipes[index].recv()
        except BlockingIOError:  # the socket's limit
            raise _LostError(Failure(f"it has not answered for {_ANSWER_S:g} s"), is_late=True) from None
        except (EOFError, OSError):  # of a pipe whose other end has died
            process = self.processes[index]
            process.join(_PATIENCE_S)
            code = process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"status {code}"
            raise _LostError(Failure(f"its process has ended ({how})"), has_spoken=False) from None
        if kind == "failed too often":
            raise FailedTooOftenError(*data)
        if kind == "mistake":
            raise PalaError(data)
        if kind == "failed":
            raise _LostError(data)
        answer, self._in_a_row[index] = data
        return answer

    def _answers(self) -> tuple[dict[int, Any], dict[int, Failure]]:
        """Return what the processes answer, and the failures of those that are lost."""
        answers: dict[int, Any] = {}
        lost: dict[int, Failure] = {}
        is_late = False
        for index in range(self.num_envs):
            try:
                answers[index] = self._answer(index, at_once=is_late)
            except _LostError as error:
                lost[index] = error.failure
                is_late = is_late or error.is_late
        return answers, lost

    def _await_made(self, index: int) -> None:
        spaces = self._answer(index)
        ours = (self.single_observation_space, self.single_action_space)
        if spaces != ours:
            raise PalaError(
                f"Environments must have the same spaces, but the first one made has {ours}, and one in a process of "
                f"its own {spaces}."
            )

    def _renewed(self, lost: dict[int, Failure]) -> dict[int, dict[str, Any]]:
        """Make the lost environments again and begin episodes; return their infos, with their failures."""
        failures: dict[int, list[Failure]] = {index: [] for index in lost}
        infos: dict[int, dict[str, Any]] = {}
        restarts = self._factory.restarts
        while lost:
            for index, failure in lost.items():
                failures[index].append(failure)
                self._in_a_row[index] += 1
                self._renewals[index] += 1
                if self._in_a_row[index] > restarts:
                    raise FailedTooOftenError.after(failure, self._in_a_row[index], self._factory.name, restarts)
                self.processes[index].kill()  # they ignore SIGTERM
                self.processes[index].join()
                self.pipes[index].close()
                self._start(index)
            lost_again: dict[int, Failure] = {}
            for index in lost:
                try:
                    self._await_made(index)
                    self._ask(index, ("reset", seed_after(self._seeds[index], self._renewals[index])))
                    info = self._answer(index)
                    infos[index] = info | {FAILURES: failures[index] + info.get(FAILURES, [])}
                except _LostError as error:
                    lost_again[index] = error.failure
            lost = lost_again
        return infos

    def close_extras(self, **arguments: Any) -> None:
        """End the processes."""
        self.end()

    def end(self, patience_s: float | None = None) -> int:
        """End processes that are still there, and wait for no step or closing that takes longer. Returns how many were
        killed."""
        self.closed = True
        for pipe in self.pipes:
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
            for pipe in self.pipes:
                pipe.close()
        return len(late)


def _limit_waits(pipe: Connection, seconds: float) -> None:
    """Let `recv` end with BlockingIOError after `seconds` without a byte. A limit of the socket costs a step nothing;
    `poll` before each answer would."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        whole = int(seconds)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6)))


def _not_made(lost: _LostError) -> PalaError:
    begin = "'env.vectorization' is 'async', and"
    if lost.has_spoken:
        if lost.failure.trace:
            log(lost.failure.trace)
        return PalaError(f"{begin} an environment cannot be made in a process of its own: {lost.failure.text}.")
    return PalaError(
        f"{begin} a process that was to make an environment has ended; its own error stands above. (A script that "
        'calls `pala.fit` or `pala.evaluate_policy` does so below `if __name__ == "__main__":`, for such processes '
        "import it.)"
    )
