"""``python -m winnow``: the command line program that the wheel brings.

``python -m winnow bench python`` measures what a call from Python costs beyond the call in C++.
"""

import os
import sys
from pathlib import Path

_PROGRAM = Path(__file__).parent / "bin" / "winnow"


def main() -> None:
    """Becomes the program `winnow` with this process's arguments."""
    if sys.argv[1:3] == ["bench", "python"]:
        from winnow import call_cost

        sys.exit(call_cost.main(sys.argv[3:]))
    if not _PROGRAM.exists():
        sys.exit("winnow: this package was built without the command line program")
    os.execv(_PROGRAM, ["winnow", *sys.argv[1:]])


if __name__ == "__main__":
    main()
