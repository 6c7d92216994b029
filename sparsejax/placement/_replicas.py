"""`check_replicas`: are arrays that should be equal on all devices really equal?"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from sparsejax._checks import path_name
from sparsejax.placement._markers import marks_of_leaves

_ASTRAY = (
    "Something per worker reached a replicated value: look for gradients or metrics "
    "that bypass the exchange, for branches on per-worker values, and for "
    "`check_vma=False`."
)
_OWN = (
    "It is state that differs per worker, and its sharding says that it is replicated, "
    "so that a checkpoint holds one worker's for all. Return the state with "
    "`out_axes=0` from `jax.pmap`, and from `jax.shard_map` with `out_specs` of "
    "`sparsejax.state_specs(state)`."
)


def check_replicas(tree: Any, mesh: jax.sharding.Mesh) -> None:
    """Compares all copies of the same part of every array, bit by bit.

    Types do not prove that replicas are equal, and a device that went astray shows
    nothing but a slowly worse loss. Call it now and then: it fetches every shard to the
    host. Copies held by other processes are compared through their hashes.

    Args:
      tree: pytree of placed arrays: parameters, optimizer state. Shards are compared
        with copies of the same shard, where there are any.
      mesh: the mesh they were placed on.

    Raises:
      ValueError: naming the first leaf that differs, and the devices; or a leaf that
        does not live on the devices of `mesh`.

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
                f"check_replicas: the leaf `{name}` lives on devices outside of the "
                f"mesh. Pass the mesh that it was placed on, or place it first with "
                f"`jax.device_put`."
            )
        for shard in leaf.addressable_shards:
            digests[i, number[shard.device]] = _digest(shard.data)
    if jax.process_count() > 1:
        # Every process filled in its own devices and left the others at zero.
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
