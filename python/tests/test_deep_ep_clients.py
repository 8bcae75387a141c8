"""Frameworks that call deep_ep, unchanged, on winnow.compat.deep_ep and CPU tensors."""

import beside
import deep_ep_megatron as megatron
import deep_ep_torchtitan as torchtitan
import pytest
from deep_ep_ranks import Pool

_OLDER, _NEWER = beside.versions("megatron-core")


@pytest.fixture(
    scope="module",
    params=[(_OLDER, 2), (_NEWER, 3), (_NEWER, 4)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def run_megatron(request):
    """run(body, ...) with one version, in processes that are all of torch's world, for which layers
    wait."""
    version, world = request.param
    pool = Pool(world, beside=[beside.folder("megatron-core", version)], load=megatron.load)
    try:
        assert pool.run(world, megatron.load) == [version] * world
        yield lambda *body: pool.run(world, *body)
    finally:
        pool.close()


@pytest.mark.parametrize("body", [megatron.deepep, megatron.hybridep], ids=["deepep", "hybridep"])
def test_megatron(run_megatron, body):
    run_megatron(body)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_the_moe_layer_of_megatron(run_megatron, backend, dtype):
    run_megatron(megatron.moe_layer, backend, dtype)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchtitan(deep_ep_pool, world, dtype):
    deep_ep_pool.run(world, torchtitan.deepep, dtype)


@pytest.mark.parametrize("world", [2, 3])
def test_torchtitan_by_expert(deep_ep_pool, world):
    deep_ep_pool.run(world, torchtitan.hybridep, "float32")
