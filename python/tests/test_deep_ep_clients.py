"""Frameworks that call deep_ep, unchanged, on winnow.compat.deep_ep and CPU tensors."""

import importlib.util

import deep_ep_megatron as megatron
import deep_ep_torchtitan as torchtitan
import pytest
from deep_ep_ranks import Pool
from torch._library import opaque_object


def _needs(name):
    return pytest.mark.skipif(
        importlib.util.find_spec(name) is None,
        reason=f"{name} is not installed: pyproject.toml pins it among `clients`",
    )


@_needs("megatron")
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("body", [megatron.deepep, megatron.hybridep], ids=["deepep", "hybridep"])
def test_megatron(deep_ep_pool, world, body):
    deep_ep_pool.run(world, body)


@_needs("megatron")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_moe_layer_of_megatron(world):
    """In processes of its own: a layer waits for all of torch's world."""
    pool = Pool(world)
    try:
        for backend in ("deepep", "hybridep"):
            for dtype in ("float32", "bfloat16"):
                pool.run(world, megatron.moe_layer, backend, dtype)
    finally:
        pool.close()


@_needs("torchtitan")
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchtitan(deep_ep_pool, world, dtype):
    deep_ep_pool.run(world, torchtitan.deepep, dtype)


@_needs("torchtitan")
@pytest.mark.skipif(
    not hasattr(opaque_object, "CustomClassBase"), reason="torchtitan wants a newer torch"
)
@pytest.mark.parametrize("world", [2, 3])
def test_torchtitan_by_expert(deep_ep_pool, world):
    deep_ep_pool.run(world, torchtitan.hybridep, "float32")
