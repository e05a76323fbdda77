"""
Makes tables of what sample.py and eval/tasks.py have measured, over runs and seeds:

    python -m eval.report RUN ...                      such as out/quickstart_*
    python -m eval.report RUN ... --out=out/report     writes out/report.csv and out/report.png

It reads each RUN/results.jsonl, and if a number was measured twice, the later one counts. Markdown
tables are printed, the CSV file has a row for each number, and the picture shows losses and errors
over length, if there are several lengths. Runs that were trained with the same options but for the
seed, and were measured at the same step, share a row and a curve. Numbers that were measured on
different data are in different columns and panels.
"""
import csv
import os
import re
import statistics
import sys

import config
from config import Mistake
from eval import curves
from eval.curves import METRICS
from model import read_records


def main(words):
    parser = config.Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument("--out", default="out/report", metavar="PATH",
                        help="what to write, without .csv and .png [out/report]")
    args = parser.parse_intermixed_args(words)
    lines = read(args.runs)
    print_tables(lines)
    write_csv(lines, f"{args.out}.csv")
    draw_by_length(lines, f"{args.out}.png")

# --- which numbers count --------------------------------------------------------------------------

def read(folders):
    """Returns the lines of all results.jsonl that count, as dicts. Each has a `label`, which is the
    name of its row and its curve."""
    found = {}  # {what was measured: its last line}
    for folder in map(os.path.normpath, folders):
        if not os.path.isfile(os.path.join(folder, "results.jsonl")):
            print(f"left out {folder}, which has no results.jsonl", file=sys.stderr)
            continue
        for line in read_records(folder, "results.jsonl"):
            if "step" not in line:
                raise Mistake(f"{folder} has results of an older version; delete its results.jsonl "
                              "and measure it again")
            line["run"] = folder  # it may have had another path when it was measured
            found[folder, line["options"], line["split"], line["metric"]] = line
    if not found:
        raise Mistake("none of these runs has results; measure them first, as in "
                      "python sample.py RUN --evaluate=val")
    panels = {}  # {title: lines}
    for line in found.values():
        panels.setdefault(title_of(line), []).append(line)
    for panel in panels.values():
        keys = [(line["run"], line["options"], line["step"], None) for line in panel]
        label_of = curves.labels(keys)
        for line, key in zip(panel, keys):
            line["label"] = label_of[key]
    return list(found.values())

def config_of(line):
    """Returns the name of the config file without its folder, which may be written in many ways."""
    return os.path.basename(line["config"]) or "no config file"

def title_of(line):
    """Returns the title under which a picture shows the runs of a config file."""
    return config_of(line).removesuffix(".py").removesuffix("_small")

def tell_apart(names):
    """Returns {(name, checksum of data): heading} for a list of such pairs. The heading is the
    name, to which the checksum is added if there are several with this name, because numbers from
    different data must neither be averaged nor compared."""
    names = dict.fromkeys(names)
    often = [name for name, _ in names]
    headings = {}
    for name, data in names:
        headings[name, data] = name
        if often.count(name) > 1:
            headings[name, data] += f" (data {data})"
    return headings

# --- tables ---------------------------------------------------------------------------------------

def print_tables(lines):
    """Prints a Markdown table for each config file and metric, with a row for each label and a
    column for each split. `step` is that at which the runs were measured."""
    tables = {}
    for line in lines:
        tables.setdefault((config_of(line), line["metric"]), []).append(line)
    for (name, metric), table in tables.items():
        what = METRICS.get(metric, metric)
        columns = tell_apart((line["split"], line["data"]) for line in table)
        print(f"\n{name}: {what}, mean ± standard deviation (lowest to highest)\n")
        print(f"| run | seeds | step | {' | '.join(columns.values())} |")
        print("| --- " * (3 + len(columns)) + "|")
        rows = {}  # {label: lines}
        for line in table:
            rows.setdefault(line["label"], []).append(line)
        for label, row in rows.items():
            runs = {line["run"] for line in row}
            seeds = {line["seed"] for line in row}
            cells = [label, str(len(seeds)), str(row[0]["step"])]
            for split, data in columns:
                values = [line["value"] for line in row
                          if line["split"] == split and line["data"] == data]
                cell = spread(values)
                if 0 < len(values) < len(runs):
                    cell += f" [{len(values)} of {len(runs)} runs]"
                cells.append(cell)
            print(f"| {' | '.join(cells)} |")

def spread(values):
    """Returns the mean ± the sample standard deviation (lowest to highest)."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):#.4g}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.2g} ({min(values):#.4g} to {max(values):#.4g})"

def write_csv(lines, path):
    """Writes the lines to a CSV file, with a column for each of their keys."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    keys = dict.fromkeys(key for line in lines for key in line)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(lines)
    print(f"wrote {path}")

# --- the picture over length ----------------------------------------------------------------------

def draw_by_length(lines, path):
    """Draws what was measured at several lengths, which is the loss of --extrapolate or the errors
    of --evaluate. There is a panel for each config file and kind of split, so content and
    content_x2 share one, and position and position_x2 another."""
    groups = {}  # {(title, checksum of data): lines}
    for line in lines:
        extrapolates = line["metric"] == "loss" and re.search(r" [\d.]+x$", line["split"])
        if extrapolates or line["metric"] == "token_error":
            title = title_of(line)
            kind = kind_of(line["split"])
            if kind:
                title += f", {kind}"
            groups.setdefault((title, line.get("data")), []).append(line)
    groups = {key: group for key, group in groups.items()
              if len({line["length"] for line in group}) > 1}
    if not groups:
        return
    figure, axes = curves.panels(len(groups), 3, 4, 3)
    titles = tell_apart(groups)
    styles = {}
    for ax, (key, group) in zip(axes, groups.items()):
        curves.draw_curves(ax, group, "length", "value", styles)
        curves.label_axis(ax, group[0]["metric"])
        lengths = sorted({line["length"] for line in group})
        ax.set_xscale("log", base=2)
        rotation = 90 if len(lengths) > 6 else 0  # so that many labels do not overlap
        ax.set_xticks(lengths, lengths, fontsize=8, rotation=rotation)
        ax.minorticks_off()
        ax.set(title=titles[key], xlabel="length, tokens; dashed: as trained")
    curves.save(figure, path)

def kind_of(split):
    """Returns what a split tests besides the length. For content and content_x2 this is content.
    For val, x2, and the splits "val 1x" and "val 2x" of --extrapolate, it is empty."""
    return re.sub(r"((^|[ _])(val|x[\d.]+|[\d.]+x))+$", "", split)

if __name__ == "__main__":
    config.run(main)
