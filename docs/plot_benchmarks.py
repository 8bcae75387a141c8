#!/usr/bin/env python3
"""Draws docs/benchmarks.svg: the rows of the first table of docs/benchmarks.md that are in TFLOP/s.

python3 docs/plot_benchmarks.py writes the picture; draw() returns it, for the test that compares.
"""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
WINNOW, PEER, INK, GRAY, PALE = "#1b6ca8", "#c9ccd1", "#222831", "#5f6770", "#e2e5e9"
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 900, 250, 840, 80, 13, 9
SCALE = 700.0  # TFLOP/s at the right end


def rows(page):
    """(label, Winnow's TFLOP/s, the peer's name, its TFLOP/s) for each operation, number of heads
    and size of the cache."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 6 or "TFLOP/s" not in cells[2]:
            continue
        operation = cells[0].strip("`").split("::")[1]
        heads, sizes = re.fullmatch(r"(\d+ heads), s_kv (.*)", cells[1]).groups()
        ours = [float(number) for number in cells[2].removesuffix("TFLOP/s").split("/")]
        peer, numbers = re.fullmatch(r"(\S+) (.*)", cells[3]).groups()
        theirs = [float(number) for number in numbers.split("/")]
        for size, our, their in zip(sizes.split("/"), ours, theirs, strict=True):
            yield f"{operation}, {heads}, {size.strip()}", our, peer, their


def _text(x, y, text, color=INK, anchor="start", size=13):
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{color}" text-anchor="{anchor}" '
        f'font-size="{size}">{text}</text>'
    )


def draw(page):
    """The picture for the text of the page."""
    entries = list(rows(page))
    height = TOP + len(entries) * (2 * BAR + GAP) + 30
    unit = (RIGHT - LEFT) / SCALE
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(
            20, 30, "sparse MLA on one H200, bf16, topk 2048: TFLOP/s (longer is better)", size=17
        ),
        f'<rect x="{LEFT}" y="46" width="12" height="12" fill="{WINNOW}"/>',
        _text(LEFT + 18, 57, "Winnow"),
        f'<rect x="{LEFT + 90}" y="46" width="12" height="12" fill="{PEER}"/>',
        _text(LEFT + 108, 57, "the fastest other library"),
    ]
    for tick in range(0, int(SCALE) + 1, 100):
        x = LEFT + tick * unit
        svg.append(
            f'<line x1="{x:.0f}" y1="{TOP - 8}" x2="{x:.0f}" y2="{height - 28}" stroke="{PALE}"/>'
        )
        svg.append(_text(x, height - 12, str(tick), GRAY, "middle", 11))
    y = TOP
    for label, ours, peer, theirs in entries:
        svg.append(_text(LEFT - 10, y + BAR + 4, label, anchor="end"))
        for value, color, note in ((ours, WINNOW, ""), (theirs, PEER, f" {peer}")):
            svg.append(
                f'<rect x="{LEFT}" y="{y}" width="{value * unit:.1f}" height="{BAR}" '
                f'fill="{color}"/>'
            )
            x = LEFT + value * unit + 5
            svg.append(_text(x, y + BAR - 2, f"{value:.0f}{note}", GRAY, size=11))
            y += BAR
        y += GAP
    return "\n".join([*svg, "</svg>", ""])


if __name__ == "__main__":
    (DOCS / "benchmarks.svg").write_text(draw((DOCS / "benchmarks.md").read_text()))
