"""Settings of Hypothesis for hostile bytes, and damages to them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TIMES = int(os.environ.get("PALA_FUZZ_TIMES", "0"))


def fuzz(examples: int) -> settings:
    return settings(
        max_examples=examples * (TIMES or 1), derandomize=not TIMES, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def damaged(data: bytes, damage: list[tuple[str, float, bytes]]) -> bytes:
    """Apply damages, each at a place that is a fraction of the length."""
    for how, place, what in damage:
        at = int(place * len(data))
        if how == "write":
            data = data[:at] + what + data[at + len(what) :]
        elif how == "insert":
            data = data[:at] + what + data[at:]
        elif how == "cut":
            data = data[:at]
        elif data and how == "flip":
            data = data[:at] + bytes([data[at] ^ (1 << len(what) % 8)]) + data[at + 1 :]
    return data


places = st.floats(0, 1, exclude_max=True)

damages = st.lists(
    st.tuples(st.sampled_from(["write", "insert", "cut", "flip", "flip"]), places, st.binary(max_size=12)),
    min_size=1, max_size=3,
)  # fmt: skip
