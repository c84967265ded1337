"""Random streams: one seed for each (seed, rank, purpose), so that no two streams are alike."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_TORCH = threading.RLock()  # its generator is one for all threads, and ranks may be threads


def stream(seed: int, rank: int, purpose: str) -> np.random.Generator:
    """Return a numpy generator for each (seed, rank, purpose). Equal arguments give equal streams."""
    return np.random.default_rng([seed, rank, zlib.crc32(purpose.encode())])


def derive(seed: int, rank: int, purpose: str, count: int = 1) -> np.ndarray:
    """Return `count` seeds, int32 in [0, 2**31), for libraries that take a number."""
    return stream(seed, rank, purpose).integers(0, 2**31 - 1, size=count, dtype=np.int64).astype(np.int32)


def seed_process(seed: int, rank: int, purpose: str) -> None:
    """Seed the generators of the whole process that an environment of the user's may draw from: NumPy's, `random`'s."""
    number = int(derive(seed, rank, purpose)[0])
    np.random.seed(number)  # noqa: NPY002 - that very one
    random.seed(number)


@contextmanager
def torch_weights(seed: int) -> Iterator[None]:
    """Seed torch's global generator for the run's first weights inside the block; new networks there are float32.
    After the block the generator continues as before."""
    import torch

    with _TORCH:
        before, dtype = torch.get_rng_state(), torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # an environment's module may have made it another
        torch.default_generator.manual_seed(int(derive(seed, 0, "weights")[0]))
        try:
            yield
        finally:
            torch.set_rng_state(before)
            torch.set_default_dtype(dtype)
