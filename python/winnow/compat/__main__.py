"""``python -m winnow.compat``: the modules that replace other libraries, for programs that cannot
be edited.

``path NAME...`` prints folders for PYTHONPATH with the named ones, and ``check FOLDER`` lists which
calls of a package they take.
"""

import argparse
import contextlib
import sys
from collections import Counter
from pathlib import Path
from typing import List, Sequence

from winnow import compat
from winnow.__main__ import _printing
from winnow.compat import _check


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m winnow.compat", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    path = commands.add_parser("path", help="prints folders for PYTHONPATH")
    path.add_argument("name", nargs="+", choices=_check.LIBRARIES)
    check = commands.add_parser(
        "check",
        help="lists the calls of a package, and whether they are taken",
        epilog="The package is read, not imported. A call is taken; passed on to the library "
        "itself, which must be installed; refused by name, with the reason, where it is for "
        "processors that Winnow is not for; not taken; or not judged, where sources do not tell. "
        "The exit code is 1 if a call is not taken.",
    )
    check.add_argument("folder", type=Path, help="the package, or the folder that holds it")
    check.add_argument("name", nargs="*", help=f"of {', '.join(_check.LIBRARIES)}; all if none")
    return parser


def _printable(text: str) -> str:
    """With escapes for the control characters of names and constants, which a terminal obeys."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _show(findings: Sequence[_check.Finding]) -> None:
    with contextlib.suppress(AttributeError):  # of a stream without an encoding
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for found in findings:
        print(_printable(str(found)))
    statuses = _check.STATUSES
    print(f"\n{'':10}{''.join(f'{status:>17}' for status in statuses)}")
    counts = Counter((found.library, found.status) for found in findings)
    for library in sorted({found.library for found in findings}):
        print(f"{library:10}{''.join(f'{counts[library, status]:17}' for status in statuses)}")


def main(arguments: List[str]) -> int:
    """The exit code of the command with these arguments."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "path":
        print(compat.path(*options.name))
        return 0
    if unknown := [name for name in options.name if name not in _check.LIBRARIES]:
        parser.error(f"name: want {', '.join(_check.LIBRARIES)}, got {unknown[0]}")
    if not any(options.folder.rglob("*.py")):
        parser.error(f"folder: want one with Python files, got {options.folder}")
    findings = _check.check(options.folder, options.name or _check.LIBRARIES)
    _show(findings)
    return int(any(found.status == _check.NOT_TAKEN for found in findings))


if __name__ == "__main__":
    sys.exit(_printing(main, sys.argv[1:]))
