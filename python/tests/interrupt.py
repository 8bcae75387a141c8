"""Ctrl-C while this process is in a call."""

import os
import signal
import threading
import time

import pytest


def interrupted(call, after):
    """Presses it so many seconds after the begin of the call, which must raise KeyboardInterrupt;
    the seconds from then on."""
    # A process that a shell started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
        return time.monotonic() - begin - after
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
