"""`check_replicas`: compares arrays that should be equal on all devices."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from sparsejax._checks import path_name
from sparsejax.placement._markers import marks_of_leaves

_ASTRAY = (
    "A per-worker value reached a replicated one: look for gradients or metrics that "
    "bypass the exchange, for branches on per-worker values, and for "
    "`check_vma=False`."
)
_OWN = (
    "This state differs per worker, but its sharding says that it is replicated, so a "
    "checkpoint would hold one worker's state for all. Return the state with "
    "`out_axes=0` from `jax.pmap`, and from `jax.shard_map` with `out_specs` of "
    "`sparsejax.state_specs(state)`."
)


def check_replicas(tree: Any, mesh: jax.sharding.Mesh) -> None:
    """Compares all copies of the same part of every array, bit by bit.

    Types do not prove that replicas are equal, and replicas that drift apart only show
    as a slowly worse loss. Call this from time to time, and not in every step: every
    shard is fetched to its host. Processes compare hashes of their copies.

    Args:
      tree: pytree of placed arrays: parameters, optimizer state. Each shard is compared
        with the copies of the same shard.
      mesh: the mesh of the arrays.

    Raises:
      ValueError: if copies differ, with the first such leaf and the devices; or if a
        leaf is not on the devices of `mesh`.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> params = jax.device_put({"w": jnp.ones(3)}, NamedSharding(mesh, P()))
      >>> sparsejax.check_replicas(params, mesh)
    """
    devices = list(mesh.devices.flat)
    number = {device: i for i, device in enumerate(devices)}
    paths = jax.tree_util.tree_leaves_with_path(tree)
    leaves = [
        (path_name(path), _data(leaf), "per_worker" in around)
        for (path, leaf), around in zip(paths, marks_of_leaves(tree), strict=True)
        if isinstance(leaf, jax.Array)
    ]
    digests = np.zeros((len(leaves), len(devices), 2), np.uint32)
    for i, (name, leaf, _) in enumerate(leaves):
        if not leaf.sharding.device_set <= set(devices):
            raise ValueError(
                f"check_replicas: the leaf `{name}` is on devices outside of the mesh. "
                f"Pass the mesh of the leaf, or place the leaf on the mesh first with "
                f"`jax.device_put`."
            )
        for shard in leaf.addressable_shards:
            digests[i, number[shard.device]] = _digest(shard.data)
    if jax.process_count() > 1:
        # Every process filled in the digests of its devices; the others are zero.
        digests = multihost_utils.process_allgather(digests).sum(axis=0)
    for i, (name, leaf, own) in enumerate(leaves):
        first: dict[Any, Any] = {}
        parts = leaf.sharding.devices_indices_map(leaf.shape)
        for device in sorted(parts, key=number.__getitem__):
            part = str(parts[device])
            other = first.setdefault(part, device)
            if (digests[i, number[device]] != digests[i, number[other]]).any():
                raise ValueError(
                    f"check_replicas: the copies of `{name}` on {other} and {device} "
                    f"differ. {_OWN if own else _ASTRAY}"
                )


def _data(leaf: jax.Array) -> jax.Array:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _digest(data: jax.Array) -> np.ndarray:
    content = np.ascontiguousarray(np.asarray(data)).tobytes()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return np.frombuffer(digest, np.uint32)
