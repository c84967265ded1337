"""Conversion of observations for the network: images to channels, height, width; all else to a vector.

| space of the observations | the network gets |
|---|---|
| Box with three dimensions | an image, turned to channels first (`image_layout`); if a side is under 7, a vector |
| Box of two dimensions, uint8 or bool | an image of one channel; if a side is under 7, a vector |
| Box of one dimension, numbers | the vector as it is |
| other Boxes of at most two dimensions | its numbers one behind the other |
| Discrete, MultiDiscrete, MultiBinary | Gymnasium's own flattening: one-hot vectors and numbers |
| Dict, Tuple | each part as if it were alone: vectors joined to one, and images beside it (`Joined`) |

docs/spaces.md is this table for users, and names what is refused. An image keeps its bytes; the network scales it
by the bounds of the space (`image_scale`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from pala.system.errors import PalaError

Layout = Literal["auto", "channels_first", "channels_last"]
LEAST_SIDE = 7  # pixels: three convolutions of 3x3 leave one
_MOST_CHANNELS = 32  # that `auto` believes of an image that is not square
_FLAT = (Box, Discrete, MultiBinary, MultiDiscrete)
_LARGEST = float(np.finfo(np.float32).max)
_Path = tuple[Any, ...]  # keys of a Dict and numbers of a Tuple, from the outside


@dataclass(frozen=True)
class Inputs:
    """A conversion from observations of one environment to what the network gets."""

    original: gymnasium.Space
    space: Box  # [C, H, W] or [N]
    _transform: Callable[[Any], np.ndarray] | None = None

    @property
    def is_identity(self) -> bool:
        """Whether observations are taken as they are."""
        return self._transform is None

    def encode(self, observation: Any) -> np.ndarray:
        """Return what the network gets, an element of `space`, for one observation as the environment returns it."""
        return np.asarray(observation) if self._transform is None else self._transform(observation)


class Joined(Box):
    """Observations of several parts as rows of float32: first the numbers that are no pixels, then each image, [C, H,
    W], scaled by its bounds."""

    def __init__(self, vectors: Sequence[Box], images: Sequence[Box]) -> None:
        """`images`: as the network would get each alone."""
        parts = [*vectors, *(_scaled_row(image).space for image in images)]
        low = np.concatenate([part.low for part in parts], dtype=np.float32)
        high = np.concatenate([part.high for part in parts], dtype=np.float32)
        super().__init__(low, high, dtype=np.float32)
        self.images = tuple(images)

    def split(self, rows: Any) -> tuple[Any, list[Any]]:
        """Return the vectors [B, N] and each image [B, C, H, W] of a batch of rows, an array or a tensor."""
        begin = vector_size(self)
        vectors, images = rows[:, :begin], []
        for image in self.images:
            end = begin + math.prod(image.shape)
            images.append(rows[:, begin:end].reshape(-1, *image.shape))
            begin = end
        return vectors, images


def inputs_of(space: gymnasium.Space, layout: Layout = "auto") -> Inputs:
    """Return how observations of this space reach the network. `layout`: order of an image's axes. Raises PalaError for
    other spaces."""
    if not all(isinstance(part, _FLAT) for _, part in _parts_of(space)):
        raise PalaError(
            f"Observations of {space} cannot be taken: what PALA knows are Box, Discrete, MultiDiscrete and "
            "MultiBinary, and Dict and Tuple of these; wrap the environment."
        )
    parts = [(path, part) for path, part in _parts_of(space) if gymnasium.spaces.flatdim(part)]
    if not parts:
        raise PalaError(f"Observations of {space} are empty; a network needs at least one number.")
    each = [(path, _inputs_of_part(part, layout, path)) for path, part in parts]
    return _joined(space, each) if isinstance(space, (Dict, Tuple)) else each[0][1]


def vector_size(space: gymnasium.Space) -> int:
    """Return how many numbers of an observation, as the network gets it, are no pixels of an image."""
    shape = space.shape or ()
    if isinstance(space, Joined):
        return math.prod(shape) - sum(math.prod(image.shape) for image in space.images)
    return 0 if len(shape) == 3 else math.prod(shape)


def has_images(space: gymnasium.Space) -> bool:
    """Return whether an observation, as the network gets it, is an image or holds some."""
    return len(space.shape or ()) == 3 or (isinstance(space, Joined) and bool(space.images))


def _parts_of(space: gymnasium.Space, path: _Path = ()) -> Iterator[tuple[_Path, gymnasium.Space]]:
    """Yield what a space consists of, in its order, and the keys that lead there."""
    if not isinstance(space, (Dict, Tuple)):
        yield path, space
        return
    for key, part in space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces):
        yield from _parts_of(part, (*path, key))


def _inputs_of_part(space: gymnasium.Space, layout: Layout, path: _Path) -> Inputs:
    """Return how observations of a space without parts reach the network; `path`: keys that lead to them."""
    if isinstance(space, Box):
        dimensions = len(space.shape)
        if dimensions == 3 or (dimensions == 2 and space.dtype in (np.uint8, np.bool_)):
            return _image(space, layout)
        if dimensions == 1 and space.dtype != np.bool_:
            return Inputs(space, space)
        if dimensions > 3:
            keys = "".join(f"[{key!r}]" for key in path)
            raise PalaError(
                f"Observations{keys} have {dimensions} dimensions {space.shape}; wrap the environment so that stacked "
                "frames become channels of one image of three dimensions."
            )
    return Inputs(space, _vector(gymnasium.spaces.flatten_space(space)), partial(_flattened, space))


def _joined(space: gymnasium.Space, parts: Sequence[tuple[_Path, Inputs]]) -> Inputs:
    """Return the conversion of a Dict or Tuple to one row."""
    vectors = [(path, inputs) for path, inputs in parts if len(inputs.space.shape) == 1]
    images = [(path, inputs) for path, inputs in parts if len(inputs.space.shape) == 3]
    conversions: list[tuple[_Path, tuple[Inputs, ...]]] = [(path, (inputs,)) for path, inputs in vectors]
    conversions += [(path, (inputs, _scaled_row(inputs.space))) for path, inputs in images]
    joined = Joined([inputs.space for _, inputs in vectors], [inputs.space for _, inputs in images])
    return Inputs(space, joined, partial(_row, conversions=conversions))


def _row(observation: Any, conversions: Sequence[tuple[_Path, Sequence[Inputs]]]) -> np.ndarray:
    """Return the parts of an observation one behind the other; each goes through its conversions in turn."""
    row = []
    for path, steps in conversions:
        part = observation
        for key in path:
            part = part[key]
        for inputs in steps:
            part = inputs.encode(part)
        row.append(part)
    return np.concatenate(row, dtype=np.float32)


def image_scale(space: Box) -> tuple[float, float]:
    """Return (low, factor): a pixel x of an image of this space becomes (x - low) * factor, from 0 to 1; without finite
    bounds it stays as it is."""
    low, high = float(space.low.min()), float(space.high.max())
    if not (is_bounded(space) and high > low):
        return 0.0, 1.0
    return low, 1 / (high - low)


def background_of(observation: np.ndarray, space: Box) -> float:
    """Return the median pixel of an observation, scaled as `image_scale` says; 0 without images of bounded pixels. An
    image may have fewer channels than its `space`."""
    pixels, low, factor = [], 0.0, 1.0
    if isinstance(space, Joined):
        parts = zip(space.split(observation[None])[1], space.images, strict=True)
        pixels = [image.reshape(-1) for image, of in parts if is_bounded(of)]
    elif len(space.shape) == 3 and is_bounded(space):
        pixels = [observation.reshape(-1)]
        low, factor = image_scale(space)
    if not pixels:
        return 0.0
    median = np.percentile(np.concatenate(pixels), 50, method="lower")  # one of the pixels
    return min(max(0.0, float(median - low) * factor), 1.0)


def is_bounded(space: Box) -> bool:
    """Return whether the bounds say anything. Some environments write the largest number of the dtype where they have
    none; of bytes and of 16-bit pixels it is taken for a bound."""
    most, dtype = _LARGEST, np.dtype(space.dtype)
    if dtype.kind == "f":
        most = min(most, float(np.finfo(dtype).max))  # type: ignore[type-var]
    elif dtype.kind in "iu" and dtype.itemsize >= 4:
        most = float(np.iinfo(dtype).max)  # type: ignore[type-var]
    return space.is_bounded() and max(-float(space.low.min()), float(space.high.max())) < most


def channel_axis(shape: tuple[int, ...], layout: Layout = "auto") -> int:
    """Return which axis, 0 or 2, of a three-dimensional image has its channels.

    `auto`: if two neighbouring axes are equal, they are height and width; of a cube the first two. Else the shorter of
    first and last, if at most 32. Raises PalaError where that does not tell.
    """
    if layout != "auto":
        return 0 if layout == "channels_first" else 2
    first, middle, last = shape
    if first == middle:
        return 2
    if middle == last:
        return 0
    if first != last and min(first, last) <= _MOST_CHANNELS:
        return 0 if first < last else 2
    raise PalaError(
        f"Image observations {shape} do not tell which axis has the channels; set 'env.image_layout' to "
        "'channels_first' or 'channels_last'."
    )


def _image(space: Box, layout: Layout) -> Inputs:
    axis = channel_axis(space.shape, layout) if len(space.shape) == 3 else None
    low, high = (_channels_first(bound, axis) for bound in (space.low, space.high))
    if min(low.shape[1:]) < LEAST_SIDE:
        return _scaled_row(space)
    dtype: Any = np.uint8 if space.dtype in (np.uint8, np.bool_) else np.float32
    if not is_bounded(space):
        low, high = np.full(low.shape, -np.inf), np.full(low.shape, np.inf)
    wanted = Box(low.astype(dtype), high.astype(dtype), low.shape, dtype)
    if axis == 0 and space.dtype == dtype:
        return Inputs(space, wanted)
    return Inputs(space, wanted, partial(_as_image, axis=axis, dtype=dtype))


def _scaled_row(space: Box) -> Inputs:
    """Return the conversion of an image to a vector, scaled by its bounds."""
    low, factor = image_scale(space)
    size = int(np.prod(space.shape))
    wanted = Box(0.0, 1.0, (size,), np.float32) if is_bounded(space) else Box(-np.inf, np.inf, (size,), np.float32)
    return Inputs(space, wanted, partial(_scaled, low=low, factor=factor))


def _as_image(observation: Any, axis: int | None, dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(_channels_first(np.asarray(observation), axis), dtype)


def _channels_first(image: np.ndarray, axis: int | None) -> np.ndarray:
    """Move the channels to the front. `axis`: the axis of the channels; None: the image has none."""
    return image[None] if axis is None else np.moveaxis(image, axis, 0)


def _scaled(observation: Any, low: float, factor: float) -> np.ndarray:
    return (np.asarray(observation, np.float32).reshape(-1) - np.float32(low)) * np.float32(factor)


def _flattened(space: gymnasium.Space, observation: Any) -> np.ndarray:
    return np.asarray(gymnasium.spaces.flatten(space, observation), np.float32)


def _vector(flat: gymnasium.Space) -> Box:
    assert isinstance(flat, Box)
    return Box(flat.low.astype(np.float32), flat.high.astype(np.float32), flat.shape, np.float32)
