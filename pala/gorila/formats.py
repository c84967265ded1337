"""Formats of what actors send to replay, and replay to learners: raw little-endian arrays, never pickle.

Both sides know the layout: a record of arrays, those of wider items first, so that each is aligned if the bytes are.
The bytes are contiguous uint8 arrays. `encode` writes to the front of a buffer and returns that part of it. `decode`
believes nothing: any bytes give a value or a `Refusal`. The value's arrays are views of the bytes: copy what is to
stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import gymnasium
import numpy as np

from pala.exchange.wire import Refusal
from pala.gorila.replay import Batch, Experience, frame_shape
from pala.system.errors import PalaError

ValueT = TypeVar("ValueT", np.ndarray, Experience, Batch)
_Fields = dict[str, tuple[Any, tuple[int, ...]]]  # array -> type of its items, and shape


class _Format(Generic[ValueT]):
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

    def decode(self, data: np.ndarray) -> ValueT | Refusal:
        """Return the value whose bytes these are, if they are a possible one's."""
        if len(data) not in self.sizes:
            return Refusal(f"it has {len(data)} bytes, which is wrong for its kind")
        record = data.view(self._layouts[self.sizes.index(len(data))])
        arrays = {name: record[name][0] for name in record.dtype.names or ()}
        for name, array in arrays.items():
            if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any():
                return Refusal(f"a byte of its '{name}' is neither 0 nor 1")
        value = self._make(**arrays)
        return self._fault(value) or value

    def _fault(self, value: ValueT) -> Refusal | None:
        """Return why no rank can have sent this value, if so."""
        return None


class FramesFormat(_Format[np.ndarray]):
    """The frames [B, *frame] of a reset of `num_envs` environments."""

    def __init__(self, num_envs: int, observation_space: gymnasium.Space, frame_stack: int = 1) -> None:
        frame = frame_shape(observation_space, frame_stack)
        super().__init__(lambda frames: frames, {"frames": (observation_space.dtype, (num_envs, *frame))})


class ExperienceFormat(_Format[Experience]):
    """An `Experience` of `num_envs` environments: a frame longer for each that is truncated."""

    def __init__(
        self, num_envs: int, num_actions: int, observation_space: gymnasium.Space, frame_stack: int = 1
    ) -> None:
        self._num_actions = num_actions
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
        super().__init__(Experience, *(fields | {"final_frames": (dtype, (cut, *frame))} for cut in cuts))

    def _fault(self, value: Experience) -> Refusal | None:
        return _wrong_actions(value.actions, self._num_actions) or _wrong_ends(value)


class BatchFormat(_Format[Batch]):
    """A `Batch` of `minibatch_size` transitions."""

    def __init__(self, minibatch_size: int, num_actions: int, observation_space: gymnasium.Space) -> None:
        self._num_actions = num_actions
        observations = (observation_space.dtype, (minibatch_size, *(observation_space.shape or ())))
        super().__init__(
            Batch,
            {
                "observations": observations,
                "actions": (np.int64, (minibatch_size,)),
                "rewards": (np.float32, (minibatch_size,)),
                "next_observations": observations,
                "terminated": (np.bool_, (minibatch_size,)),
            },
        )

    def _fault(self, value: Batch) -> Refusal | None:
        if not np.isfinite(value.rewards).all():
            return Refusal("a reward is not finite")
        return _wrong_actions(value.actions, self._num_actions)


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


def _wrong_actions(actions: np.ndarray, num_actions: int) -> Refusal | None:
    if actions.min() < 0 or actions.max() >= num_actions:
        return Refusal(f"its actions are {actions.min()} to {actions.max()}, not 0 to {num_actions - 1}")
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
