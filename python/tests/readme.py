"""What the README says of every operation."""

import re
from pathlib import Path

import winnow

FILE = Path(__file__).resolve().parents[2] / "README.md"


def operations():
    """{operation: {backend: its dtypes, or nothing}} of the table of support."""
    cells = r"^\| `(\w+::\w+)` \|(.*?)\|(.*?)\|(.*?)\| \["
    rows = re.findall(cells, FILE.read_text(), re.MULTILINE)
    names = ("cpu", "cuda", "sm90")
    return {row[0]: dict(zip(names, map(str.strip, row[1:]), strict=True)) for row in rows}


def asked(operation):
    """The name that winnow.supports() has for an operation, and a dtype that it takes."""
    name = operation.replace("::", ".").replace("all_to_all", "dispatch")
    dtypes = ("bfloat16", "float32", "float8_e4m3fn")
    return name, next(dtype for dtype in dtypes if winnow.supports(name, dtype=dtype))
