"""The all-to-all of mixtures of experts: tokens travel to their experts' ranks and back.

``AllToAll`` takes tensors of any kind and needs no torch. ``EPAll2AllLayer`` and what belongs to it
have the interface of Triton-distributed's layer of that name and need torch, as does
``winnow.expert_parallel.autograd``, which is imported by its name; the others are loaded on first
use.
"""

from typing import TYPE_CHECKING, Any

from winnow._winnow.expert_parallel import (
    AllToAll,
    BufferLayout,
    CleanMeta,
    Descriptor,
    Dispatched,
    FileStore,
    InProcessWorld,
    LaunchEnvironment,
    LowLatency,
    LowLatencyCombining,
    LowLatencyDispatched,
    MemoryStore,
    Notified,
    Notifier,
    NotifyTotals,
    QueueBuffers,
    Store,
    Transport,
    bytes_per_token,
    classic_clean_meta,
    create_nvshmem,
    create_shared_memory,
    default_timeout,
    launch_environment,
    layout,
    local_buffer_layout,
    node_buffer_layout,
    nvshmem_obstacle,
    source_meta_bytes,
)

if TYPE_CHECKING:
    from winnow.expert_parallel.context import (
        BarrierAllContext,
        DispatchCombineContext,
        EPConfig,
        barrier_all_on_stream,
    )
    from winnow.expert_parallel.layer import EPAll2AllLayer, EPAllToAllLayoutDesc

notify = Notifier.notify  # notify(notifier, ...) is notifier.notify(...)

_NEED_TORCH = {
    "BarrierAllContext": "context",
    "DispatchCombineContext": "context",
    "EPAll2AllLayer": "layer",
    "EPAllToAllLayoutDesc": "layer",
    "EPConfig": "context",
    "barrier_all_on_stream": "context",
}

__all__ = [
    "AllToAll",
    "BarrierAllContext",
    "BufferLayout",
    "CleanMeta",
    "Descriptor",
    "DispatchCombineContext",
    "Dispatched",
    "EPAll2AllLayer",
    "EPAllToAllLayoutDesc",
    "EPConfig",
    "FileStore",
    "InProcessWorld",
    "LaunchEnvironment",
    "LowLatency",
    "LowLatencyCombining",
    "LowLatencyDispatched",
    "MemoryStore",
    "Notified",
    "Notifier",
    "NotifyTotals",
    "QueueBuffers",
    "Store",
    "Transport",
    "barrier_all_on_stream",
    "bytes_per_token",
    "classic_clean_meta",
    "create_nvshmem",
    "create_shared_memory",
    "default_timeout",
    "launch_environment",
    "layout",
    "local_buffer_layout",
    "node_buffer_layout",
    "notify",
    "nvshmem_obstacle",
    "source_meta_bytes",
]


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
