"""
Draws curves of one or more runs (this needs matplotlib):

    python -m eval.curves training RUN ...            every quantity in log.jsonl, over steps
    python -m eval.curves loss_by_position RUN ...    the loss far beyond the trained length

Runs that were trained with the same options but for the seed form one curve, which is their mean,
in a band from the lowest to the highest. A method has the same colour in all pictures. They are
written to out/training.png and out/loss_by_position.png.
"""
import json
import math
import os
import re
import statistics

import torch

import config
from config import Mistake
from model import read_records
from sample import EVAL_TOKENS, Run, add_data_options, add_run_options, require_text, token_losses
from train import MAY_CHANGE

METRICS = {  # what a table or an axis says of a metric
    "loss": "loss, nats per token",
    "window_loss": "loss in windows of the trained length, nats per token",
    "token_error": "wrong targets, %",
    "sequence_error": "rows with a wrong target, %",
}
COLORS = {
    "pope": "#d62728", "rope": "#1f77b4", "cope": "#2ca02c", "cope+rope": "#17becf",
    "carope": "#9467bd", "expe": "#ff7f0e", "alibi": "#8c564b", "fox": "#e3b505",
    "relative": "#bcbd22", "t5": "#e377c2", "nope": "#7f7f7f", "learned": "#111111",
    "sinusoidal": "#9edae5", "exqpe": "#ffbb78", "cope_mlp": "#98df8a", "cope_alibi": "#006d2c",
}
OTHER_COLOR = "#b0b0b0"  # of a method that is not in COLORS
STYLES = (  # of curves of one colour
    "-", "--", ":", "-.",
    (0, (6, 1, 1, 1, 1, 1)),  # a dash and two dots
    (0, (1, 4)),  # dots that are far apart
)
LONGEST = 8  # loss_by_position reads segments of this many times the trained length
POINTS = 32  # and averages their positions in this many groups, because single ones are noisy

def main(words):
    parser = config.Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("training", description=__doc__)
    training.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    training.set_defaults(draw=draw_training)
    loss = commands.add_parser("loss_by_position", description=__doc__)
    add_run_options(loss)
    add_data_options(loss)
    loss.add_argument("--eval_tokens", type=config.integer, default=EVAL_TOKENS, metavar="N",
                      help=f"tokens to read in all segments together [{EVAL_TOKENS}]")
    loss.set_defaults(draw=draw_loss_by_position)
    for name, command in commands.choices.items():
        command.add_argument("--out", default=f"out/{name}.png", metavar="FILE",
                             help=f"the picture to write [out/{name}.png]")
    args = parser.parse_args(words)
    args.draw(args)

# --- which runs belong together -------------------------------------------------------------------

def labels(runs):
    """Returns {run: label} for the runs of one panel. A run is a tuple (folder, changes, step,
    data). `changes` are the options that were changed at test time, such as "rope_factor=8", and
    data is a checksum of what was read. Runs have the same label if they differ only in the folder,
    in the seed and in options that do not change what a run learns. The label is the first of
    names_of that no other group has."""
    may_differ = (MAY_CHANGE | {"seed"}) - {"data"}
    groups = {}  # {what the runs of a group have in common: these runs}
    for run in dict.fromkeys(runs):
        folder, *others = run
        options = sorted(trained_with(folder).items())
        in_common = [(name, value) for name, value in options if name not in may_differ]
        groups.setdefault(json.dumps([in_common, others]), []).append(run)
    names = []  # of each group
    for group in groups.values():
        folder, changes, step, _ = group[0]
        names.append(names_of(folder, changes, step))
    ranks = list(zip(*names))  # the first names of all groups, then the second ones, and so on
    label_of = {}
    for group, own_names in zip(groups.values(), names):
        label = next(name for name, rank in zip(own_names, ranks) if rank.count(name) == 1)
        label_of.update(dict.fromkeys(group, label))
    return label_of

def names_of(folder, changes, step):
    """Returns the candidates for a group's label, given the group's first run. The last one is
    unique."""
    suffix = ""
    if changes:
        suffix = f" ({changes.replace(',', ', ')})"
    method = trained_with(folder)["pe"]
    without_seed = re.sub(r"_seed\d+$", "", os.path.basename(folder))
    return [method + suffix, without_seed + suffix, folder + suffix,
            f"{folder}{suffix}, step {step}"]

def trained_with(folder):
    """Returns the options with which a run was last started."""
    starts = [record for record in read_records(folder, "log.jsonl") if "config" in record]
    if not starts:
        raise Mistake(f"{folder}/log.jsonl does not say with which options the run was trained")
    return starts[-1]["config"]

# --- parts that all pictures share ----------------------------------------------------------------

def panels(n, across, width, height, **options):
    """Returns a figure and a list of its n axes, at most `across` in a row. width and height are
    those of a panel, in inches. Raises Mistake without matplotlib, which tables do not need."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Mistake("a picture needs matplotlib; run pip install matplotlib") from None
    columns = min(across, n)
    rows = math.ceil(n / across)
    figure = Figure((width * columns + 1, height * rows + 1.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat[n:]:
        ax.set_visible(False)
    return figure, list(axes.flat[:n])

def decorate(ax, trained=()):
    """Adds a grid and a dashed line at each trained length, and removes half of the frame."""
    for length in trained:
        ax.axvline(length, color="0.4", linestyle="--", linewidth=0.8)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)

def save(figure, path):
    """Writes the figure to a file, with one legend below all panels."""
    lines = {}
    for ax in figure.axes:
        for line in ax.get_legend_handles_labels()[0]:
            lines[line.get_label(), line.get_color(), line.get_linestyle()] = line
    if lines:
        inches = 0.8 + 0.085 * max(len(name) for name, *_ in lines)  # the width of the longest name
        columns = max(1, min(6, len(lines), int(figure.get_figwidth() / inches)))
        figure.legend(handles=lines.values(), loc="outside lower center", ncols=columns,
                      frameon=False)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")

def draw_curves(ax, rows, x, y, styles):
    """Draws row[y] against row[x], with a curve for each label. Each row also has a `run`, a `pe`
    and perhaps the `trained` length. A point is drawn only if all runs of its curve have it. The
    dict `styles` tells curves of one colour apart. All panels of a figure share it, as they share
    the legend."""
    curves = {}  # {(label, pe): {x: {run: y}}}
    for row in rows:
        if y in row:
            points = curves.setdefault((row["label"], row["pe"]), {})
            points.setdefault(row[x], {})[row["run"]] = row[y]
    for (label, pe), points in curves.items():
        runs = max(points.values(), key=len).keys()
        at = sorted(value for value in points if points[value].keys() == runs)
        mean = [statistics.fmean(points[value].values()) for value in at]
        low = [min(points[value].values()) for value in at]
        high = [max(points[value].values()) for value in at]
        color = COLORS.get(pe, OTHER_COLOR)
        number = sum(of_color == color for of_color, _ in styles)
        style = styles.setdefault((color, label), STYLES[number % len(STYLES)])
        ax.plot(at, mean, label=label, color=color, linestyle=style, marker=".")
        ax.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
    decorate(ax, {row["trained"] for row in rows if "trained" in row})

def label_axis(ax, metric):
    """Labels the y axis with the metric, and with its split if it has one, as in val/loss. An axis
    of losses is cut above, so that outliers do not hide the rest."""
    split, _, name = metric.rpartition("/")
    label = METRICS.get(name, name)
    if split:
        label = f"{split}: {label}"
    ax.set_ylabel(label)
    if metric.endswith("loss"):
        low, high = ax.dataLim.intervaly
        high = min(high, max(1.7 * low, low + 0.5))
        margin = 0.05 * (high - low) or 0.05
        ax.set_ylim(low - margin, high + margin)

# --- the two pictures -----------------------------------------------------------------------------

def draw_training(args):
    """Draws each quantity in the runs' log.jsonl over steps. Of a step that appears twice, because
    a run was resumed, the last record counts."""
    folders = [os.path.normpath(folder) for folder in args.runs]
    label_of = labels((folder, "", None, None) for folder in folders)
    rows = {}  # {(folder, step): row}
    keys = {}  # the names of all quantities, as a dict that keeps their order
    for folder in folders:
        same = {"run": folder, "label": label_of[folder, "", None, None],
                "pe": trained_with(folder)["pe"]}
        for record in read_records(folder, "log.jsonl"):
            if "step" in record:
                step = record.pop("step")
                rows.setdefault((folder, step), {"step": step, **same}).update(record)
                keys.update(record)
    if not keys:
        raise Mistake("these runs have logged no steps yet")
    figure, axes = panels(len(keys), 3, 4, 3)
    styles = {}
    for ax, key in zip(axes, keys):
        draw_curves(ax, rows.values(), "step", key, styles)
        label_axis(ax, key)
        ax.set_xlabel("step")
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
    keys = [(run.folder, run.options, run.step, split.fingerprint)
            for run, split in zip(runs, splits)]
    label_of = labels(keys)
    rows = []
    for run, split, key in zip(runs, splits, keys):
        length = min(context, run.model.limit)
        starts = split.windows(context, args.eval_tokens // context).tolist()
        found = token_losses(run, split, [(start, start + length) for start in starts])
        losses = torch.stack(list(found.values())).double().mean(0)  # (length,)
        positions = torch.arange(1.0, length + 1)
        for loss, position in zip(losses.split(size), positions.split(size)):
            rows.append({"run": run.name, "label": label_of[key], "pe": run.model.cfg.pe,
                         "trained": run.trained, "position": position.mean().item(),
                         "loss": loss.mean().item()})
    figure, (ax,) = panels(1, 1, 6, 4)
    draw_curves(ax, rows, "position", "loss", {})
    label_axis(ax, "loss")
    step = max(run.trained for run in runs)
    ax.set_xticks(range(0, context + step, step))
    ax.set(title=f"loss at each position, {splits[0].split}",
           xlabel="position, tokens; dashed: as trained")
    save(figure, args.out)

if __name__ == "__main__":
    config.run(main)
