#!/usr/bin/env python3
"""What was measured and verified is in results/*.json; this makes the pages and pictures from it.

    python3 docs/records.py                               after a change of results/
    python3 docs/records.py add FILE... --commit COMMIT --command "winnow bench ..."

adds what `winnow bench --json`, `winnow verify --json` or tools/compare --json printed, in the
place of older results of the same benchmarks on the same GPU, and makes the pages again. Several
files are several runs.
"""

import argparse
import datetime
import json
import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PAGES = ("benchmarks.md", "verification.md")
# Of a family of benchmarks these are its members, which share a row of a table.
MEMBER = re.compile(
    r"(?<=-kv|-sk)\d+|(?<=\d-b)\d+|(?<=-)\d+(?=-sms)|(?<=^b)\d+|(?<=-)(128|256|512)$"
)
GPUS = ("NVIDIA", "2 x NVIDIA", "4 x NVIDIA", "8 x NVIDIA")
COLORS = ("#1b6ca8", "#e08a1e", "#c9ccd1")
INK, GRAY, PALE = "#222831", "#5f6770", "#e2e5e9"
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 900, 330, 820, 80, 11, 8


def read():
    """(records, verifications) of all files."""
    files = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    records = [one for file in files for one in file.get("records", ())]
    return records, [one for file in files for one in file.get("verifications", ())]


def write(path, content):
    """A file of records with one result in a line."""
    (kind, entries), lines = next(iter(content.items())), []
    for entry in entries:
        results = entry.get("results")
        text = json.dumps({k: v for k, v in entry.items() if k != "results"}, ensure_ascii=False)
        if results is not None:
            rows = ",\n".join(f"      {json.dumps(one, ensure_ascii=False)}" for one in results)
            text = f'{text[:-1]}, "results": [\n{rows}\n    ]}}'
        lines.append(f"    {text}")
    path.write_text(f'{{\n  "{kind}": [\n' + ",\n".join(lines) + "\n  ]\n}\n")


# --- adding -------------------------------------------------------------------------------------


def _key(record, result):
    """What a result is a figure of."""
    beside = bool(result.get("peers"))
    return record["where"], result["operation"], result["benchmark"], beside


def _put(name, kind, entry, stays):
    """Adds an entry to a file, after what it replaces has left all files."""
    for path in sorted(
        {*RESULTS.glob("*.json"), RESULTS / f"{name}.json"} - {RESULTS / "schema.json"}
    ):
        content = json.loads(path.read_text()) if path.exists() else {kind: []}
        if kind in content:
            kept = [one for one in map(stays, content[kind]) if one is not None]
            write(path, {kind: kept + [entry] * (path.stem == name)})


def add(options):
    """The command of that name."""
    reports = [json.loads(Path(file).read_text()) for file in options.files]
    about = {"commit": options.commit, "command": options.command}
    about |= {k: v for k in ("note", "setup") if (v := getattr(options, k))}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    if isinstance(reports[0], dict) and "cases" in reports[0]:  # of `winnow verify`
        if not options.where:
            raise SystemExit(
                "records: --where: wanted the GPU, which `winnow verify` does not print"
            )
        counts = {key: sum(one[key] for one in reports) for key in ("passed", "failed")}
        entry = {"area": "case tables", "where": options.where, "date": today, **about, **counts}
        same = ("where", "command")
        _put("verification", "verifications", entry,
             lambda old: None if all(old[k] == entry[k] for k in same) else old)  # fmt: skip
        return
    lists = [one if isinstance(one, list) else one["results"] for one in reports]
    head = (
        {}
        if isinstance(reports[0], list)
        else {k: v for k, v in reports[0].items() if k != "results"}
    )
    record = {"date": today, **head, **about, "results": [row for rows in lists for row in rows]}
    record["where"] = options.where or head.get("where")
    if not record["where"] or ("winnow launch" in options.command and not options.where):
        raise SystemExit('records: --where: wanted the GPUs of this run, as "4 x NVIDIA H200"')
    gpu = re.search(r"NVIDIA (\w+)", record["where"])
    peers = any(one.get("peers") for one in record["results"])
    name = ("compare_" if peers else "") + (gpu[1].lower() if gpu else "cpu")
    keys = {_key(record, one) for one in record["results"]}

    def stays(old):
        results = [one for one in old["results"] if _key(old, one) not in keys]
        return {**old, "results": results} if results else None

    _put(name, "records", record, stays)


# --- tables -------------------------------------------------------------------------------------


def _short(where):
    return where.replace("NVIDIA ", "").replace(" 80GB HBM3", "")


def _number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _span(values, text=_number):
    """One value, two, or the least and the greatest of several runs."""
    shown = [text(value) for value in (values if len(values) < 3 else (min(values), max(values)))]
    if len(set(shown)) == 1:
        return shown[0]
    return (", " if len(values) < 3 else " to ").join(shown)


def _sizes(numbers):
    """8k for 8192."""
    return [f"{int(n) // 1000}k" if len(n) > 3 else n for n in numbers]


def _families(results):
    """(its name with its members, [the runs of each member]), in the order of the results."""
    families = {}
    for one in results:
        name = MEMBER.sub("*", one["benchmark"], count=1)
        members = families.setdefault((one["operation"], name), {})
        members.setdefault(one["benchmark"], []).append(one)
    for (operation, name), members in families.items():
        found = [match[0] for key in members if (match := MEMBER.search(key))]
        label = name.replace("*", " / ".join(_sizes(found))) if found else name
        yield operation, label, list(members.values())


def _times(members):
    """ "1.23 / 4.56 ms" """
    seconds = [[one["seconds"] for one in runs if one.get("seconds")] for runs in members]
    if not any(seconds):
        return ""
    scale, unit = (1e3, "ms") if max(max(s, default=0) for s in seconds) >= 1e-3 else (1e6, "us")
    return " / ".join(_span([scale * s for s in runs]) for runs in seconds) + f" {unit}"


def _joined(members, key, text):
    values = [[one[key] for one in runs if key in one] for runs in members]
    return " / ".join(_span(v, text) if v else "-" for v in values) if any(values) else ""


def _percent(value):
    return f"{100 * value:.0f}"


def _to_reach(members):
    parts, missed = [], False
    for runs in members:
        one = runs[0]
        missed |= not all(run.get("reached", True) for run in runs)
        if "target" in one:
            parts.append(_percent(one["target"]) + " %")
        elif "target_seconds" in one:
            parts.append(_times([[{"seconds": one["target_seconds"]}]]))
        else:
            parts.append("-")
    text = " / ".join(parts) if set(parts) != {"-"} else ""
    return text + (", missed" if missed else "")


def _source(record):
    return f"{record['date']}, {record.get('commit') or record['recorded_in']}"


def _table(head, rows):
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def _compared(records):
    """(record, operation, label, members, the name of a peer) of all comparisons."""
    for record in records:
        for operation, label, members in _families(record["results"]):
            names = dict.fromkeys(
                peer["name"] for one in members[0] for peer in one.get("peers", ())
            )
            for name in names:
                yield record, operation, label, members, name


def _place(compared):
    """The order of comparisons: operations by name, H200 first."""
    record, operation = compared[:2]
    return operation, "H200" not in record["where"]


def _peers(members, name):
    return [
        [
            peer
            for one in runs
            for peer in one["peers"]
            if peer["name"] == name and "seconds" in peer
        ]
        for runs in members
    ]


def _fastest(records):
    """{operation: {GPU: ([times as fast as the fastest peer of each problem], names)}}"""
    found = {}
    for record in records:
        for one in record["results"]:
            if timed := [peer for peer in one.get("peers", ()) if "times_as_fast" in peer]:
                best = min(timed, key=lambda peer: peer["times_as_fast"])
                of_gpu = found.setdefault(one["operation"], {})
                times, names = of_gpu.setdefault(_short(record["where"]), ([], {}))
                times.append(best["times_as_fast"])
                names[best["name"]] = None
    return found


def headlines(records):
    """How much faster than the fastest peer, from problem to problem."""
    found = _fastest(records)
    gpus = sorted({gpu for of_gpu in found.values() for gpu in of_gpu}, reverse=True)
    rows = []
    for operation, of_gpu in sorted(found.items()):
        names = dict.fromkeys(name for _, names in of_gpu.values() for name in names)
        cells = [
            f"{min(of_gpu[gpu][0]):.2f} to {max(of_gpu[gpu][0]):.2f}" if gpu in of_gpu else ""
            for gpu in gpus
        ]
        rows.append([f"`{operation}`", ", ".join(names), *cells])
    head = ["operation", "the fastest other"]
    return _table([*head, *(f"times as fast on one {gpu}" for gpu in gpus)], rows)


def comparisons(records):
    """Every problem beside every peer."""
    rows = []
    for record, operation, label, members, name in sorted(_compared(records), key=_place):
        theirs = _peers(members, name)
        version = next((peer["version"] for peers in theirs for peer in peers), "")
        rows.append([
            f"`{operation}`", _short(record["where"]), label, _times(members),
            f"{name} {version}", _times(theirs),
            _joined(theirs, "times_as_fast", "{:.2f}".format), _source(record),
        ])  # fmt: skip
    head = [
        "operation",
        "GPU",
        "benchmark",
        "Winnow",
        "beside",
        "time",
        "times as fast",
        "measured",
    ]
    return _table(head, rows)


def layers(records):
    """The pairs of `python -m winnow bench transformers`."""
    rows = []
    for record in records:
        found = {
            one["benchmark"]: one for one in record["results"] if one["operation"] == "transformers"
        }
        for name, ours in found.items():
            if not name.startswith("winnow, "):
                continue
            theirs, cells = found[name.replace("winnow", "sdpa", 1)], []
            for one in (ours, theirs):
                gigabytes = (one["peak_bytes"] or 0) / 2**30
                cells.append(one["error"] or f"{1e3 * one['seconds']:.0f} ms, {gigabytes:.1f} GiB")
            times = "" if theirs["error"] else f"{theirs['seconds'] / ours['seconds']:.1f}"
            rows.append([_short(record["where"]), name[8:], *cells, times, _source(record)])
    return _table(["GPU", "", "Winnow", "sdpa", "times as fast", "measured"], rows)


def _rate(members):
    """ "1.23 / 4.56 TFLOP/s" """
    flat = [one for runs in members for one in runs]
    key, scale, unit = "gflops_per_second", 1, "GFLOP/s"
    if max(one.get(key, 0) for one in flat) > 1e4:
        scale, unit = 1e-3, "TFLOP/s"
    elif not any(key in one for one in flat):
        key, unit = "gigabytes_per_second", "GB/s"
    values = _joined(members, key, lambda value: _number(scale * value))
    return f"{values} {unit}" if values else ""


def _of_ceiling(members):
    values = _joined(members, "ratio", _percent)
    ceilings = {one["ceiling"] for runs in members for one in runs if "ceiling" in one}
    return f"{values} % of a {'copy' if 'copy' in ceilings else 'product'}" if values else ""


def _on_cpu(operation, results):
    """All benchmarks of an operation in one row."""
    return [
        f"`{operation}`",
        ", ".join(
            f"{one['benchmark']} {_times([[one]])}"
            + (f" ({_percent(one['ratio'])} %)" if "ratio" in one else "")
            for one in results
        ),
    ]


def benches(records):
    """For each operation its table and its notes; the CPU has one table for all."""
    rows, notes, on_cpu, cpu_notes = {}, {}, [], []
    order = sorted(records, key=lambda record: ("H200" not in record["where"], record["where"]))
    for record in order:
        results = [
            one for one in record["results"] if "::" in one["operation"] and not one.get("peers")
        ]
        where, source, note = _short(record["where"]), _source(record), _note(record)
        if not results:
            continue
        if not record["where"].startswith(GPUS):
            for operation, of_one in groupby(results, lambda one: one["operation"]):
                on_cpu.append([*_on_cpu(operation, of_one), where, source])
            cpu_notes += [f"- {source}: {note}"] * bool(note)
            continue
        alone = {}  # what has neither a target nor others of its family shares a row
        for operation, label, members in _families(results):
            if len(members) == 1 and not _to_reach(members):
                of = f" ({ratio})" if (ratio := _of_ceiling(members)) else ""
                alone.setdefault(operation, []).append(f"{label} {_times(members)}{of}")
                continue
            rows.setdefault(operation, []).append([
                where, label, _times(members), _rate(members), _of_ceiling(members),
                _to_reach(members), source,
            ])  # fmt: skip
        for operation, texts in alone.items():
            row = [where, ", ".join(texts), "", "", "", "", source]
            rows.setdefault(operation, []).append(row)
        if note:
            notes.setdefault(results[0]["operation"], []).append(f"- {where}, {source}: {note}")
    head = ["where", "benchmark", "time", "rate", "of the ceiling", "to reach", "measured"]
    parts = []
    for operation in sorted(rows):
        rows[operation].sort(key=lambda row: "H200" not in row[0])
        parts.append(f"### {operation}\n\n" + _table(head, rows[operation]))
        if operation in notes:
            parts.append("\n".join(notes[operation]))
    head = ["operation", "time, and share of the ceiling", "where", "measured"]
    parts += ["### The CPU backend\n\n" + _table(head, sorted(on_cpu)), "\n".join(cpu_notes)]
    return "\n\n".join(parts)


def _note(record):
    program = f"Measured by {record['program']}." if "program" in record else ""
    return " ".join(filter(None, (record.get("note"), program)))


def compared_notes(records):
    """The notes of the comparisons."""
    lines = {}
    for record in records:
        if any("peers" in one for one in record["results"]) and "note" in record:
            operation = record["results"][0]["operation"]
            lines[f"- `{operation}`, {_short(record['where'])}: {record['note']}"] = None
    return "\n".join(lines)


def _count(entry):
    failed = entry.get("failed", 0)
    return f"{entry['passed']} passed" + (f", {failed} failed" if failed else "")


def verifications(entries):
    """A table for each area; entries that say the same share a row."""
    parts = []

    def said(one):
        return (one["where"], one["date"], one["commit"], one.get("note", ""))

    for area, of_area in groupby(entries, lambda one: one["area"]):
        rows = []
        for (where, date, commit, note), group in groupby(of_area, said):
            group = list(group)
            counted = [_count(one) for one in group if "passed" in one]
            same = len(group) > 1 and len(set(counted)) == 1
            result = f"{counted[0]} each" if same else "; ".join(counted)
            commands = ", ".join(f"`{one['command']}`" for one in group)
            found = ". ".join(filter(None, (result, note)))
            rows.append([commands, _short(where), found, f"{date}, {commit}"])
        head = ["command", "where", "result", "date, commit"]
        parts.append(f"### {area[0].upper()}{area[1:]}\n\n" + _table(head, rows))
    return "\n\n".join(parts)


# --- pictures -----------------------------------------------------------------------------------


def _text(x, y, text, color=INK, anchor="start", size=13):
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{color}" text-anchor="{anchor}" '
        f'font-size="{size}">{text}</text>'
    )


def draw(title, series, rows, mark, text):
    """The SVG of one bar for each series in each row, [(label, [value or None])], and a line."""
    bars = sum(len([v for v in values if v is not None]) * BAR + GAP for _, values in rows)
    most, height = max(v for _, values in rows for v in values if v is not None), TOP + bars + 10
    unit = (RIGHT - LEFT) / most
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(20, 30, title, size=17),
    ]
    for i, name in enumerate(series):
        svg.append(f'<rect x="{LEFT + 120 * i}" y="46" width="12" height="12" fill="{COLORS[i]}"/>')
        svg.append(_text(LEFT + 18 + 120 * i, 57, name))
    y = TOP
    for label, values in rows:
        count = len([v for v in values if v is not None])
        svg.append(_text(LEFT - 10, y + count * BAR / 2 + 4, label, anchor="end", size=12))
        for i, value in enumerate(values):
            if value is None:
                continue
            width = value * unit
            svg.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLORS[i]}"/>'
            )
            svg.append(_text(LEFT + width + 5, y + BAR - 2, text(value), GRAY, size=10))
            y += BAR
        y += GAP
    x = LEFT + mark * unit
    svg.append(
        f'<line x1="{x:.0f}" y1="{TOP - 8}" x2="{x:.0f}" y2="{height - 10}" stroke="{INK}"/>'
    )
    return "\n".join([*svg, "</svg>", ""])


def _by_gpu(records, value):
    """{label: {GPU: the median of the runs}} of what has a value."""
    found = {}
    for record in records:
        if re.fullmatch(r"NVIDIA [^,]*", record["where"]):
            for one in record["results"]:
                if (number := value(one)) is not None:
                    label = f"{one['operation']} {one['benchmark']}"
                    of_gpu = found.setdefault(label, {}).setdefault(_short(record["where"]), [])
                    of_gpu.append(number)
    return {
        label: {gpu: sorted(v)[(len(v) - 1) // 2] for gpu, v in of_gpu.items()}
        for label, of_gpu in found.items()
    }


def _picture(title, records, value, mark, text):
    found = _by_gpu(records, value)
    gpus = sorted({gpu for of_gpu in found.values() for gpu in of_gpu}, reverse=True)
    rows = [(label, [found[label].get(gpu) for gpu in gpus]) for label in sorted(found)]
    return draw(title, gpus, rows, mark, text)


def _beside_peers(one):
    times = [peer["times_as_fast"] for peer in one.get("peers", ()) if "times_as_fast" in peer]
    return min(times, default=None)


def _beside_ceiling(one):
    return one.get("ratio") if "target" in one and "peers" not in one else None


# --- all ----------------------------------------------------------------------------------------


def blocks():
    """What stands between the marks of the pages, by name."""
    records, entries = read()
    return {
        "headlines": headlines(records),
        "comparisons": comparisons(records),
        "notes": compared_notes(records),
        "layers": layers(records),
        "benches": benches(records),
        "verifications": verifications(entries),
    }


def page(text, made):
    """A page with its blocks made anew."""
    for name in re.findall(r"<!-- records: (\w+) -->", text):
        marks = f"<!-- records: {name} -->", "<!-- end -->"
        pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
        block = f"{marks[0]}\n\n{made[name]}\n\n{marks[1]}"
        text = re.sub(pattern, lambda _, block=block: block, text, count=1, flags=re.DOTALL)
    return text


def outputs():
    """{path: text} of all that is made from the records."""
    records, _ = read()
    made, docs = blocks(), ROOT / "docs"
    files = {docs / name: page((docs / name).read_text(), made) for name in PAGES}
    files[docs / "benchmarks.svg"] = _picture(
        "Times as fast as the fastest other library in the same run", records, _beside_peers, 1,
        "{:.2f}".format,
    )  # fmt: skip
    files[docs / "ceilings.svg"] = _picture(
        "Share of a product of 8192^3, or of a copy, in the same run", records, _beside_ceiling, 1,
        lambda value: f"{100 * value:.0f} %",
    )  # fmt: skip
    return files


def main():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="verb")
    adding = commands.add_parser("add", help="add what a program printed with --json")
    adding.add_argument("files", nargs="+")
    adding.add_argument("--commit", required=True, help="the commit that was measured")
    adding.add_argument("--command", required=True, help="what was run, without --json")
    adding.add_argument("--where", help='the GPU, if the report lacks it, or "4 x NVIDIA H200"')
    adding.add_argument("--setup", help="driver and libraries")
    adding.add_argument("--note", help="what else a reader must know")
    options = parser.parse_args()
    if options.verb == "add":
        add(options)
    for path, text in outputs().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
