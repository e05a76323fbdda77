"""
Draws curves of one or more runs (this needs matplotlib):

    python -m eval.curves training RUN ...            every quantity in log.jsonl, over steps
    python -m eval.curves loss_by_position RUN ...    the loss far beyond the trained length

Runs that differ only in the seed form one curve, which is their mean, in a band from the lowest to
the highest. The pictures are out/training.png and out/loss_by_position.png.
"""
import itertools
import math
import os
import statistics
import textwrap

import torch

import config
import train
from config import Mistake
from sample import (
    EVAL_TOKENS,
    Run,
    add_data_options,
    add_run_options,
    require_text,
    token_losses,
    with_options,
)

METRICS = {  # what a table or an axis says of a metric
    "loss": "loss, nats per token",
    "window_loss": "loss in windows of the trained length, nats per token",
    "token_error": "wrong answers, %",
    "sequence_error": "rows with a wrong answer, %",
}
COLORS = {  # of the published methods, which have the same colour in every picture
    "nope": "#8C8C8C", "learned": "#7A4B1E", "sinusoidal": "#B8996B",
    "rope": "#000000", "carope": "#882255", "pope": "#C84E00",
    "relative": "#9A6BD9", "t5": "#D987B8", "alibi": "#0072B2", "fox": "#45B0E6",
    "cope": "#009E73", "cope_mlp": "#86CFA8", "cope_alibi": "#2F6068",
    "expe": "#E69F00", "exqpe": "#F2CF63", "cope+rope": "#8B9A00",
}
OTHER_COLORS = ("#E6009E", "#6A00F4")  # all other methods take turns with these
STYLES = ("-", "--", ":", "-.")  # of several curves of one method
LONGEST = 8  # loss_by_position reads segments of this many times the trained length
POINTS = 32  # and averages their positions in this many groups, because single ones are noisy
MOST_CURVES = 24  # in a panel; more could not be told apart
HIGHEST = 1.05  # where the topmost name beside a panel may end, if 1 is the panel's height

def main(words):
    parser = config.Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("training", description=__doc__)
    training.add_argument("runs", nargs="+", type=config.text, metavar="RUN",
                          help="run directory")
    training.set_defaults(draw=draw_training)
    loss = commands.add_parser("loss_by_position", description=__doc__)
    add_run_options(loss)
    add_data_options(loss)
    loss.add_argument("--eval_tokens", type=config.integer, default=EVAL_TOKENS, metavar="N",
                      help=f"tokens to read in all segments together [{EVAL_TOKENS}]")
    loss.set_defaults(draw=draw_loss_by_position)
    for name, command in commands.choices.items():
        command.add_argument("--out", type=config.text, default=f"out/{name}.png", metavar="FILE",
                             help=f"the picture to write [out/{name}.png]")
    args = parser.parse_args(words)
    args.draw(args)

# --- which lines belong together ------------------------------------------------------------------

def grouped(lines, *fields):
    """Returns {values of these fields: the lines that have them}. A line is a dict."""
    groups = {}
    for line in lines:
        values = [line.get(field) for field in fields]
        values = tuple(str(value) if isinstance(value, dict) else value for value in values)
        groups.setdefault(values, []).append(line)
    return groups

def add_labels(lines):
    """Gives each line of a table or a picture a `label`, which is the name of its row or its curve.
    Lines share it if they differ only in the seed. It begins with pe and the options that were
    changed at test time. The config file and the flags follow, except for those that all lines
    share, as in "pope --pope_delta=uniform" or "rope@rope_scaling=ntk,rope_factor=8". If lines
    would share a label but differ in the step or the settings, the label ends with these."""
    names = [parts_of_name(line) for line in lines]
    shared = set.intersection(*map(set, names))  # what all have says nothing
    for line, (pe, *others) in zip(lines, names):
        line["label"] = " ".join([pe, *(part for part in others if part not in shared)])
    # other steps, or a config file that was edited between two runs
    for field in ("step", "settings"):
        for same in grouped(lines, "beside", "label").values():
            if len({line[field] for line in same} - {None}) > 1:
                for line in same:
                    line["label"] += f" ({field} {line[field]})"

def parts_of_name(line):
    """Returns the words of which a label may consist, of which the first is always part of it."""
    name = [with_options(line["pe"], line["options"]), os.path.basename(line["config"])]
    for flag, value in line["flags"].items():
        if flag == "init_from":  # its name may end in the same method and seed
            value = value.removesuffix(f"_seed{line['seed']}")
            if value.endswith(f"_{line['pe']}"):
                value = value.removesuffix(line["pe"]) + "*"
        name.append(f"--{flag}={value}")
    return name

def read_log(folder):
    """Returns what identifies a run, as a dict with the fields of a result, and the records of its
    steps."""
    path = os.path.join(folder, "log.jsonl")
    if not os.path.exists(path):
        raise Mistake(f"{folder} is not a run directory, because it has no log.jsonl")
    records = train.read_log(path)
    start = [record for record in records if "config" in record][-1]
    about = {"run": folder, "config": start["config"]["config"], "pe": start["config"]["pe"],
             "flags": start.get("flags", {}), "settings": start.get("settings"), "options": {},
             "seed": start["config"]["seed"], "step": None}
    return about, [record for record in records if "step" in record]

# --- parts that all pictures share ----------------------------------------------------------------

def panels(n, across, width, height, **options):
    """Returns a figure and a list of its n axes, at most `across` in a row. width and height are
    those of a panel, in inches, and options are those of Figure.subplots. Only pictures need
    matplotlib, so it is imported here."""
    Figure = config.optional("matplotlib.figure", "matplotlib").Figure
    columns = min(across, n)
    rows = math.ceil(n / across)
    figure = Figure((width * columns + 1, height * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat[n:]:
        ax.set_visible(False)
    return figure, list(axes.flat[:n])

def decorate(ax, trained=()):
    """Adds a grid and a dashed line at each trained length, and removes half of the frame."""
    for length in trained:
        ax.axvline(length, color="0.4", linestyle="--", linewidth=0.8)
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)

def save(figure, path):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")

def colors_of(lines):
    """Returns {pe: colour} for all panels of a picture. The published methods have the colours of
    COLORS, whatever else is in the picture. The others take turns with OTHER_COLORS."""
    used = dict.fromkeys(line["pe"] for line in lines)
    others = [pe for pe in used if pe not in COLORS]
    return COLORS | dict(zip(others, itertools.cycle(OTHER_COLORS)))

def draw_curves(ax, lines, x, y, colors):
    """Draws line[y] against line[x], with a curve for each label. A point is drawn only if all
    seeds of its curve have it. Curves of one colour differ in their style. `trained`, if a line has
    it, is marked, and `beside` makes a curve thin. Of more than MOST_CURVES curves, those that are
    not beside others are drawn first, and then those that end lowest. Call name_curves when all
    curves of the figure are drawn."""
    curves = []  # of (is it beside, the height of its end, label, colour, {x: its values})
    for (label, pe, beside), curve in grouped(
            [line for line in lines if y in line], "label", "pe", "beside").items():
        points = {}  # {x: {seed: y}}
        for line in curve:
            points.setdefault(line[x], {})[line["seed"]] = line[y]
            if line.get("tick"):  # it is beside the axis, so a gap comes before it
                points.setdefault(line[x] - 1, {})[line["seed"]] = math.nan
        seeds = max(points.values(), key=len).keys()
        values = {at: list(points[at].values()) for at in sorted(points)
                  if points[at].keys() == seeds}
        end = statistics.fmean(values[max(values)])
        if math.isnan(end):  # the run diverged, and nan has no place in an order
            end = math.inf
        curves.append((bool(beside), end, label, colors[pe], values))
    if len(curves) > MOST_CURVES:
        chosen = sorted(curves, key=lambda curve: curve[:2])[:MOST_CURVES]
        print(f"drew only {MOST_CURVES} of {len(curves)} curves, those that end lowest")
        curves = [curve for curve in curves if curve in chosen]

    styles = {}  # {colour: how many curves have it}
    for beside, _, label, color, values in curves:
        style = STYLES[styles.get(color, 0) % len(STYLES)]
        styles[color] = styles.get(color, 0) + 1
        front = 1.2 if beside else 2  # how thick a curve is, and which ones cover others
        means = [statistics.fmean(of_seeds) for of_seeds in values.values()]
        ax.plot(list(values), means, style, label=label, color=color, marker=".", linewidth=front,
                zorder=front)
        low, high = zip(*((min(of_seeds), max(of_seeds)) for of_seeds in values.values()))
        ax.fill_between(list(values), low, high, color=color, alpha=0.15, linewidth=0, zorder=1)
    decorate(ax, {line["trained"] for line in lines if line.get("trained")})

def name_curves(*axes):
    """Writes the name of each curve to the right of its panel, with a thin line to the curve's end,
    which is dotted if it crosses the panel. Names that would overlap move apart. A panel with too
    many names gets a legend below instead, and the figure grows by as much. axes are all panels of
    a figure."""
    figure = axes[0].figure
    figure.draw_without_rendering()  # only now is the size of a panel known
    legends = {}  # {row of panels: the legends below them}
    for ax in axes:
        line_height = 12 * figure.dpi / 72 / ax.bbox.height  # in fractions of the panel, like all
        to_panel = ax.transData - ax.transAxes
        ends = []  # (height, x, number, name, curve)
        for n, curve in enumerate(ax.get_legend_handles_labels()[0]):
            points = [point for point in curve.get_xydata() if math.isfinite(point[1])]
            if points:  # a run may have diverged
                x, height = to_panel.transform(points[-1])
                name = textwrap.fill(curve.get_label(), 26, break_long_words=False)
                ends.append((min(height, 1.0), x, n, name, curve))
        ends.sort(key=lambda end: end[:3])
        room = [line_height * (1 + name.count("\n")) for *_, name, _ in ends]  # of each name
        if sum(room) > HIGHEST:
            legend = legend_below(ax, [curve for *_, curve in ends])
            row = ax.get_subplotspec().rowspan.start
            legends.setdefault(row, []).append(legend)
        else:
            write_names(ax, ends, room)
    for row in legends.values():
        inches = max(legend.get_window_extent().height for legend in row) / figure.dpi
        figure.set_figheight(figure.get_figheight() + inches + 0.3)
        for legend in row:
            legend.set_in_layout(True)

def write_names(ax, ends, room):
    """Writes names beside a panel. ends are (height, x, number, name, curve), from the lowest to
    the highest, and room is what each name needs. All lengths are fractions of the panel's."""
    at = [end[0] for end in ends]  # the middle of each name
    for n in range(1, len(at)):  # from below, each name gives way to the one below it
        at[n] = max(at[n], at[n - 1] + (room[n - 1] + room[n]) / 2)
    highest = HIGHEST
    for n in reversed(range(len(at))):  # and from above, if there are too many for the panel
        at[n] = min(at[n], highest - room[n] / 2)
        highest = at[n] - room[n] / 2
    farthest = max((x for _, x, *_ in ends), default=0)
    for (height, x, _, name, curve), middle in zip(ends, at):
        color = curve.get_color()
        leader = dict(arrowstyle="-", color=color, linewidth=0.8, relpos=(0, 0.5))
        if x < farthest - 0.01:
            leader["linestyle"] = ":"
        ax.annotate(name, (x, height), (1.04, middle), "axes fraction", va="center", fontsize=9,
                    color=color, weight=weight_of(curve), arrowprops=leader)

def weight_of(curve):
    """Returns the weight of the font of a curve's name, which is bold unless the curve is thin."""
    return "bold" if curve.get_linewidth() >= 2 else "normal"

def legend_below(ax, curves):
    """Returns a legend below a panel, whose first entry is the curve that ends highest. As long as
    the figure has no room for it, the layout ignores it."""
    ScaledTranslation = config.optional("matplotlib.transforms").ScaledTranslation
    below = ax.transAxes + ScaledTranslation(-0.5, -0.7, ax.figure.dpi_scale_trans)  # in inches
    widest = ax.figure.bbox.width / ax.get_gridspec().ncols - 0.3 * ax.figure.dpi
    curves = curves[::-1]
    names = [textwrap.fill(curve.get_label(), 26, break_long_words=False) for curve in curves]
    for columns in (4, 3, 2, 1):
        legend = ax.legend(curves, names, ncols=columns, loc="upper left", fontsize=8,
                           bbox_to_anchor=(0, 0), bbox_transform=below, frameon=False,
                           handlelength=2.6)
        for text, curve in zip(legend.get_texts(), curves):
            text.set(color=curve.get_color(), weight=weight_of(curve))
        legend.set_in_layout(False)
        ax.figure.draw_without_rendering()  # only now is the size of the legend known
        if legend.get_window_extent().width <= widest:
            break
    return legend

def unit_of(tokenizer):
    """Returns what a token is, to be named on an axis."""
    return "byte" if tokenizer == "bytes" else "token"

def label_axis(ax, metric, unit="token"):
    """Labels the y axis with the metric, and with its split if it has one, as in val/loss. unit is
    what a token is."""
    split, _, name = metric.rpartition("/")
    label = METRICS.get(name, name).replace("per token", f"per {unit}")
    ax.set_ylabel(f"{split}: {label}" if split else label)

def length_axis(ax, ticks):
    """Gives a panel over length a logarithmic axis. ticks are {length: what is written there}."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(ticks), list(ticks.values()), rotation=90 if len(ticks) > 6 else 0)
    ax.minorticks_off()

# --- the two pictures -----------------------------------------------------------------------------

def draw_training(args):
    """Draws each quantity in the runs' log.jsonl over steps. If a step appears twice because a
    run was resumed, its last record counts."""
    lines = {}  # {(folder, step): line}
    metrics = {}  # the names of all quantities, as a dict that keeps their order
    for folder in dict.fromkeys(os.path.normpath(folder) for folder in args.runs):
        about, records = read_log(folder)
        for record in records:
            at = record.pop("step")
            lines.setdefault((folder, at), {**about, "at": at}).update(record)
            metrics.update(record)
    if not lines:
        raise Mistake("these runs have logged no steps yet")
    add_labels(list(lines.values()))
    colors = colors_of(lines.values())
    figure, axes = panels(len(metrics), 2, 5.5, 3)
    for ax, metric in zip(axes, metrics):
        draw_curves(ax, lines.values(), "at", metric, colors)
        label_axis(ax, metric)
        ax.set_xlabel("step")
        if metric.endswith("loss"):  # the first steps would hide the rest
            low, high = ax.dataLim.intervaly
            ax.set_ylim(top=min(high, max(1.7 * low, low + 0.5)))
    name_curves(*axes)
    save(figure, args.out)

def draw_loss_by_position(args):
    """Draws the mean loss at each position of long segments of text, which are spread evenly over
    the split. A model whose positions end earlier reads only their beginnings."""
    runs = [Run(name, args.device, args.data) for name in args.runs]
    splits = [run.open_split(args.split) for run in runs]
    context = LONGEST * max(run.trained for run in runs)
    for split in splits:
        require_text(split, "loss_by_position")
        context = min(context, args.eval_tokens, split.tokens - 1)  # the last is only a target
    size = math.ceil(context / POINTS)
    lines = []
    for run, split in zip(runs, splits):
        length = min(context, run.model.limit)
        starts = split.windows(context, args.eval_tokens // context).tolist()
        found = token_losses(run, split, [(start, start + length) for start in starts])
        losses = torch.stack(list(found.values())).double().mean(0)  # (length,)
        positions = torch.arange(1.0, length + 1)
        for loss, position in zip(losses.split(size), positions.split(size)):
            lines.append({**run.about(), "position": position.mean().item(),
                          "loss": loss.mean().item()})
    add_labels(lines)
    figure, (ax,) = panels(1, 1, 8, 4)
    draw_curves(ax, lines, "position", "loss", colors_of(lines))
    unit = unit_of(runs[0].meta["tokenizer"])
    label_axis(ax, "loss", unit)
    step = max(run.trained for run in runs)
    ax.set_xticks(range(0, context + step, step))
    ax.set_xlabel(f"position in {splits[0].split}, {unit}s; each point is a mean over {size}; "
                  "dashed: as trained")
    name_curves(ax)
    save(figure, args.out)

if __name__ == "__main__":
    config.run(main)
