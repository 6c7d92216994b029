"""How tests compile: fast, since programs are many and run only briefly.

This module is imported before jax, which reads the flags once.
"""

from __future__ import annotations

import importlib.metadata
import os

from tests.pages import ROOT


def _emitters() -> dict[str, str]:
    """Selects XLA's older emitters, which write kernels in a third of the time.

    The newer ones run MLIR for each kernel. The older ones contract products and sums
    into instructions that round once, so that steps written in two ways differ: AVX has
    no such instructions. Releases after 0.10 lack the first flag, and an unknown flag
    ends the process. Delete this when jax 0.10 goes.
    """
    major, minor = importlib.metadata.version("jaxlib").split(".")[:2]
    if (int(major), int(minor)) > (0, 10):
        return {}
    return {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_max_isa": "AVX"}


# Options for a program whose instructions a test reads: the older emitters write a
# scatter as a loop.
NEWER_EMITTERS = {"xla_cpu_use_fusion_emitters": True} if _emitters() else {}


def flags(devices: int | None = 8, given: str = "") -> str:
    """The value of `XLA_FLAGS`.

    XLA's passes over a whole program stay the same, and so do its collectives.

    Args:
      devices: the number of virtual devices; None leaves the number to the program.
      given: flags that take precedence.
    """
    ours = {
        "xla_backend_optimization_level": "0",
        # One module for all kernels of a program: with jax 0.10 a fifth less work.
        "xla_cpu_parallel_codegen_split_count": "1",
        **_emitters(),
    }
    if devices is not None:
        ours["xla_force_host_platform_device_count"] = str(devices)
    missing = [f"--{name}={value}" for name, value in ours.items() if name not in given]
    return " ".join([given, *missing]).strip()


def kept_programs() -> dict[str, str]:
    """The variables with which jax keeps compiled programs, in `.jax_cache`.

    The processes of one run compile many of the same programs, and the next run
    compiles nearly all of them again.
    """
    return {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


def environment(devices: int | None = 8) -> dict[str, str]:
    """The variables of a program that a test starts."""
    path = {"PYTHONPATH": str(ROOT)}
    return os.environ | path | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(devices)}
