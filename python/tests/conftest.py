"""Settings that CUDA reads when it starts."""

import os

import pytest

# Ranks that are threads wait for each other on one GPU: a hardware queue for each stream, and no
# kernel that is loaded at its first use, which would wait for those that run.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


@pytest.fixture(scope="session")
def deep_ep_pool():
    """Six processes that are the ranks of groups of 1 to 6, which cost seconds to start."""
    from deep_ep_ranks import Pool

    made = Pool()
    yield made
    made.close()
