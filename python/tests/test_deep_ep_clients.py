"""Frameworks that call deep_ep, unchanged, on winnow.compat.deep_ep and CPU tensors."""

import importlib.util

import deep_ep_megatron as megatron
import pytest
from deep_ep_ranks import Pool

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install --no-deps megatron-core==0.16.1",
)


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.close()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("body", [megatron.deepep, megatron.hybridep], ids=["deepep", "hybridep"])
def test_megatron(pool, world, body):
    pool.run(world, body)


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_the_moe_layer_of_megatron(pool, backend):
    pool.run(4, megatron.moe_layer, backend)
