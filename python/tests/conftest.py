"""The environment that CUDA reads when it starts, and fixtures of several test files."""

import os
from pathlib import Path

import pytest
from processes import python

# Threads that are ranks on one GPU wait for each other. So each stream needs a hardware queue, and
# all kernels are loaded at once: loading one at its first use would wait for running kernels.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

# Files side by side have a core each: more threads of torch, and of the programs that tests start,
# would wait for each other. Winnow's calls are divided between two nevertheless. Compiled code has
# no vectors: to see which ones there are, torch compiles programs and imports itself in others.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    import winnow

    winnow.set_num_threads(2)


@pytest.fixture(scope="session")
def deep_ep_pool():
    """Six processes that are the ranks of groups of 1 to 6; they take seconds to start."""
    from deep_ep_ranks import Pool, load

    made = Pool(load=load)
    yield made
    made.close()


@pytest.fixture(scope="session")
def wheel():
    path = os.environ.get("WINNOW_WHEEL")
    assert path, "WINNOW_WHEEL must name the wheel under test; `make test` sets it"
    return Path(path).resolve()


@pytest.fixture(scope="session")
def empty_environment(wheel, tmp_path_factory):
    """A fresh virtual environment with nothing but the wheel, installed without an index."""
    folder = tmp_path_factory.mktemp("empty")
    assert python("-m", "venv", "--without-pip", folder).returncode == 0
    there = folder / "bin" / "python"
    python("-m", "pip", "--python", there, "install", "--no-index", wheel, check=True)
    return there
