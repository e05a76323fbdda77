"""
Makes tables and a picture of what sample.py and eval/tasks.py have measured:

    python -m eval.report RUN ...                   such as out/quickstart_*
    python -m eval.report RUN ... --beside=FILE     the same, among the rows of eval/results.jsonl
    python -m eval.report eval/results.jsonl        the tables of eval/README.md

It reads run directories and files in the format of RUN/results.jsonl. There is a table for each
config file and metric, the best row first, and the losses of --extrapolate have one of their own.
The picture shows losses and errors over length, if there are several lengths, and the losses of
data/echo.py over the distance of the copy. Models that were trained at different lengths have
tables and panels of their own. Runs that differ only in the seed share a row and a curve. If a
number was measured twice for one row and seed, the later one counts. Numbers that were measured on
different data are in different columns and panels.

With --beside, your own rows are bold, and their curves are thick. Of the other file, only those
numbers are shown that you have measured too.
"""
import os
import re
import statistics
import sys

import config
from config import Mistake
from eval import curves
from eval.curves import METRICS, add_labels, grouped
from sample import comma_separated
from train import read_records

ROW = ("config", "pe", "flags", "settings", "options", "step", "seed")  # whose number it is
COLUMN = ("metric", "split", "multiple", "data", "tokens", "window", "fingerprint")  # of what
TITLES = {  # of panels; others have the name of their config file
    "quickstart": "predicting text",
    "text_small": "predicting text, after ten times the steps",
    "recall_small": "finding a value among fillers",
    "lookup_small, content": "looking up a value by its key",
    "lookup_small, position": "looking up a value by counting back",
    "copy_small": "copying letters",
    "echo_small": "predicting code, trained on 128 bytes",
    "echo_small, in 1024 bytes": "finding a copy in 1024 bytes, trained on 128",
    "echo_long_small": "predicting code, trained further on 1024",
    "echo_long_small, in 1024 bytes": "finding a copy, trained further on 1024",
}

ECHO = r"(?:at(\d+)|new)_\d+"  # splits of data/echo.py, and the distance of the copy

UNITS = {  # how a data set begins: what the lengths in its panel count, and tokens per such unit
    "stdlib": ("byte", 1),
    "echo": ("byte", 1),
    "strings@task=copy": ("letter", 2),  # each letter comes again in the answer
}

def main(words):
    parser = config.Parser(__doc__)
    parser.add_argument("sources", nargs="+", type=config.text, metavar="RUN",
                        help="run directory or file")
    parser.add_argument("--beside", type=config.text, metavar="FILE",
                        help="show the runs among those of this file")
    parser.add_argument("--only", type=comma_separated, metavar="CONFIGS",
                        help="show only these config files, such as quickstart,recall_small [all]")
    parser.add_argument("--metrics", type=comma_separated,
                        help="print only the tables of these metrics, such as token_error [all]")
    parser.add_argument("--rows", type=comma_separated,
                        help="show only these rows, such as rope,pope [all]")
    parser.add_argument("--windows", type=comma_separated, default=[], metavar="ROWS",
                        help="draw a dashed curve of the window_loss of these rows [none]")
    parser.add_argument("--out", type=config.text, default="out/report.png", metavar="FILE",
                        help="the picture to write [out/report.png]")
    args = parser.parse_intermixed_args(words)
    lines = read(args.sources)
    if args.beside:
        lines += comparable(read([args.beside]), lines)
    if args.only:
        known = {line["experiment"] for line in lines}
        lines = [line for line in lines if line["experiment"] in args.only]
        if not lines:
            raise Mistake(f"--only={','.join(args.only)} leaves nothing; there are "
                          f"{', '.join(sorted(known))}")
    if not print_tables(lines, args.metrics, args.rows):
        raise Mistake("no table has these --rows and --metrics; without them, all are printed")
    draw(lines, args.out, args.rows, args.windows)

# --- which numbers count --------------------------------------------------------------------------

def read(sources):
    """Returns the lines that count, which are dicts. A line is one number of a record, and it also
    has its `experiment`, which is the name of its config file."""
    found = {}  # {what was measured, of which row and seed: its last line}
    repeated = {}  # messages, as a dict that keeps their order
    for source in sources:
        folder = os.path.normpath(source)
        path = os.path.join(folder, "results.jsonl") if os.path.isdir(folder) else folder
        if not os.path.isfile(path):
            print(f"left out {source}, which has no results.jsonl", file=sys.stderr)
            continue
        for line in lines_of(path, folder):
            key = str([line[field] for field in (*ROW, *COLUMN)])
            before = found.get(key, line)["run"]
            if before != folder:
                repeated[f"{before} and {folder} are the same row with the same seed, so only the "
                         "second one counts"] = None
            found[key] = line
    for message in repeated:
        print(message, file=sys.stderr)
    if not found:
        raise Mistake("none of these runs has results; measure them first, as in "
                      "python sample.py RUN --evaluate=val")
    return list(found.values())

def lines_of(path, run):
    """Yields a line for each number in a file of results, with `run` as the name of its run,
    because the directory may have been renamed. A record leaves out what is empty."""
    for record in read_records(path):
        if "values" not in record:
            raise Mistake(f"{path} is of an older version; delete it and measure the run again")
        record = {"flags": {}, "settings": None, "options": {}, "multiple": None, "tokens": None,
                  "window": record["trained"], **record, "run": run}
        name = os.path.splitext(os.path.basename(record["config"]))[0]
        record["experiment"] = name or "no config file"
        for metric, value in record.pop("values").items():
            line = {**record, "metric": metric, "value": value}
            if metric != "window_loss":
                line["window"] = None
            yield line

def comparable(others, lines):
    """Returns the lines of `others` that measure the same as one of `lines`, marked as `beside`.
    They share its columns, although data that are made of Python's own source differ between
    versions of Python."""
    same = ("experiment", "metric", "split", "multiple", "data", "tokens", "window")
    own = {values: measured[0]["fingerprint"] for values, measured in grouped(lines, *same).items()}
    found = []
    differ = set()
    for values, measured in grouped(others, *same).items():
        for line in measured if values in own else []:
            if line["fingerprint"] != own[values]:
                differ.add(line["data"])
            found.append({**line, "beside": True, "fingerprint": own[values]})
    for data in sorted(differ):
        print(f"your data set {data} has other contents than the one of the rows that are not bold")
    return found

def name_rows(lines, rows):
    """Labels the lines of a table or panel, and returns those whose label is in `rows`, or all."""
    add_labels(lines)
    return [line for line in lines if not rows or line["label"] in rows]

# --- tables ---------------------------------------------------------------------------------------

def print_tables(lines, metrics=None, rows=None):
    """Prints the tables in Markdown, or only those of these metrics and rows, and returns how many
    there were."""
    printed = 0
    lines = [{**line, "over_length": line["multiple"] is not None} for line in lines]
    for (experiment, metric, trained, over_length), table in grouped(
            lines, "experiment", "metric", "trained", "over_length").items():
        if metric == "window_loss" or metrics and metric not in metrics:
            continue
        if over_length:
            table = table + windows_at_the_end(lines, experiment, trained)
        table = name_rows(table, rows)
        if table:
            print_table(experiment, metric, table)
            printed += 1
    return printed

def windows_at_the_end(lines, experiment, trained):
    """Returns the lines with the window_loss at the largest multiple. It joins the losses as their
    last column."""
    found = [line for line in lines if line["metric"] == "window_loss"
             and (line["experiment"], line["trained"]) == (experiment, trained)]
    last = max((line["multiple"] for line in found), default=None)
    return [line for line in found if line["multiple"] == last]

def print_table(experiment, metric, table):
    """Prints a table, whose rows are sorted by the last column that is not one of window_loss."""
    columns = list(grouped(table, *COLUMN))
    data = {line["data"] for line in table}
    steps = sorted({line["step"] for line in table})
    about = [experiment, *data] if len(data) == 1 else [experiment]
    last = [column for column in columns if column[0] == metric][-1]
    names = headings(columns)
    print(f"\n{', '.join(about)}, step {' and '.join(map(str, steps))}: "
          f"{METRICS.get(metric, metric)}, mean (lowest–highest), sorted by "
          f"{names[columns.index(last)]}\n")
    print(f"| row | seeds | {' | '.join(names)} |")
    print("| --- " * (2 + len(columns)) + "|")
    printed = []  # (the mean in the last column, the row)
    for (beside, label), row in grouped(table, "beside", "label").items():
        cells = grouped(row, *COLUMN)
        seeds = {line["seed"] for line in row}
        marks = "`{}`" if beside or not any(line.get("beside") for line in table) else "**{}**"
        words = [marks.format(label), str(len(seeds))]
        for column in columns:
            values = [line["value"] for line in cells.get(column, [])]
            words.append(cell(values, metric, len(seeds)))
        mean = float("inf")
        if last in cells:
            mean = statistics.fmean(line["value"] for line in cells[last])
        printed.append((mean, f"| {' | '.join(words)} |"))
    for _, words in sorted(printed):
        print(words)

def headings(columns):
    """Returns the headings of columns, which are tuples of the fields COLUMN. Data, their checksum
    and the number of tokens are named only if there are several."""
    several = {}
    for field, values in zip(COLUMN, zip(*columns)):
        several[field] = len(set(values) - {None}) > 1
    found = []
    for metric, split, multiple, data, tokens, window, fingerprint in columns:
        heading = f"{split} {multiple:g}x" if multiple else split
        if metric == "window_loss":
            heading += f" in windows of {window}" if several["window"] else " in windows"
        if several["data"]:
            heading += f", {data}"
        if several["tokens"] and tokens:
            heading += f", {tokens:,} tokens"
        if several["fingerprint"] and not several["data"]:
            heading += f" (data {fingerprint})"
        found.append(heading)
    return found

def cell(values, metric, seeds):
    """Returns the text of a cell: the mean, the lowest and the highest value in brackets if they
    differ, and how many of the row's seeds have a value if some have not."""
    if not values:
        return "–"
    decimals = 1 if metric.endswith("_error") else 3
    text = f"{statistics.fmean(values):.{decimals}f}"
    low, high = f"{min(values):.{decimals}f}", f"{max(values):.{decimals}f}"
    if low != high:
        text += f" ({low}–{high})"
    if len(values) < seeds:
        text += f" [{len(values)} of {seeds} seeds]"
    return text

# --- the picture over length or distance ----------------------------------------------------------

def draw(lines, path, rows=None, windows=()):
    """Draws what was measured at several lengths, which is the loss of --extrapolate or the errors
    of --evaluate, and the loss of echoes at several distances. There is a panel for each config
    file, data set and kind of question."""
    named = []
    for same in grouped([*over_length(lines), *over_distance(lines)], "experiment").values():
        named += name_rows(same, rows)
    panels = {}
    for key, panel in grouped(
            named, "experiment", "kind", "data", "tokens", "fingerprint", "trained").items():
        if len({line["at"] for line in panel}) > 1:
            panels[key] = panel
    if not panels:
        return
    names = [f"{experiment}, {kind}" if kind else experiment for experiment, kind, *_ in panels]
    colors = curves.colors_of(line for panel in panels.values() for line in panel)
    figure, axes = curves.panels(len(panels), 2, 4.5 if len(panels) > 1 else 7, 3)
    of_distance = []
    for ax, name, key, panel in zip(axes, names, panels, panels.values()):
        drawn = [line for line in panel if line["metric"] != "window_loss"]
        drawn += [{**line, "label": f"{line['label']}, in windows of {line['trained']}"}
                  for line in panel if line["metric"] == "window_loss" and line["label"] in windows]
        unit, tokens = unit_of(key[2])
        drawn = [{**line, "trained": line["trained"] // tokens, "at": line["at"] // tokens}
                 for line in drawn]
        ticks = {line["at"]: line["tick"] or line["at"] for line in drawn}
        curves.draw_curves(ax, drawn, "at", "value", colors)
        curves.label_axis(ax, drawn[0]["metric"], unit)
        title = TITLES.get(name, name)
        if names.count(name) > 1:
            title += f" ({key[2]}, data {key[4]})"
        curves.length_axis(ax, ticks)
        ax.set_title(title, loc="left")
        ax.set_xlabel(f"{drawn[0]['x']}, {unit}s; dashed: trained length")
        if drawn[0]["x"] != "length":
            of_distance.append(ax)
    for ax in of_distance[1:]:  # their losses are those of the same spans
        ax.sharey(of_distance[0])
    curves.name_curves(*axes)
    curves.save(figure, path)

def over_length(lines):
    """Yields the losses of --extrapolate and the errors of --evaluate. Each has a place `at` on the
    axis `x`, what its `tick` says, and the `kind` of its question."""
    for line in lines:
        if line["multiple"] or line["metric"] == "token_error":
            if not re.fullmatch(ECHO, line["split"]):
                yield {**line, "kind": kind_of(line["split"]), "x": "length",
                       "at": line["length"], "tick": ""}

def over_distance(lines):
    """Yields the losses of data/echo.py over the distance of the copy, in the longest rows, because
    only they have several distances. New text, which has no copy, is farthest to the right."""
    echoes = []
    for line in lines:
        split = re.fullmatch(ECHO, line["split"])
        if split and line["metric"] == "loss":
            echoes.append((line, split[1]))
    longest = max((line["length"] for line, _ in echoes), default=0)
    for line, distance in echoes:
        if line["length"] == longest:
            yield {**line, "kind": f"in {longest} bytes", "x": "distance of the copy",
                   "at": int(distance or 2 * longest), "tick": "" if distance else "no copy"}

def unit_of(data):
    """Returns what the lengths of a data set count, and how many tokens such a unit takes."""
    for name, unit in UNITS.items():
        if data.startswith(name) and "tokenizer=" not in data:
            return unit
    return "token", 1

def kind_of(split):
    """Returns what a split asks, whatever its length: position for position_x2. It is empty if all
    splits ask the same, as in val and x2."""
    kind = f"_{split}".partition("_x")[0].strip("_")
    return "" if kind == "val" else kind

if __name__ == "__main__":
    config.run(main)
