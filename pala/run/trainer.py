"""Training from start to end on every rank, with the algorithm that the configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pala.a2c.algorithm import A2CTraining
from pala.config import Config
from pala.envs import MakeEnv
from pala.gorila.training import GorilaTraining
from pala.run.session import Result, Training
from pala.system.errors import CollectiveError, EndError
from pala.system.runtime import Interrupt
from pala.transport.agreement import check_agreement
from pala.transport.base import Communicator

__all__ = ["Result", "train"]

_ALGORITHMS: dict[str, type[Training]] = {"a2c": A2CTraining, "gorila": GorilaTraining}


def train(
    comm: Communicator, config: Config, make_env: MakeEnv | None = None, resume: Path | None = None, preset: str = "",
    facts: dict[str, Any] | None = None,
) -> Result:  # fmt: skip
    """Train on all ranks of `comm`. Collective."""
    with Interrupt().installed() as interrupt:
        check_agreement(comm, config)
        training = _ALGORITHMS[config.algorithm](comm, config, make_env, interrupt)
        try:
            training.build(resume)
            training.open_folder(resume, preset or config.env.id.split("/")[-1])
            training.begin(resume)
            training.open_records(facts or {}, resume)
            return training.run()
        except CollectiveError:
            training.abandon()
            raise
        except BaseException as error:
            if comm.is_alone() or isinstance(error, EndError):
                training.record_end("failed")
            raise
        finally:
            if training.lock is not None:
                training.lock.close()
