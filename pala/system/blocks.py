"""Going over long vectors piece by piece."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

_BLOCK = 1 << 17  # numbers; of each of three vectors so many stay in the cache while some operations go over them


def in_blocks(*vectors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Yield the vectors, equally long and on one device, block by block: a CPU that does several operations on a block
    reads and writes each vector once. On a GPU all is one block."""
    size = max(1, len(vectors[0])) if vectors[0].is_cuda else _BLOCK
    return zip(*(vector.split(size) for vector in vectors), strict=True)
