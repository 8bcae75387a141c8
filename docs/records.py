#!/usr/bin/env python3
"""Generates pages and pictures from the measurements and verifications in results/*.json.

    python3 docs/records.py                               after a change of results/
    python3 docs/records.py add FILE... --commit COMMIT --command "winnow bench ..."

The second command first adds the output of `winnow bench --json`, `winnow verify --json` or
tools/compare --json, in the place of older results of the same benchmarks on the same machine or of
the same verification. Each file is one run.
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
# The part of a benchmark's name that varies within a family, whose members share a row of a table.
MEMBER = re.compile(
    r"(?<=-kv|-sk)\d+|(?<=\d-b)\d+|(?<=-)\d+(?=-sms)|(?<=^b)\d+|(?<=-)(128|256|512)$"
)
CEILINGS = {"copy": "a copy", "matmul": "a product", "mma.sync product": "a product with mma.sync"}
COLORS = ("#1b6ca8", "#e08a1e", "#5aa469", "#9b5de5", "#c9ccd1")
INK, GRAY = "#222831", "#5f6770"
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 900, 330, 820, 80, 11, 8


def read():
    """(records, verifications) in all files."""
    files = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    records = [one for file in files for one in file.get("records", ())]
    return records, [one for file in files for one in file.get("verifications", ())]


def write(path, content):
    """Writes a file of records, one result per line."""
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
    """Results with the same key measure the same, so a new one replaces the old."""
    beside = bool(result.get("peers"))
    return record["where"], result["operation"], _name(result), beside


def _name(result):
    """The benchmark, and the backend where another one would come first."""
    return result["benchmark"] + (f", {result['backend']}" if "backend" in result else "")


def _put(name, kind, entry, stays):
    """Adds an entry to the file `name`. stays(old): what remains of an old entry, or None."""
    for path in sorted(
        {*RESULTS.glob("*.json"), RESULTS / f"{name}.json"} - {RESULTS / "schema.json"}
    ):
        content = json.loads(path.read_text()) if path.exists() else {kind: []}
        if kind in content:
            kept = [one for one in map(stays, content[kind]) if one is not None]
            write(path, {kind: kept + [entry] * (path.stem == name)})


def _verified(reports, about):
    """Adds the output of one or several runs of `winnow verify`."""
    counts = {key: sum(one[key] for one in reports) for key in ("passed", "failed")}
    entry = {"area": "case tables", **about, **counts}

    def stays(old):
        same = all(old[key] == entry[key] for key in ("where", "command"))
        return None if same else old

    _put("verification", "verifications", entry, stays)


def _measured(reports, about):
    """Adds the output of `winnow bench` or tools/compare; Python's benchmarks print a list."""
    reports = [{"results": one} if isinstance(one, list) else one for one in reports]
    results = [row for report in reports for row in report["results"]]
    record = {**about, **reports[0], "where": about["where"], "results": results}
    gpu = re.search(r"NVIDIA (\w+)", record["where"])
    peers = any(one.get("peers") for one in results)
    keys = {_key(record, one) for one in results}

    def stays(old):
        kept = [one for one in old["results"] if _key(old, one) not in keys]
        return {**old, "results": kept} if kept else None

    name = ("compare_" if peers else "") + (gpu[1].lower() if gpu else "cpu")
    _put(name, "records", record, stays)


def add(options):
    """The command `add`."""
    reports = [json.loads(Path(file).read_text()) for file in options.files]
    first = reports[0] if isinstance(reports[0], dict) else {}
    launched = "mpirun" in options.command
    where = options.where or (None if launched else first.get("where"))
    if where is None:
        raise SystemExit('records: --where: wanted the GPUs of this run, as "4 x NVIDIA H200"')
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    about = {"where": where, "date": today, "commit": options.commit, "command": options.command}
    about |= {key: value for key in ("note", "setup") if (value := getattr(options, key))}
    (_verified if "cases" in first else _measured)(reports, about)


# --- tables -------------------------------------------------------------------------------------


def _short(where):
    return where.replace("NVIDIA ", "").replace(" 80GB HBM3", "")


def _number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _span(values, text=_number):
    """The value of one run, those of two, or the range of several."""
    shown = [text(value) for value in (values if len(values) < 3 else (min(values), max(values)))]
    if len(set(shown)) == 1:
        return shown[0]
    return (", " if len(values) < 3 else " to ").join(shown)


def _sizes(numbers):
    """8k for 8192."""
    return [f"{int(n) // 1000}k" if len(n) > 3 else n for n in numbers]


def _families(results):
    """(operation, label, [runs of each member]) of each family, in the order of the results."""
    families = {}
    for one in results:
        name = MEMBER.sub("*", _name(one), count=1)
        members = families.setdefault((one["operation"], name), {})
        members.setdefault(_name(one), []).append(one)
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


def _place(record):
    """Sorts records in tables: H200 first."""
    return "H200" not in record["where"], record["where"]


def _table(head, rows):
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def _gpus(found):
    """The GPUs of {row: {GPU: value}}, H200 first."""
    return sorted({gpu for of_gpu in found.values() for gpu in of_gpu}, reverse=True)


def headlines(records):
    """A table: how many times as fast as the fastest peer, as a range over all problems."""
    found, names = {}, {}
    for record in records:
        for one in record["results"]:
            timed = [peer for peer in one.get("peers", ()) if "seconds" in peer]
            if timed:
                best, operation = min(timed, key=lambda peer: peer["seconds"]), one["operation"]
                names.setdefault(operation, {})[best["name"]] = None
                of_gpu = found.setdefault(operation, {})
                of_gpu.setdefault(_short(record["where"]), []).append(best["times_as_fast"])
    for record, _, ours, theirs in _pairs(records):
        if not theirs["error"]:
            of_gpu = found.setdefault("a DSA layer of transformers", {})
            times = theirs["seconds"] / ours["seconds"]
            of_gpu.setdefault(_short(record["where"]), []).append(times)
            names["a DSA layer of transformers"] = ["transformers"]
    rows = [
        [f"`{operation}`" if "::" in operation else operation, ", ".join(names[operation])]
        + [
            f"{min(v):.2f} to {max(v):.2f}" if (v := found[operation].get(g)) else ""
            for g in _gpus(found)
        ]
        for operation in sorted(found)
    ]
    head = ["operation", "the fastest other"]
    return _table([*head, *(f"times as fast on one {gpu}" for gpu in _gpus(found))], rows)


def comparisons(records):
    """A table of every problem and peer, and the notes."""
    rows, notes = [], {}
    for record in sorted(records, key=_place):
        for operation, label, members in _families(record["results"]):
            peers = [[peer for one in runs for peer in one.get("peers", ())] for runs in members]
            for name in dict.fromkeys(peer["name"] for of_one in peers for peer in of_one):
                theirs = [
                    [p for p in of_one if p["name"] == name and "seconds" in p] for of_one in peers
                ]
                version = next((p["version"] for of_one in theirs for p in of_one), "")
                rows.append([
                    f"`{operation}`", _short(record["where"]), label, _times(members),
                    f"{name} {version}", _times(theirs),
                    _joined(theirs, "times_as_fast", "{:.2f}".format), _source(record),
                ])  # fmt: skip
                if "note" in record:
                    notes[f"- `{operation}`, {_short(record['where'])}: {record['note']}"] = None
    rows.sort(key=lambda row: row[0])
    head = "operation GPU benchmark Winnow beside time times-as-fast measured".split()
    return (
        _table([word.replace("-", " ") for word in head], rows) + "\n\n" + "\n".join(sorted(notes))
    )


def _pairs(records):
    """(record, what, Winnow's result, transformers') of `python -m winnow bench transformers`."""
    for record in records:
        found = {one["benchmark"]: one for one in record["results"]}
        for name, ours in found.items():
            what = name.removeprefix("winnow, ")
            for beside in ("sdpa", "eager"):
                if what != name and (theirs := found.get(f"{beside}, {what}")):
                    yield record, what, ours, theirs


def layers(records):
    """The table of _pairs()."""
    rows = []
    for record, what, *pair in _pairs(records):
        cells = [
            one["error"] or f"{_times([[one]])}, {one['peak_bytes'] / 2**30:.1f} GiB"
            for one in pair
        ]
        times = "" if pair[1]["error"] else f"{pair[1]['seconds'] / pair[0]['seconds']:.1f}"
        rows.append([_short(record["where"]), what, *cells, times, _source(record)])
    return _table(["GPU", "", "Winnow", "transformers", "times as fast", "measured"], rows)


def shared(records):
    """The table of `winnow bench context_parallel`."""
    rows = [
        [_short(record["where"]), one["benchmark"], _times([[one]]),
         f"{one['peak_bytes'] / 2**30:.1f} GiB", f"{one['ratio']:.2f}", _source(record)]
        for record in records
        for one in record["results"]
        if one["operation"] == "context_parallel"
    ]  # fmt: skip
    head = "GPUs,,slowest rank,peak memory,of the time without communication,measured"
    return _table(head.split(","), rows)


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
    if beside := _joined(members, "beside_product_seconds", lambda s: _number(1e3 * s)):
        longer = [
            [one["product_beside_seconds"] / one["product_seconds"] - 1 for one in runs]
            for runs in members
        ]
        products = " / ".join(_span(runs, _percent) for runs in longer)
        return f"beside {beside} ms, a product {products} % longer"
    values = _joined(members, "ratio", _percent)
    ceilings = {one["ceiling"] for runs in members for one in runs if "ceiling" in one}
    names = " or ".join(sorted(CEILINGS[one] for one in ceilings))
    return f"{values} % of {names}" if values else ""


def _briefly(one):
    """A benchmark in a few words."""
    share = f" ({_percent(one['ratio'])} %)" if "ratio" in one else ""
    return f"{_name(one)} {_times([[one]])}{share}"


def benches(records):
    """A table and notes for each operation, and one table for the CPU."""
    rows, notes, on_cpu, cpu_notes = {}, {}, [], []
    for record in sorted(records, key=_place):
        results = [
            one for one in record["results"] if "::" in one["operation"] and "peers" not in one
        ]
        where, source, note = _short(record["where"]), _source(record), _note(record)
        if not results:
            continue
        if "NVIDIA" not in record["where"]:
            for operation, group in groupby(results, lambda one: one["operation"]):
                on_cpu.append([f"`{operation}`", ", ".join(map(_briefly, group)), where, source])
            cpu_notes += [f"- {source}: {note}"] * bool(note)
            continue
        alone = {}  # benchmarks without a target and without a family share a row
        for operation, label, members in _families(results):
            if len(members) == 1 and not _to_reach(members):
                alone.setdefault(operation, []).append(", ".join(map(_briefly, members[0])))
            else:
                rows.setdefault(operation, []).append([
                    where, label, _times(members), _rate(members), _of_ceiling(members),
                    _to_reach(members), source,
                ])  # fmt: skip
        for operation, texts in alone.items():
            rows.setdefault(operation, []).append([where, ", ".join(texts), *[""] * 4, source])
        if note:
            notes.setdefault(results[0]["operation"], []).append(f"- {where}, {source}: {note}")
    head = ["where", "benchmark", "time", "rate", "of the ceiling", "to reach", "measured"]
    parts = []
    for operation in sorted(rows):
        parts.append(f"### {operation}\n\n" + _table(head, rows[operation]))
        if operation in notes:
            parts.append("\n".join(notes[operation]))
    head = ["operation", "time, and share of the ceiling", "where", "measured"]
    parts += ["### The CPU backend\n\n" + _table(head, sorted(on_cpu)), "\n".join(cpu_notes)]
    return "\n\n".join(parts)


def _note(record):
    program = f"Measured by {record['program']}." if "program" in record else ""
    return " ".join(filter(None, (record.get("note"), program)))


def _count(entry):
    failed = entry.get("failed", 0)
    return f"{entry['passed']} passed" + (f", {failed} failed" if failed else "")


def verifications(entries):
    """A table for each area; neighbouring entries of one machine, commit and note share a row."""
    parts = []

    def said(one):
        return (one["where"], one["date"], one["commit"], one.get("note", ""))

    for area in dict.fromkeys(one["area"] for one in entries):
        rows = []
        of_area = [one for one in entries if one["area"] == area]
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


def _rect(x, y, width, color, height=BAR):
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{height}" fill="{color}"/>'


def draw(title, found, text):
    """The SVG of {label: {GPU: value}}: a bar for each value, and a line at 1."""
    gpus, most = _gpus(found), max(value for values in found.values() for value in values.values())
    unit, y = (RIGHT - LEFT) / most, TOP
    svg = ['<rect width="100%" height="100%" fill="white"/>', _text(20, 30, title, size=17)]
    for i, name in enumerate(gpus):
        svg.append(_rect(LEFT + 120 * i, 46, 12, COLORS[i], 12))
        svg.append(_text(LEFT + 18 + 120 * i, 57, name))
    for label, values in sorted(found.items()):
        svg.append(_text(LEFT - 10, y + len(values) * BAR / 2 + 4, label, anchor="end", size=12))
        for gpu, value in sorted(values.items(), reverse=True):
            svg.append(_rect(LEFT, y, value * unit, COLORS[gpus.index(gpu)]))
            svg.append(_text(LEFT + value * unit + 5, y + BAR - 2, text(value), GRAY, size=10))
            y += BAR
        y += GAP
    svg.append(_rect(f"{LEFT + unit:.0f}", TOP - 8, 1, INK, y - TOP + 8))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 10}"'
    return "\n".join([f'{head} font-family="sans-serif">', *svg, "</svg>", ""])


def _by_gpu(records, value):
    """{label: {GPU: median of the runs}} of results on one GPU for which value() is not None."""
    found = {}
    for record in records:
        for one in record["results"]:
            number = value(one)
            if number is not None and re.fullmatch(r"NVIDIA [^,]*", record["where"]):
                of_gpu = found.setdefault(f"{one['operation']} {_name(one)}", {})
                of_gpu.setdefault(_short(record["where"]), []).append(number)
    return {
        label: {gpu: sorted(runs)[(len(runs) - 1) // 2] for gpu, runs in of_gpu.items()}
        for label, of_gpu in found.items()
    }


def _beside_peers(one):
    times = [peer["times_as_fast"] for peer in one.get("peers", ()) if "seconds" in peer]
    return min(times, default=None)


def _beside_ceiling(one):
    return one.get("ratio") if "target" in one and "peers" not in one else None


# --- all ----------------------------------------------------------------------------------------


def blocks():
    """{name: generated text between the marks of that name in the pages}"""
    records, entries = read()
    return {
        "headlines": headlines(records),
        "comparisons": comparisons(records),
        "layers": layers(records),
        "shared": shared(records),
        "benches": benches(records),
        "verifications": verifications(entries),
    }


def page(text, made):
    """Returns the text of a page with its blocks replaced."""
    for name in re.findall(r"<!-- records: (\w+) -->", text):
        marks = f"<!-- records: {name} -->", "<!-- end -->"
        pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
        block = f"{marks[0]}\n\n{made[name]}\n\n{marks[1]}"
        text = re.sub(pattern, lambda _, block=block: block, text, count=1, flags=re.DOTALL)
    return text


def outputs():
    """{path: text} of all generated files."""
    records, _ = read()
    made, docs = blocks(), ROOT / "docs"
    files = {docs / name: page((docs / name).read_text(), made) for name in PAGES}
    title = "Times as fast as the fastest other library in the same run"
    files[docs / "benchmarks.svg"] = draw(title, _by_gpu(records, _beside_peers), "{:.2f}".format)
    title = "Share of a product of 8192^3, or of a copy, in the same run"
    files[docs / "ceilings.svg"] = draw(title, _by_gpu(records, _beside_ceiling), "{:.0%}".format)
    return files


def main():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="verb")
    adding = commands.add_parser("add", help="add the output of a program with --json")
    adding.add_argument("files", nargs="+")
    adding.add_argument("--commit", required=True, help="the commit that was measured")
    adding.add_argument("--command", required=True, help="the command that was run, without --json")
    adding.add_argument("--where", help='the GPU, if the report lacks it, or "4 x NVIDIA H200"')
    adding.add_argument("--setup", help="driver and libraries")
    adding.add_argument("--note", help="a remark for readers")
    options = parser.parse_args()
    if options.verb == "add":
        add(options)
    for path, text in outputs().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
