#!/usr/bin/env python3
"""Draws docs/NAME.svg for every docs/benchmarks*.json: python3 docs/plot_benchmarks.py

A file is a report of `winnow bench --json`, drawn beside the ceilings that were measured in the
same run, or a comparison with other libraries, whose programs are not part of the project.
picture() is what a file's contents become.
"""

import json
from pathlib import Path

DOCS = Path(__file__).resolve().parent
WINNOW, OTHER, INK, GRAY, PALE = "#1b6ca8", "#c9ccd1", "#222831", "#5f6770", "#e2e5e9"
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 900, 260, 800, 80, 13, 9
STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)  # of the scale


def bars_of_comparison(data):
    """(label, Winnow's rate, the other's, what the other's bar is called)."""
    for one in data["results"]:
        operation = one["operation"].split("::")[1]
        label = f"{operation}, {one['heads']} heads, {one['s_kv'] // 1000}k"
        yield label, one["winnow"], one["peer_rate"], f" {one['peer']}"


def bars_of_report(data):
    """The same in percent of the ceiling, of what has one."""
    for one in data["results"]:
        if "ratio" in one:
            label = f"{one['operation']} {one['benchmark']}"
            yield label, 100 * one["ratio"], 100, f" % of a {one['ceiling']}"


def picture(data):
    """The SVG of a report or a comparison."""
    if "peers" in data:
        title = f"{data['peers']}: {data['unit']} (longer is better)"
        return draw(title, "the fastest other library", list(bars_of_comparison(data)))
    title = f"winnow {data['version']}, {data['where']}, {data['date']} (longer is better)"
    return draw(title, "its ceiling in the same run", list(bars_of_report(data)))


def _text(x, y, text, color=INK, anchor="start", size=13):
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{color}" text-anchor="{anchor}" '
        f'font-size="{size}">{text}</text>'
    )


def draw(title, other, bars):
    """The picture of pairs of bars."""
    most = max(max(ours, theirs) for _, ours, theirs, _ in bars)
    step = next((step for step in STEPS if most / step <= 8), STEPS[-1])
    ticks = range(0, int(-(-most // step)) + 1)
    height = TOP + len(bars) * (2 * BAR + GAP) + 30
    unit = (RIGHT - LEFT) / (ticks[-1] * step)
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(20, 30, title, size=17),
        f'<rect x="{LEFT}" y="46" width="12" height="12" fill="{WINNOW}"/>',
        _text(LEFT + 18, 57, "Winnow"),
        f'<rect x="{LEFT + 90}" y="46" width="12" height="12" fill="{OTHER}"/>',
        _text(LEFT + 108, 57, other),
    ]
    for tick in ticks:
        x = LEFT + tick * step * unit
        svg.append(
            f'<line x1="{x:.0f}" y1="{TOP - 8}" x2="{x:.0f}" y2="{height - 28}" stroke="{PALE}"/>'
        )
        svg.append(_text(x, height - 12, str(tick * step), GRAY, "middle", 11))
    y = TOP
    for label, ours, theirs, name in bars:
        svg.append(_text(LEFT - 10, y + BAR + 4, label, anchor="end"))
        for value, color, note in ((ours, WINNOW, ""), (theirs, OTHER, name)):
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
    for file in sorted(DOCS.glob("benchmarks*.json")):
        file.with_suffix(".svg").write_text(picture(json.loads(file.read_text())))
