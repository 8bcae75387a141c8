"""deep_ep.utils: events of calls whose work the current stream has not waited for."""

from typing import Any, Callable, Optional, Tuple

import torch

__all__ = ["EventHandle", "EventOverlap"]


class EventHandle:
    """A point in the work of torch's current stream. Without a GPU all work before it is done."""

    def __init__(self) -> None:
        self._event = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """What is queued on torch's current stream from now on comes after this point."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event, or none, for code that overlaps its own work with a call's.

    Attributes:
        event: an EventHandle; None if the call was not asynchronous.
        extra_tensors: kept as long as this object.
    """

    def __init__(
        self,
        event: Optional[EventHandle] = None,
        extra_tensors: Optional[Tuple[torch.Tensor, ...]] = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Optional[Callable[[], None]] = None
        self._release_handle = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """The current stream waits for the event; `release_handle` then releases it."""
        assert self.event is not None, "EventOverlap: this call was not asynchronous: no event"
        self.event.current_stream_wait()
        if self.hook_after_wait is not None:
            hook, self.hook_after_wait = self.hook_after_wait, None
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """Calls the hook once, after the next current_stream_wait()."""
        assert self.hook_after_wait is None, "EventOverlap: it has a hook already"
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> "EventOverlap":
        """For `with event(release_handle=True):`."""
        self._release_handle = release_handle
        return self

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.event is not None:
            self.current_stream_wait(release_handle=self._release_handle)
        self._release_handle = False
