"""Frameworks that call deep_ep, unchanged, on winnow.compat.deep_ep and CPU tensors."""

import importlib.util

import deep_ep_megatron as megatron
import pytest
from deep_ep_ranks import PROCESSES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install --no-deps megatron-core==0.16.1",
)


@pytest.mark.parametrize("world", [2, 3, 6])
@pytest.mark.parametrize("body", [megatron.deepep, megatron.hybridep], ids=["deepep", "hybridep"])
def test_megatron(deep_ep_pool, world, body):
    deep_ep_pool.run(world, body)


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_the_moe_layer_of_megatron(deep_ep_pool, backend):
    deep_ep_pool.run(PROCESSES, megatron.moe_layer, backend)
