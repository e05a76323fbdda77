"""
Makes tables and a picture of what sample.py and eval/ have measured:

    python -m eval.report RUN ...                   such as out/quickstart_*
    python -m eval.report RUN ... --beside=FILE     the same, among the rows of eval/results.jsonl
    python -m eval.report eval/results.jsonl        the tables of eval/README.md

It reads run directories and files in the format of RUN/results.jsonl. There is a table for each
config file and metric, the best row first, and the losses of --extrapolate have one of their own.
The picture has a panel for each kind of question that was measured at several lengths, or at
several places on another axis that the data set names. Models that were trained at different
lengths have tables and panels of their own, and so have numbers that were measured on different
data. Runs that differ only in the seed share a row and a curve.

With --beside, your own rows are bold, and their curves are thick. From the other file, only the
numbers that you have measured, too, are shown. Below each table it says where your rows stand, and
whether one seed can tell.
"""
import statistics

import config
from config import require
from eval import draw
from eval.records import COLUMN, comparable, grouped, labelled, read

PANEL = 3  # inches, the height of a panel

def main(words):
    parser = config.Parser(__doc__)
    parser.add_argument("sources", nargs="+", type=config.text, metavar="RUN",
                        help="run directory or file")
    parser.add_argument("--beside", type=config.text, metavar="FILE",
                        help="show the runs among those of this file")
    add_choices(parser)
    parser.add_argument("--windows", type=config.comma_separated, default=[], metavar="ROWS",
                        help="draw a dashed curve of the window_loss of these rows [none]")
    parser.add_argument("--out", type=config.text, default="out/report.png", metavar="FILE",
                        help="the picture to write [out/report.png]")
    args = parser.parse_intermixed_args(words)
    lines = read(args.sources)
    if args.beside:
        lines += comparable(read([args.beside]), lines)
    lines = chosen(lines, args)
    print_tables(lines, args)
    if any(line.get("beside") for line in lines):
        print("\nYour own rows are bold. The others may come from another CPU, which rounds "
              "differently. To see how much that matters, train one of their methods, too.")
    draw_panels(lines, args.out, args.rows, args.windows)

def add_choices(parser):
    """Adds the options that say what is shown."""
    parser.add_argument("--only", type=config.comma_separated, metavar="CONFIGS",
                        help="show only these config files, such as quickstart,recall_small [all]")
    parser.add_argument("--trained", type=config.count, metavar="N",
                        help="show only models that were trained on N tokens at a time [all]")
    parser.add_argument("--seed", type=config.integer, metavar="N",
                        help="show only runs with this seed [all]")
    parser.add_argument("--data", type=config.text, metavar="SET",
                        help="show only what was measured on this data set [all]")
    parser.add_argument("--options", type=config.comma_separated,
                        help="show only runs that differ from their config file in none but these "
                             "options, pe and the seed, such as learning_rate; or none [all]")
    parser.add_argument("--metrics", type=config.comma_separated,
                        help="print only the tables of these metrics, such as token_error [all]")
    parser.add_argument("--rows", type=config.comma_separated,
                        help="show only these rows, such as rope,pope [all]")
    parser.add_argument("--row", action="append", dest="rows",
                        help="show only this row, whose name may contain a comma, and others that "
                             "are named in the same way")
    parser.add_argument("--columns", type=config.comma_separated,
                        help="print only these columns, such as x8,x16 [all]")
    parser.add_argument("--gain", action="store_true",
                        help="add a column with the loss in windows minus that at the same length, "
                             "which is what the model gains from distant text")

def chosen(lines, args):
    """Returns the lines of the config files, trained length, seed and data set that are to be
    shown."""
    known = {line["experiment"] for line in lines}
    lines = [line for line in lines if line["experiment"] in (args.only or known)]
    given = [f"--only={','.join(args.only)}"] if args.only else []
    if args.options:
        given.append(f"--options={','.join(args.options)}")
        lines = [line for line in lines if {*line["flags"], *line["options"]} <= {*args.options}]
    for name in ("trained", "seed", "data"):
        value = getattr(args, name)
        if value is not None:
            given.append(f"--{name}={value}")
            lines = [line for line in lines if line[name] == value]
    require(lines, f"{' '.join(given)} leaves nothing; there are {', '.join(sorted(known))}")
    return lines

# --- tables ---------------------------------------------------------------------------------------

def print_tables(lines, args):
    """Prints the tables in Markdown, with what the options of add_choices say."""
    printed = False
    lines = [{**line, "over_length": line["multiple"] is not None} for line in lines]
    for (experiment, metric, trained, over_length), table in grouped(
            lines, "experiment", "metric", "trained", "over_length").items():
        if metric == "window_loss" or args.metrics and metric not in args.metrics:
            continue
        if over_length:
            table = table + windows_at_the_end(lines, experiment, trained)
        if args.gain:
            table = table + gains(table)
        table = labelled(table, args.rows)
        if table:
            print_table(experiment, metric, trained, table, args.columns)
            printed = True
    require(printed, f"no table has these rows and metrics; the metrics are "
            f"{', '.join(sorted({line['metric'] for line in lines}))}, and the rows "
            f"{', '.join(sorted({line['label'] for line in labelled(lines)}))}")

def windows_at_the_end(lines, experiment, trained):
    """Returns the lines with the window_loss at the largest multiple. It joins the losses as their
    last column."""
    found = [line for line in lines if line["metric"] == "window_loss"
             and (line["experiment"], line["trained"]) == (experiment, trained)]
    last = max((line["multiple"] for line in found), default=None)
    return [line for line in found if line["multiple"] == last]

def gains(table):
    """Returns lines with what each run gains from distant text: the loss in windows, minus the loss
    of the same texts when all of them is in view."""
    found = []
    of_run = ("pe", "flags", "settings", "options", "step", "seed", "beside", "data", "fingerprint",
              "split", "multiple", "tokens")
    for same in grouped(table, *of_run).values():
        losses = [line["value"] for line in same if line["metric"] == "loss"]
        for line in same:
            if line["metric"] == "window_loss" and losses:
                found.append({**line, "metric": "gain", "value": line["value"] - losses[0]})
    return found

def print_table(experiment, metric, trained, table, only_columns=None):
    """Prints a table, whose rows are sorted by the last column of its metric. If it has own rows
    and others, it says where the own ones stand."""
    columns = grouped(table, *COLUMN)
    names = headings(list(columns), trained)
    if only_columns:
        shown = [name in only_columns for name in names]
        require(any(shown), f"none of these columns is there; there are {', '.join(names)}")
        columns = {column: columns[column] for column, is_shown in zip(columns, shown) if is_shown}
        names = [name for name in names if name in only_columns]
    last = ([column for column in columns if column[0] == metric] or list(columns))[-1]
    heading_of_last = names[list(columns).index(last)]
    has_others = any(line.get("beside") for line in table)
    print(f"\n{describe(experiment, metric, trained, table)}, sorted by {heading_of_last}\n")
    print(f"| row | seeds | {' | '.join(names)} |")
    print("| --- " * (2 + len(columns)) + "|")
    printed = []  # (the mean in the last column, the row)
    for (beside, label), row in grouped(table, "beside", "label").items():
        cells = grouped(row, *COLUMN)
        seeds = {line["seed"] for line in row}
        words = [f"**{label}**" if has_others and not beside else f"`{label}`", str(len(seeds))]
        for column in columns:
            values = [line["value"] for line in cells.get(column, [])]
            words.append(cell(values, metric, len(seeds)))
        mean = float("inf")
        if last in cells:
            mean = statistics.fmean(line["value"] for line in cells[last])
        printed.append((mean, f"| {' | '.join(words)} |"))
    for _, words in sorted(printed):
        print(words)
    if has_others:
        print()
        for name, column in zip(names, columns.values()):
            print(f"{name}{where_rows_stand(column)}")

def describe(experiment, metric, trained, table):
    """Returns what a table shows, in words. A row that was trained for another number of steps says
    so itself."""
    words = [experiment]
    data = {line["data"] for line in table}
    if len(data) == 1:
        words.append(f"on {data.pop()}")
    words.append(f"trained on {trained} tokens at a time")
    steps = {line["step"] for line in table if "max_iters" not in line["flags"]}
    if len(steps) == 1:
        words.append(f"for {steps.pop()} steps")
    units = {line["unit"] for line in table if line["per_unit"] == 1}
    unit = units.pop() if len(units) == 1 else "token"
    return f"{', '.join(words)}: {draw.says(metric, unit)}, mean (lowest–highest)"

def headings(columns, trained):
    """Returns the headings of columns, which are tuples of the fields COLUMN. Data, their checksum
    and the number of tokens are named only if there are several. Lengths are multiples of the
    trained length, unless some are shorter, because 1x would then be the longest."""
    several = {}
    for field, values in zip(COLUMN, zip(*columns)):
        several[field] = len(set(values) - {None}) > 1
    has_shorter = any(multiple and multiple < 1 for _, _, multiple, *_ in columns)
    found = []
    for metric, split, multiple, data, tokens, window, fingerprint in columns:
        heading = split
        if multiple and has_shorter:
            heading += f" {multiple * trained:g}"
        elif multiple:
            heading += f" {multiple:g}x"
        if metric == "gain":
            heading = "gain"
        if metric == "window_loss":
            heading += " in windows"
        if window and several["window"]:
            heading += f" over windows of {window}" if metric == "gain" else f" of {window}"
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
    mean, low, high = (f"{round(value, decimals) + 0.0:.{decimals}f}"  # rather than -0.000
                       for value in (statistics.fmean(values), min(values), max(values)))
    text = mean
    if low != high:
        dash = " to " if low.startswith("-") else "–"
        text += f" ({low}{dash}{high})"
    if len(values) < seeds:
        text += f" [{len(values)} of {seeds} seeds]"
    return text

def where_rows_stand(column):
    """Returns what follows the heading of a column in a sentence about its own rows. It gives the
    distance of each to the two nearest other rows, divided by the spread, which is the standard
    deviation between the seeds of another row."""
    means = {}  # {(is it beside, label): mean}
    variances = []
    for (beside, label), row in grouped(column, "beside", "label").items():
        values = [line["value"] for line in row]
        means[bool(beside), label] = statistics.fmean(values)
        if beside and len(values) > 1:
            variances.append(statistics.variance(values))
    others = {label: mean for (beside, label), mean in means.items() if beside}
    spread = statistics.fmean(variances) ** 0.5 if variances else 0.0
    if len(others) < 2 or not spread:
        return ": there is too little to compare with."
    sentences = []
    for (beside, label), mean in means.items():
        if not beside:
            near = sorted(others, key=lambda other: abs(others[other] - mean))[:2]
            words = [distance((mean - others[other]) / spread, other) for other in near]
            sentences.append(f"{label} is {' and '.join(words)}.")
    if statistics.stdev(others.values()) < 2 * spread:
        sentences.append("One seed says little here, because the methods lie so close together.")
    return f" (a spread is {spread:.3g}): {' '.join(sentences)}"

def distance(spreads, other):
    """Returns a distance in words, such as "2.0 spreads worse than rope"."""
    if not spreads:
        return f"equal to {other}"
    than = "worse than" if spreads > 0 else "better than"
    return f"{abs(spreads):.1f} spreads {than} {other}"

# --- the picture ----------------------------------------------------------------------------------

def draw_panels(lines, path, rows=None, windows=()):
    """Draws the loss of --extrapolate and what else was measured at several places of an axis, with
    a panel for each experiment, data set and kind of question. windows are the rows whose
    window_loss is drawn as well."""
    panels = []
    for same in grouped(filter(has_place, lines), "experiment").values():
        for panel in grouped(labelled(same, rows), "kind", "data", "tokens", "fingerprint",
                             "trained").values():
            drawn = [line for line in panel if line["metric"] != "window_loss"]
            drawn += [{**line, "label": f"{line['label']}, in windows of {line['window']}"}
                      for line in panel
                      if line["metric"] == "window_loss" and line["label"] in windows]
            if len({line["at"] for line in drawn}) > 1:
                panels.append(drawn)
    if not panels:
        return
    titles = [title_of(panel) for panel in panels]
    colors = draw.colors_of(line for panel in panels for line in panel)
    figure, axes = draw.panels(len(panels), 2, 6, PANEL)
    for ax, title, panel in zip(axes, titles, panels):
        first = panel[0]
        if titles.count(title) > 1:
            title = f"{title} ({first['data']}, {first['fingerprint']})"
        trained = first["trained"] // first["per_unit"]
        draw.curves(ax, [{**line, "trained": trained} for line in panel], "value", colors)
        draw.length_axis(ax, {line["at"]: line["tick"] or line["at"] for line in panel})
        draw.name_curves(ax, PANEL)
        ax.set_title(draw.plain(title, 60), loc="left", fontsize=10)
        ax.set_xlabel(f"{first['axis']}, {first['unit']}s; dashed: trained length")
        ax.set_ylabel(draw.says(first["metric"], first["unit"]))
    draw.save(figure, path)

def has_place(line):
    """Returns whether a line has a place in the picture: its axis has a name, and if this is
    length, it is a loss of --extrapolate or an error."""
    if line["axis"] == "length":
        return line["multiple"] is not None or line["metric"] == "token_error"
    return line["axis"] and line["metric"] == "loss"

def title_of(panel):
    """Returns the title of a panel: that of the experiment, and what its splits ask."""
    first = panel[0]
    words = [first["title"] or first["experiment"]]
    if first["kind"]:
        words.append(first["kind"])
    return ": ".join(words)

if __name__ == "__main__":
    config.run(main)
