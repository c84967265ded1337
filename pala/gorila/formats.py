"""Formats of what actors send to replay, and replay to learners: raw little-endian arrays, never pickle.

Both sides know the layout: a record of arrays, those of wider items first, so that each is aligned if the bytes are.
The bytes are contiguous uint8 arrays, whose number `pala.exchange.wire` has checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import gymnasium
import numpy as np

from pala.gorila.replay import Batch, Experience, frame_shape
from pala.system.errors import PalaError

ValueT = TypeVar("ValueT", np.ndarray, Experience, Batch)
_Fields = dict[str, tuple[Any, tuple[int, ...]]]  # array -> type of its items, and shape


class ArraysFormat(Generic[ValueT]):
    """A value's arrays in a layout that follows from the size of the message. `sizes`: bytes that one may have."""

    def __init__(self, make: Callable[..., ValueT], *variants: _Fields) -> None:
        """Take what makes a value of its arrays, and the arrays that a message may have, each time by as many bytes
        more."""
        self._make: Callable[..., ValueT] = make
        self._layouts = [_layout(fields) for fields in variants]
        sizes = [layout.itemsize for layout in self._layouts]
        self.sizes = range(sizes[0], sizes[-1] + 1, sizes[1] - sizes[0] if len(sizes) > 1 else 1)

    def encode(self, value: ValueT, into: np.ndarray) -> np.ndarray:
        """Write the value to the front of `into`, and return that part."""
        arrays: dict[str, np.ndarray] = {"frames": value} if isinstance(value, np.ndarray) else value._asdict()
        layout = self._layouts[len(arrays.get("final_frames", ()))]
        data = into[: layout.itemsize]
        record = data.view(layout)
        for name, array in arrays.items():
            record[name][0] = array
        return data

    def decode(self, data: np.ndarray) -> ValueT:
        """Return the value whose bytes these are. Its arrays are views of the bytes: copy what is to stay."""
        record = data.view(self._layouts[self.sizes.index(len(data))])
        return self._make(**{name: record[name][0] for name in record.dtype.names or ()})


def frames_format(num_envs: int, observation_space: gymnasium.Space, frame_stack: int) -> ArraysFormat[np.ndarray]:
    """Return the format of the frames [B, *frame] of a reset of `num_envs` environments."""
    frame = frame_shape(observation_space, frame_stack)
    return ArraysFormat(lambda frames: frames, {"frames": (observation_space.dtype, (num_envs, *frame))})


def experience_format(num_envs: int, observation_space: gymnasium.Space, frame_stack: int) -> ArraysFormat[Experience]:
    """Return the format of an `Experience` of `num_envs` environments: a frame longer for each that is truncated."""
    dtype, frame = observation_space.dtype, frame_shape(observation_space, frame_stack)
    fields: _Fields = {
        "actions": (np.int64, (num_envs,)),
        "rewards": (np.float32, (num_envs,)),
        "terminated": (np.bool_, (num_envs,)),
        "truncated": (np.bool_, (num_envs,)),
        "first": (np.bool_, (num_envs,)),
        "frames": (dtype, (num_envs, *frame)),
    }
    cuts = range(num_envs + 1)
    return ArraysFormat(Experience, *(fields | {"final_frames": (dtype, (cut, *frame))} for cut in cuts))


def batch_format(minibatch_size: int, observation_space: gymnasium.Space) -> ArraysFormat[Batch]:
    """Return the format of a `Batch` of `minibatch_size` transitions."""
    observations = (observation_space.dtype, (minibatch_size, *(observation_space.shape or ())))
    return ArraysFormat(
        Batch,
        {
            "observations": observations,
            "actions": (np.int64, (minibatch_size,)),
            "rewards": (np.float32, (minibatch_size,)),
            "next_observations": observations,
            "terminated": (np.bool_, (minibatch_size,)),
        },
    )


def _layout(fields: _Fields) -> np.dtype:
    """Return the arrays as fields of one record. Raises PalaError if that is longer than numpy's records can be."""
    little = [(name, np.dtype(dtype).newbyteorder("<"), shape) for name, (dtype, shape) in fields.items()]
    try:
        return np.dtype(sorted(little, key=lambda field: -field[1].itemsize))
    except ValueError:
        raise PalaError(
            "A step of all environments, or a minibatch, of more than 2 GiB cannot be sent; lower 'env.num_envs' or "
            "'gorila.minibatch_size'."
        ) from None
