"""On which stream a buffer's work runs, and what waits for it."""

from typing import Any, Callable, Iterable, Optional, Tuple

import torch
from torch import Tensor

from winnow.compat.deep_ep.utils import EventHandle, EventOverlap


def event_of(previous_event: Any) -> Optional[EventHandle]:
    """The EventHandle of an EventOverlap, or the EventHandle itself."""
    return getattr(previous_event, "event", previous_event)


def tensors_in(values: Any) -> Iterable[Tensor]:
    """All tensors in nested tuples. Lists are left out: they hold numbers, hundreds of counts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple):
        for value in values:
            yield from tensors_in(value)


class CommStream:
    """The stream of a buffer's calls: one of its own on a GPU; the CPU has none.

    A call waits for `previous_event` if one is given, else for all work on the current stream. The
    current stream then waits for the call; with async_finish only those do that wait for its event.
    Results are memory of this stream, which torch keeps until the current stream is done with it.
    If the call would wait for the current stream and the current stream for the call, it runs on
    the current stream: the order is the same, and neither events nor another stream's memory are
    needed. Not if `shared`: ranks that share a GPU cannot all use its default stream.
    """

    def __init__(self, shared: bool) -> None:
        self._stream: Any = None
        self._shared = shared

    def get(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        return self._stream

    def run(
        self,
        device: torch.device,
        body: Callable[[], Tuple],
        inputs: Any,
        previous_event: Any,
        async_finish: bool,
    ) -> Tuple[Tuple, EventOverlap]:
        """The results of body() and the event of its end. body() must name the device of what it
        makes: a device context costs a microsecond for each function of torch."""
        if device.type != "cuda":
            with torch.no_grad():
                results = body()
            return results, EventOverlap(EventHandle() if async_finish else None)
        event = event_of(previous_event)
        if event is None and not async_finish and not self._shared:
            with torch.no_grad():
                return body(), EventOverlap()
        mine, current = self.get(), torch.cuda.current_stream()
        with torch.no_grad(), torch.cuda.stream(mine):
            if event is not None:
                event.current_stream_wait()
            else:
                mine.wait_stream(current)
            results = body()
            made = EventHandle() if async_finish else None
        for tensor in tensors_in(inputs):
            if tensor.is_cuda:
                tensor.record_stream(mine)
        for tensor in tensors_in(results):
            if tensor.is_cuda:
                tensor.record_stream(current)
        if made is None:
            current.wait_stream(mine)
        return results, EventOverlap(made)
