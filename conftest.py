"""Eight virtual devices for all tests, and jax at its strictest about shapes."""

from __future__ import annotations

import os
import pathlib

_COUNT_FLAG = "--xla_force_host_platform_device_count"
# XLA reads its flags once, so this precedes the first import of jax.
if _COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT_FLAG}=8"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# The kernel allows a process some 65,000 mappings, and the compiler aborts without one.
_MOST_MAPPINGS = 40_000


@pytest.fixture(autouse=True)
def _few_mappings():
    """Frees compiled programs when they are many: each holds dozens of mappings."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()
