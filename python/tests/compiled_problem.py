"""The layer and the tensors of the tests of compiled code, and torch's compiler for each test."""

import pytest
import torch

WORLD, HIDDEN, TOPK, EXPERTS = 2, 16, 3, 8
CONFIG = {"max_tokens": 16, "hidden": HIDDEN, "topk": TOPK, "experts": EXPERTS, "dtype": "float32"}
TOKENS = [7, 4]


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """A fresh compiler. Without a GPU it omits a step of torch 2.11 that crashes if a second thread
    traces."""
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
