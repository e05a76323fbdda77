"""
The pictures that sample.py draws. A method has the same colour in all of them. Runs that differ
only in their seed form one curve: their mean, in a band from the lowest to the highest.
"""
import collections
import math
import os
import re
import statistics
from functools import partial
from pathlib import Path

import torch

from data.text import tokenizer
from eval import results
from model import PE, CoPE, choose, refuse

COLORS = {
    "pope": "#d62728", "rope": "#1f77b4", "cope": "#2ca02c", "cope+rope": "#17becf",
    "carope": "#9467bd", "expe": "#ff7f0e", "alibi": "#8c564b", "fox": "#e3b505",
    "relative": "#bcbd22", "t5": "#e377c2", "nope": "#7f7f7f", "learned": "#111111",
    "sinusoidal": "#9edae5", "exqpe": "#ffbb78", "cope_mlp": "#98df8a", "cope_alibi": "#006d2c",
}
LINES = ("-", "--", ":", "-.")  # for the second, third, ... curve of one colour
TITLES = {
    "quickstart": "loss on Python source", "recall_small": "recalling a value",
    "copy_small": "copying strings", "addition_small": "adding numbers",
}

def panels(n, across, width, height, **options):
    """(figure, n axes), at most `across` in a row; width and height of each in inches."""
    from matplotlib.figure import Figure
    columns, rows = min(across, n), math.ceil(n / across)
    figure = Figure((width * columns + 1, height * rows + 1.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat[n:]:
        ax.set_visible(False)
    return figure, list(axes.flat[:n])

def plain(ax, trained=()):
    """A grid, no box, and a dashed line at each trained length."""
    for length in trained:
        ax.axvline(length, color="0.4", linestyle="--", linewidth=0.8)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)

def save(figure, path):
    """Write <path>.png, with a legend of all lines below."""
    lines = {line.get_label(): line
             for ax in figure.axes for line in ax.get_legend_handles_labels()[0]}
    if lines:
        fit = figure.get_figwidth() / (0.8 + 0.085 * max(map(len, lines)))  # of the longest name
        columns = max(1, min(6, len(lines), int(fit)))
        at = dict(loc="outside lower center", ncols=columns, frameon=False)
        figure.legend(lines.values(), lines, **at)
    figure.savefig(path + ".png", dpi=120)
    print(f"wrote {path}.png")

def draw_by_length(lines, path):
    """A panel for each config measured at several lengths: the loss of --extrapolate (a panel for
    each split) or the errors of --evaluate. lines: from results.jsonl."""
    found = {}
    for line in lines:
        title, metric = os.path.basename(line["config"]).removesuffix(".py"), line["metric"]
        title = TITLES.get(title, title)
        split, _, multiple = line["split"].rpartition(" ")
        extrapolated = metric in ("loss", "window_loss") and multiple.endswith("x")
        if extrapolated and split != "val":
            title += f", {split}"
        if extrapolated or metric == "token_error":
            key = title, "length", "loss" if extrapolated else metric
            found.setdefault(key, []).append(line | {metric: line["value"]})
    found = {key: rows for key, rows in found.items() if len({row["length"] for row in rows}) > 1}
    if found:
        draw_curves(found, path)

def draw_training(rows, keys, against, path):
    """A panel for each key of the logs."""
    known = {name for row in rows for name in row} - {"run", "pe", "step", "tokens"}
    draw_curves({("", against, choose("keys", key, sorted(known))): rows for key in keys}, path)

def draw_curves(found, path):
    """<path>.png with a panel for each {(title, x, y): rows}, y against x."""
    try:
        figure, axes = panels(len(found), 2, 5, 3.8)
    except ImportError as error:  # the numbers are saved anyway
        return print(f"no picture without {error.name}; pip install {error.name}")
    for ax, ((title, x, y), rows) in zip(axes, found.items()):
        trained = {row["trained"] for row in rows if x == "length"}
        label = f"{x}, tokens; dashed: as trained" if trained else x
        if any("window_loss" in row for row in rows):
            draw_each(ax, rows, x, "window_loss", linewidth=0.6, label="_")
            label += "\nthin: each token sees only the trained length"
        draw_each(ax, rows, x, y, marker="." if trained else "")
        ax.set(title=title, ylabel=results.METRICS.get(y, y), xlabel=label)
        if trained:
            lengths = sorted({row["length"] for row in rows})
            ax.set_xscale("log", base=2)
            ax.set_xticks(lengths, lengths, fontsize=8, rotation=90 if lengths[6:] else 0)
            ax.minorticks_off()
        low, high = ax.dataLim.intervaly
        if y.endswith(("loss", "ppl")):  # cut off a curve that explodes or starts high
            high = min(high, max(1.7 * low, low + 0.5))
        elif y.endswith("error"):  # percent: from 0, even if all are 0
            low, high = 0, max(high, 1)
        margin = 0.05 * (high - low) or 0.05
        ax.set_ylim(low - margin, high + margin)
        plain(ax, trained)
    save(figure, path)

def draw_each(ax, rows, x, y, **style):
    """y against x, a curve for each label of the rows."""
    names, drawn, curves = results.labels(rows), collections.Counter(), {}
    for row in rows:
        if y in row:
            points = curves.setdefault((names[row["run"], row.get("steps")], row["pe"]), {})
            points.setdefault(row[x], []).append(row[y])
    for (name, pe), points in curves.items():
        color, line = COLORS.get(pe, "#b0b0b0"), LINES[drawn[pe] % len(LINES)]
        drawn[pe] += 1
        at, ys = zip(*sorted(points.items()))
        mean, low, high = ([of(y) for y in ys] for of in (statistics.fmean, min, max))
        if y == "loss" and x != "length":  # of single batches: the mean of the last twenty
            parts = [slice(max(0, n - 19), n + 1) for n in range(len(at))]
            mean, low, high = ([statistics.fmean(ys[part]) for part in parts]
                               for ys in (mean, low, high))
        ax.plot(at, mean, **dict(label=name, color=color, linestyle=line) | style)
        ax.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)

def draw_heads(run, cfg, path):
    """Draws cfg.figure into <path>.png, from the text files of cfg.text or else ten stretches of
    the split. It reads 256 tokens of each, or the trained length if that is less; `distance` reads
    four times the trained length. All are cut to the shortest. A map shows only the first."""
    length = min(256, run.model.cfg.block_size)
    if cfg.figure == "distance":
        length = min(4 * run.trained, run.limit)
    code, files = tokenizer(run.meta), filter(None, cfg.text.split(","))
    texts = [code.encode(Path(name).read_text(encoding="utf-8"))[:length] for name in files]
    idx = torch.tensor([text[: min(map(len, texts))] for text in texts], device=run.device)
    if not texts:
        split = run.split(cfg.split)
        window = max(length, split.row_length - 1)
        idx = run.read(split, split.windows(window, 10), window)[0][:, :length]
    refuse(not idx.numel(), f"text={cfg.text!r} holds no text; name files that do")
    measure, draw, title = FIGURES[cfg.figure]
    layers = measure_layers(run.model, idx[:1] if draw is draw_maps else idx, measure)
    refuse(len({layer.size(-1) for layer in layers.values()}) != 1,
           f"figure={cfg.figure!r} has nothing to show of pe={run.pe!r}")
    figure = draw(run, layers, cfg.heads, [code.decode([token]) for token in idx[0].tolist()])
    figure.suptitle(f"{run.name}: {title}", wrap=True)
    save(figure, path)

@torch.no_grad()
def measure_layers(model, idx, measure):
    """{layer: `measure` of its attention}, averaged over the texts idx (B, T). Each layer has its
    own forward pass, as the weights of all might not fit in memory."""
    layers = {}
    for text in idx:
        for i, block in enumerate(model.h):
            block.attn.kept = {}
            model(text[None])
            found = measure(block.attn, block.attn.kept)
            block.attn.kept = None
            if found is not None:
                layers[i] = layers.get(i, 0) + found.cpu() / len(idx)
    return layers

def norms(attn, kept):
    """(2, n), for q and k: the norm of the pair of entries that rotates at frequency c, in PoPE the
    magnitude mu of component c. Mean over tokens and heads (PoPE Figures 3 to 6)."""
    for pe in attn.pes:
        if type(pe).rotate is not PE.rotate:
            pos = torch.arange(kept["x"].size(1), device=kept["x"].device)
            pairs = torch.stack(pe.rotate(kept["q"], kept["k"], kept["x"], pos, {}))
            pairs = pairs.unflatten(-1, (2, -1))  # (2, 1, H, T, 2, n)
            return pairs.norm(dim=-2).mean((1, 2, 3))

def weights_by_distance(attn, kept):
    """(H, T): the attention weight at each distance 0..T-1, mean over the queries that see that far
    back."""
    weights = kept["weights"][0]
    return torch.stack([weights.diagonal(-n, 1, 2).mean(1) for n in range(weights.size(1))], 1)

def maps(attn, kept, alone):
    """(H, T, T), nan in the future. CoPE's gates g_ij (CoPE Figure 7), or attention from position
    alone, as if q.k were the same for all keys: exp(z_i[p_ij]) over the largest in its row (Figure
    4)."""
    for pe in attn.pes:
        if isinstance(pe, CoPE):
            j = torch.arange(kept["x"].size(1), device=kept["x"].device)
            i = j[:, None]
            features = pe.key_features(kept["x"], kept["k"], kept["v"], {})
            shown = pe.gates(kept["q"], kept["logits"], i, j, features)  # (1, H, T, T)
            if alone:
                z = pe.bias_at(pe.positions(shown), kept["q"]).masked_fill(j > i, -math.inf)
                shown = (z - z.amax(-1, keepdim=True)).exp()
            return shown[0].masked_fill(j > i, math.nan)

def draw_norms(run, layers, chosen, words):
    """Labels each frequency by its period (CARoPE: at initialisation)."""
    n = layers[min(layers)].size(1)
    periods = [2 * math.pi * run.model.cfg.base ** (c / n) for c in range(n)]
    return draw_lines(run, layers, "period", periods, ["queries", "keys"])

def draw_distances(run, layers, chosen, words):
    """Each point is the mean over an eighth of an octave of distances."""
    T = layers[0].size(1)
    begins = sorted({0, *(round(2 ** (n / 8)) for n in range(8 * T.bit_length()))})
    begins = [begin for begin in begins if begin < T]
    means = {i: [[part.mean().item() for part in head.tensor_split(begins[1:])] for head in layer]
             for i, layer in layers.items()}
    names = [f"head {h + 1}" for h in range(len(layers[0]))]
    at = [begin + 1 for begin in begins]
    return draw_lines(run, means, "distance + 1", at, names, yscale="log")

def draw_lines(run, layers, label, x, names, **options):
    """A panel for each layer of {number: lines}, each line over x."""
    figure, axes = panels(len(layers), 4, 3, 2.6, sharey=True)
    for ax, (i, lines) in zip(axes, layers.items()):
        for n, (line, name) in enumerate(zip(lines, names)):
            ax.plot(x, line, LINES[n // 10 % 4], color=f"C{n % 10}", linewidth=1, label=name)
        ax.set(xlabel=f"{label}, tokens; dashed: as trained", xscale="log", **options)
        ax.set_title(f"layer {i + 1}")
        plain(ax, [run.trained])
    return figure

def draw_maps(run, layers, chosen, words):
    """A map of queries by keys for each of the chosen heads, "4.3,1.2", or for all of them, a row
    for each layer."""
    there = {f"{i + 1}.{h + 1}": head
             for i, layer in layers.items() for h, head in enumerate(layer)}
    names = [choose("heads", name, there) for name in chosen.split(",") if chosen] or list(there)
    across = len(names) if chosen else len(names) // len(layers)
    side = max(1.5, min(4.5, 16 / across))  # inches
    figure, axes = panels(len(names), across, side, side, sharex=True, sharey=True)
    ends, sizes = line_ends(words)
    for ax, name in zip(axes, names):
        image = ax.imshow(there[name].numpy(), "Blues", vmin=0, vmax=1, interpolation="nearest")
        ax.scatter(ends, ends, sizes, "crimson", marker="+", linewidths=1)
        ax.set_title("layer {}, head {}".format(*name.split(".")), fontsize=8)
        ax.set_facecolor("0.9")
    figure.supxlabel("key; + ends a line, a large + a blank line or a heading", fontsize=10)
    figure.supylabel("query", fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.5)
    return figure

def line_ends(words):
    """Where the lines of a text end, and the marker's size there: large for a blank line or a
    Wikipedia heading, "= A ="."""
    ends, sizes, first = [], [], 0
    for t, word in enumerate(words):
        if "\n" in word:
            line = "".join(words[first : t + 1])
            large = re.fullmatch(r"\s*(=.*=)?\s*", line) or line.count("\n") > 1
            ends.append(t)
            sizes.append(80 if large else 20)
            first = t + 1
    return ends, sizes

FIGURES = {  # name: (how to measure, how to draw, title)
    "frequency": (norms, draw_norms, "magnitude of q and k at each frequency, mean over heads"),
    "distance": (weights_by_distance, draw_distances, "mean attention weight at each distance"),
    "gates": (partial(maps, alone=False), draw_maps, "gates, how much of each key a query counts"),
    "positions": (partial(maps, alone=True), draw_maps,
                  "attention from position alone, the largest weight of each query set to 1"),
}
