"""Going over long vectors piece by piece."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

_BLOCK = 1 << 17  # numbers; so long a part of each of three vectors stays in the cache during some operations


def in_blocks(*vectors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Yield vectors of equal length on one device block by block: a CPU that does several operations on a block reads
    and writes each vector once. On a GPU the whole vectors are one block."""
    size = max(1, len(vectors[0])) if vectors[0].is_cuda else _BLOCK
    return zip(*(vector.split(size) for vector in vectors), strict=True)
