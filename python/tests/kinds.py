"""Parameters of tests: (a function that converts a numpy array to a tensor, its float dtype)."""

import numpy as np
import pytest
import torch

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def _numpy(dtype):
    return lambda a: a.astype(dtype) if a.dtype == np.float32 else a


def _torch(dtype, device="cpu"):
    def make(a):
        tensor = torch.from_numpy(a).to(device)
        return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor

    return make


def _cupy(dtype):
    def make(a):
        cupy = pytest.importorskip("cupy")
        return cupy.asarray(_numpy(dtype)(a))

    return make


CPU = [
    pytest.param((_numpy(np.float64), "float64"), id="numpy-float64"),
    pytest.param((_torch(torch.float64), "float64"), id="torch-float64"),
    pytest.param((_numpy(np.float32), "float32"), id="numpy-float32"),
    pytest.param((_numpy(np.float16), "float16"), id="numpy-float16"),
    pytest.param((_torch(torch.float32), "float32"), id="torch-float32"),
    pytest.param((_torch(torch.float16), "float16"), id="torch-float16"),
    pytest.param((_torch(torch.bfloat16), "bfloat16"), id="torch-bfloat16"),
]
CUDA_BFLOAT16 = pytest.param(
    (_torch(torch.bfloat16, "cuda"), "bfloat16"), id="cuda-bfloat16", marks=gpu
)
CUDA = [
    pytest.param((_torch(torch.float32, "cuda"), "float32"), id="cuda-float32", marks=gpu),
    pytest.param((_torch(torch.float16, "cuda"), "float16"), id="cuda-float16", marks=gpu),
    CUDA_BFLOAT16,
    pytest.param((_cupy(np.float32), "float32"), id="cupy-float32", marks=gpu),
    pytest.param((_cupy(np.float16), "float16"), id="cupy-float16", marks=gpu),
]


def numbers(tensor):
    """The tensor as a numpy array; torch's float16 and bfloat16 become float32."""
    if isinstance(tensor, torch.Tensor):
        if tensor.is_cuda:
            # A copy that waits inside CUDA may block the threads of ranks that this one waits for.
            torch.cuda.current_stream(tensor.device).synchronize()
        tensor = tensor.cpu()  # conversion on the GPU could wait for kernels of other ranks forever
        narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
        return (tensor.float() if narrow else tensor).numpy()
    return tensor.get() if hasattr(tensor, "get") else tensor


def like(array, tensor):
    """The array on the device of `tensor`, in its own dtype."""
    if isinstance(tensor, torch.Tensor):
        return torch.from_numpy(array).to(tensor.device)
    return array


def assert_same_kind(got, like):
    assert type(got) is type(like)
    if isinstance(got, torch.Tensor):
        assert got.device == like.device
