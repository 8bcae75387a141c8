"""A small layer and inputs for tests of compiled code, and a fresh torch compiler for each."""

import pytest
import torch

WORLD, HIDDEN, TOPK, EXPERTS = 2, 16, 3, 8
CONFIG = {"max_tokens": 16, "hidden": HIDDEN, "topk": TOPK, "experts": EXPERTS, "dtype": "float32"}
TOKENS = [7, 4]


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """Resets torch's compiler. Without a GPU a function of torch 2.11 crashes when a second thread
    traces, and is replaced."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


def make_inputs(rank, seed=0, tokens=TOKENS):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    tokens = tokens[rank]
    return (
        torch.randn(tokens, HIDDEN, generator=generator),
        torch.rand(tokens, TOPK, generator=generator),
        torch.randn(tokens, HIDDEN, generator=generator),
        torch.randint(-1, EXPERTS + 1, (tokens, TOPK), generator=generator).int(),
    )


def leaves_of(*tensors):
    return [t.clone().requires_grad_() for t in tensors]
