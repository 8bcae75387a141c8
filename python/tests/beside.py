"""Versions of packages that tests use beside the installed ones, each in a process of its own."""

import sys
from pathlib import Path

_LIST = Path(__file__).resolve().parents[2] / "tools" / "requirements-beside.txt"


def versions(name):
    """Those that tools/requirements-beside.txt lists of the package."""
    pins = [line.split("==") for line in _LIST.read_text().splitlines() if line.strip()]
    found = [pin[1] for pin in pins if pin[0] == name]
    assert found, f"{_LIST} lists no {name}"
    return found


def folder(name, version):
    """Where tools/setup unpacked it: what belongs in front of the process's sys.path."""
    path = Path(sys.prefix) / "beside" / f"{name}-{version}"
    assert path.is_dir(), f"there is no {path}: `tools/setup python` unpacks it"
    return str(path)
