"""What the programs of clients of deep_ep compare their results with: plain torch, no ranks."""

import torch

H, K, E = 64, 2, 12


def inputs(rank, dtype=torch.float32):
    """(x, experts of each token, their probabilities) of a rank."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(6 + rank, H, generator=generator, dtype=torch.float32).to(dtype)
    scores = torch.rand(len(x), E, generator=generator, dtype=torch.float32)
    probs, idx = scores.topk(K, dim=1)
    return x, idx, probs


def wanted(x, idx, probs):
    """Each expert e multiplies by e + 1: (outputs, their gradients) where the loss is a sum of
    squares. An index of -1 is no expert."""
    x, probs = x.float().requires_grad_(), probs.clone().requires_grad_()
    out = x * ((idx + 1) * probs).sum(1, keepdim=True)
    out.square().sum().backward()
    return out.detach(), x.grad, probs.grad


def compare(got, want, dtype=torch.float32):
    """All of the one beside all of the other, which are in that dtype, in float32."""
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.float(), other.float(), **tolerance)
