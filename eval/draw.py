"""
The parts that all pictures share: colours, panels and curves. Only pictures need matplotlib, so it
is imported where a figure is made.
"""
import itertools
import math
import os
import statistics
import textwrap

import config
from eval.records import grouped

METRICS = {  # what a table or an axis says of a metric
    "loss": "loss, nats per token",
    "window_loss": "loss in windows, nats per token",
    "token_error": "wrong answers, %",
    "sequence_error": "rows with a wrong answer, %",
    "gain": "gain from distant text, nats per token",
}
COLORS = {  # of the published methods, which have the same colour in every picture
    "nope": "#8C8C8C", "learned": "#7A4B1E", "sinusoidal": "#B8996B",
    "rope": "#000000", "carope": "#882255", "pope": "#C84E00",
    "relative": "#9A6BD9", "t5": "#D987B8", "alibi": "#0072B2", "fox": "#45B0E6",
    "cope": "#009E73", "cope_mlp": "#86CFA8", "cope_alibi": "#2F6068",
    "expe": "#E69F00", "exqpe": "#F2CF63", "cope+rope": "#8B9A00",
    "t5+rope": "#6B2D5C", "relative+t5": "#4B3A8C", "alibi+rope": "#00324F",
    "fox+rope": "#3B7D9A", "rope,nope": "#6E6E6E", "rope,rope,rope,nope": "#444444",
    "rope,rope,rope,cope": "#00573F",
}
OTHER_COLORS = ("#E6009E", "#6A00F4")  # all other methods take turns with these
STYLES = ("-", "--", ":", "-.")  # of several curves of one method
MOST_CURVES = 24  # in a panel; more could not be told apart

def says(metric, unit="token"):
    """Returns what a table or an axis says of a metric, such as "loss, nats per byte". It may begin
    with a split, as in val/loss. unit is what a token is."""
    split, _, name = metric.rpartition("/")
    text = METRICS.get(name, name).replace("per token", f"per {unit}")
    return f"{split}: {text}" if split else text

def panels(n, across, width, height, **options):
    """Returns a figure and a list of its n axes, at most `across` in a row. width and height are
    those of a panel, in inches, and options are those of Figure.subplots."""
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

def plain(text, width):
    """Returns a text in lines of this width. A $ in it is a $, rather than the start of a formula.
    """
    return textwrap.fill(text, width, break_on_hyphens=False).replace("$", r"\$")

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

def curves(ax, lines, y, colors):
    """Draws line[y] over line["at"], with a curve for each label, which is the mean over the seeds,
    in a band from the lowest to the highest. A point is drawn only if all seeds of its curve have
    it. A point with a `tick` stands apart from its curve. A curve that is `beside` others is thin.
    The names stand in the order in which the curves end. If there are more than MOST_CURVES, only
    that many are drawn, one's own curves first, and then those that end lowest."""
    found = []  # (is it beside, height of its end, name, colour, style, {at: values of the seeds})
    styles = {}  # {colour: the styles that are left for it}
    for (label, pe, beside), curve in grouped(
            [line for line in lines if y in line], "label", "pe", "beside").items():
        points = {}
        for line in curve:
            points.setdefault(line["at"], {})[line["seed"]] = line[y]
        seeds = max(points.values(), key=len).keys()
        values = {at: list(points[at].values()) for at in sorted(points)
                  if points[at].keys() == seeds}
        end = statistics.fmean(values[max(values)])
        style = next(styles.setdefault(colors[pe], itertools.cycle(STYLES)))
        found.append((bool(beside), math.inf if math.isnan(end) else end, plain(label, 28),
                      colors[pe], style, values))
    found.sort(key=lambda curve: curve[:2])
    if len(found) > MOST_CURVES:
        print(f"drew only {MOST_CURVES} of {len(found)} curves, those that end lowest")
        found = found[:MOST_CURVES]
    found.sort(key=lambda curve: -curve[1])
    apart = {line["at"] for line in lines if line.get("tick")}
    for beside, _, name, color, style, values in found:
        front = 1.2 if beside else 2  # how thick a curve is, and which ones cover others
        parts = [[at for at in values if at not in apart], *([at] for at in values if at in apart)]
        for places in filter(None, parts):
            of_seeds = [values[at] for at in places]
            ax.plot(places, list(map(statistics.fmean, of_seeds)), style, label=name, color=color,
                    marker=".", linewidth=front, zorder=front)
            ax.fill_between(places, list(map(min, of_seeds)), list(map(max, of_seeds)), color=color,
                            alpha=0.15, linewidth=0, zorder=1)
            name = None  # the other parts have the same
    decorate(ax, {line["trained"] for line in lines if line.get("trained")})

def name_curves(ax, height):
    """Writes the names of the curves to the right of a panel of this height, in inches."""
    handles, names = ax.get_legend_handles_labels()
    lines = sum(1 + name.count("\n") for name in names)
    size = min(9, 72 * height / (1.35 * max(lines, 1)))
    legend = ax.legend(handles, names, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False,
                       labelcolor="linecolor", fontsize=size, handlelength=1.5, labelspacing=0.25)
    for text, handle in zip(legend.get_texts(), handles):
        text.set_weight("bold" if handle.get_linewidth() >= 2 else "normal")

def length_axis(ax, ticks):
    """Gives a panel over length a logarithmic axis. ticks are {length: what is written there}. Of
    those that would overlap, only the first one is written."""
    ax.set_xscale("log", base=2)
    written = {}
    last = 0
    for at in sorted(ticks):
        if at >= 1.25 * last:
            written[at] = ticks[at]
            last = at
    ax.set_xticks(list(written), list(written.values()), rotation=45 if len(written) > 6 else 0)
    ax.minorticks_off()
