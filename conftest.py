"""Eight virtual devices for all tests, and jax at its strictest about shapes."""

from __future__ import annotations

import os

_COUNT_FLAG = "--xla_force_host_platform_device_count"
# XLA reads its flags once, so this precedes the first import of jax.
if _COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT_FLAG}=8"

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
