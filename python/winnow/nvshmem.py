"""Where NVSHMEM is: the wheel nvidia-nvshmem-cu13, from wherever Python would import it."""

import os
import sys
from pathlib import Path

_LIBRARY = "libnvshmem_host.so.3"


def folder() -> str:
    """The folder with NVSHMEM's library: in ``NVSHMEM_HOME``, else the first along ``sys.path``.

    Relative entries do not count: what they mean changes with the current directory. Nor do those
    that are no text, which Python's import passes over too. Empty where there is none, and where
    ``NVSHMEM_HOME`` is a relative path, with which the library refuses to open NVSHMEM.
    """
    home = os.environ.get("NVSHMEM_HOME", "")
    if home and not os.path.isabs(home):
        return ""
    places = [Path(home)] if home else []
    entries = (entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry))
    places += [Path(entry) / "nvidia" / "nvshmem" for entry in entries]
    for place in places:
        if (place / "lib" / _LIBRARY).is_file():
            return str(place / "lib")
    return ""
