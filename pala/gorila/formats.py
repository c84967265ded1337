"""What actors send to replay, and replay to learners, as bytes and back: raw little-endian arrays, never pickle.

Both sides know the layout: arrays one behind the other, those of wider items first, so that each is aligned if the
bytes are. The bytes are contiguous uint8 arrays. `encode` writes to the front of a buffer and returns that part of it.
`decode` believes nothing: any bytes give a value or a `Refusal`. The value's arrays are views of the bytes: copy what
is to stay.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from pala.exchange.wire import Refusal
from pala.gorila.replay import Batch, Experience, frame_shape
from pala.system.errors import PalaError

_Fields = dict[str, tuple[Any, tuple[int, ...]]]  # array -> type of its items, and shape


class _Format:
    """Named arrays in a layout that follows from the size of the message. `sizes`: bytes that one may have."""

    def __init__(self, *variants: _Fields) -> None:
        """`variants`: the arrays that a message may have, each time by as many bytes more."""
        self._layouts = [_layout(fields) for fields in variants]
        sizes = [layout.itemsize for layout in self._layouts]
        self.sizes = range(sizes[0], sizes[-1] + 1, sizes[1] - sizes[0] if len(sizes) > 1 else 1)

    def _write(self, arrays: dict[str, np.ndarray], into: np.ndarray, variant: int = 0) -> np.ndarray:
        layout = self._layouts[variant]
        data = into[: layout.itemsize]
        for name, array in arrays.items():
            data.view(layout)[name][0] = array
        return data

    def _read(self, data: np.ndarray) -> dict[str, np.ndarray] | Refusal:
        """Views of the arrays; every bool is 0 or 1."""
        if len(data) not in self.sizes:
            return Refusal(f"it has {len(data)} bytes, which is wrong for its kind")
        layout = self._layouts[self.sizes.index(len(data))]
        arrays = {name: data.view(layout)[name][0] for name in layout.names or ()}
        for name, array in arrays.items():
            if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any():
                return Refusal(f"a byte of its '{name}' is neither 0 nor 1")
        return arrays


class FramesFormat(_Format):
    """The frames [B, *frame] of a reset of `num_envs` environments."""

    def __init__(self, num_envs: int, observation_space: gymnasium.Space, frame_stack: int = 1) -> None:
        frame = frame_shape(observation_space, frame_stack)
        super().__init__({"frames": (observation_space.dtype, (num_envs, *frame))})

    def encode(self, frames: np.ndarray, into: np.ndarray) -> np.ndarray:
        return self._write({"frames": frames}, into)

    def decode(self, data: np.ndarray) -> np.ndarray | Refusal:
        arrays = self._read(data)
        return arrays if isinstance(arrays, Refusal) else arrays["frames"]


class ExperienceFormat(_Format):
    """An `Experience` of `num_envs` environments: a frame longer for each that is truncated."""

    def __init__(
        self, num_envs: int, num_actions: int, observation_space: gymnasium.Space, frame_stack: int = 1
    ) -> None:
        self._num_actions = num_actions
        dtype, frame = observation_space.dtype, frame_shape(observation_space, frame_stack)
        fields: _Fields = {
            "actions": (np.int64, (num_envs,)), "rewards": (np.float32, (num_envs,)),
            "terminated": (np.bool_, (num_envs,)), "truncated": (np.bool_, (num_envs,)),
            "first": (np.bool_, (num_envs,)), "frames": (dtype, (num_envs, *frame)),
        }  # fmt: skip
        super().__init__(*(fields | {"final_frames": (dtype, (count, *frame))} for count in range(num_envs + 1)))

    def encode(self, experience: Experience, into: np.ndarray) -> np.ndarray:
        return self._write(experience._asdict(), into, variant=len(experience.final_frames))

    def decode(self, data: np.ndarray) -> Experience | Refusal:
        arrays = self._read(data)
        if isinstance(arrays, Refusal):
            return arrays
        experience = Experience(**arrays)
        return _wrong_actions(experience, self._num_actions) or _wrong_ends(experience) or experience


class BatchFormat(_Format):
    """A `Batch` of `minibatch_size` transitions."""

    def __init__(self, minibatch_size: int, num_actions: int, observation_space: gymnasium.Space) -> None:
        self._num_actions = num_actions
        observations = (observation_space.dtype, (minibatch_size, *(observation_space.shape or ())))
        super().__init__({
            "observations": observations, "actions": (np.int64, (minibatch_size,)),
            "rewards": (np.float32, (minibatch_size,)), "next_observations": observations,
            "terminated": (np.bool_, (minibatch_size,)),
        })  # fmt: skip

    def encode(self, batch: Batch, into: np.ndarray) -> np.ndarray:
        return self._write(batch._asdict(), into)

    def decode(self, data: np.ndarray) -> Batch | Refusal:
        arrays = self._read(data)
        if isinstance(arrays, Refusal):
            return arrays
        batch = Batch(**arrays)
        if not np.isfinite(batch.rewards).all():
            return Refusal("a reward is not finite")
        return _wrong_actions(batch, self._num_actions) or batch


def _layout(fields: _Fields) -> np.dtype:
    """The arrays as fields of one record. Raises PalaError if that is longer than numpy's records can be."""
    little = [(name, np.dtype(dtype).newbyteorder("<"), shape) for name, (dtype, shape) in fields.items()]
    try:
        return np.dtype(sorted(little, key=lambda field: -field[1].itemsize))
    except ValueError:
        raise PalaError(
            "A step of all environments, or a minibatch, of more than 2 GiB cannot be sent; lower 'env.num_envs' or "
            "'gorila.minibatch_size'."
        ) from None


def _wrong_actions(of: Experience | Batch, num_actions: int) -> Refusal | None:
    if of.actions.min() < 0 or of.actions.max() >= num_actions:
        return Refusal(f"its actions are {of.actions.min()} to {of.actions.max()}, not 0 to {num_actions - 1}")
    return None


def _wrong_ends(experience: Experience) -> Refusal | None:
    truncated = experience.truncated
    if (cut := np.count_nonzero(truncated)) != len(experience.final_frames):
        return Refusal(f"its truncated episodes are {cut}, its final frames {len(experience.final_frames)}")
    if (truncated & experience.terminated).any():
        return Refusal("an episode is both terminated and truncated")
    if (truncated & ~experience.first).any():
        return Refusal("no new episode follows a truncated one")
    if (experience.first & ~truncated & ~experience.terminated).any():
        return Refusal("a new episode follows one that has not ended")
    return None
