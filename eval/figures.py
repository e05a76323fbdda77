"""
The pictures that sample.py draws. A method has the same colour in all of them. Runs that differ
only in their seed form one curve, which is their mean, in a band from the lowest to the highest.
"""
import math
import os
import re
import statistics
from pathlib import Path

import torch

from data.text import measure as measure_text
from data.tokenizer import tokenizer
from eval import results
from model import CARoPE, CoPE, PoPE, RoPE, choose, frequencies, overrides, scaled_dot_products

COLORS = {
    "pope": "#d62728", "rope": "#1f77b4", "cope": "#2ca02c", "cope+rope": "#17becf",
    "carope": "#9467bd", "expe": "#ff7f0e", "alibi": "#8c564b", "fox": "#e3b505",
    "relative": "#bcbd22", "t5": "#e377c2", "nope": "#7f7f7f", "learned": "#111111",
    "sinusoidal": "#9edae5", "exqpe": "#ffbb78", "cope_mlp": "#98df8a", "cope_alibi": "#006d2c",
}
STYLES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 4)))  # of curves of one colour
TEXTS = 10  # segments of the split over which a picture of attention is averaged
SHORT = 256  # tokens of each segment at most, because a larger map could not be read
TOKENS_PER_INCH = 10  # in a map that is labelled with its tokens

# --- parts that all pictures share ----------------------------------------------------------------

def panels(n, across, width, height, **options):
    """Returns a figure and its n axes, at most `across` in a row. width and height are those of a
    panel in inches."""
    from matplotlib.figure import Figure

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
    """Writes the figure to <path>.png, with one legend below all panels."""
    lines = {}
    for ax in figure.axes:
        for line in ax.get_legend_handles_labels()[0]:
            lines[line.get_label(), line.get_color(), line.get_linestyle()] = line
    if lines:
        inches = 0.8 + 0.085 * max(len(name) for name, *_ in lines)  # the width of the longest name
        columns = max(1, min(6, len(lines), int(figure.get_figwidth() / inches)))
        figure.legend(handles=lines.values(), loc="outside lower center", ncols=columns,
                      frameon=False)
    figure.savefig(path + ".png", dpi=120)
    print(f"wrote {path}.png")

# --- curves over length, training steps and positions ---------------------------------------------

def draw_by_length(lines, path):
    """Draws a panel for each config that was measured at several lengths, with the loss of
    --extrapolate or the errors of --evaluate. lines are those of results.jsonl. Each kind of split
    has its own panel, so content and content_x2 share one, and position and position_x2 another."""
    groups = {}  # {(title, metric): lines}
    for line in lines:
        split, _, multiple = line["split"].rpartition(" ")
        if line["metric"] == "token_error":
            split = re.sub(r"(^|[ _])(val|x[\d.]+)$", "", line["split"])
        elif line["metric"] != "loss" or not multiple.endswith("x"):
            continue
        title = results.panel_of(line["config"])
        if split not in ("val", ""):
            title += f", {split}"
        groups.setdefault((title, line["metric"]), []).append(line)
    groups = {panel: group for panel, group in groups.items()
              if len({line["length"] for line in group}) > 1}
    if not groups:
        return
    figure, axes = panels(len(groups), 3, 4, 3)
    label_of = results.labels(lines)
    styles = {}
    for ax, ((title, metric), group) in zip(axes, groups.items()):
        draw_curves(ax, group, "length", "value", metric, label_of, styles)
        lengths = sorted({line["length"] for line in group})
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, lengths, fontsize=8, rotation=90 if len(lengths) > 6 else 0)
        ax.minorticks_off()
        ax.set(title=title + results.on_different_data(group),
               xlabel="length, tokens; dashed: as trained")
    save(figure, path)

def draw_training(rows, path):
    """Draws a panel for each quantity in the logs, over steps. rows are from results.training."""
    keys = dict.fromkeys(key for row in rows for key in row)  # a set would forget their order
    keys = [key for key in keys if key not in ("run", "pe", "seed", "experiment", "step")]
    figure, axes = panels(len(keys), 3, 4, 3)
    label_of = results.labels(rows)
    styles = {}
    for ax, key in zip(axes, keys):
        draw_curves(ax, rows, "step", key, key, label_of, styles)
        ax.set_xlabel("step")
    save(figure, path)

def draw_by_position(rows, path):
    """Draws the loss at each position of a long context. rows are from losses.by_position."""
    figure, (ax,) = panels(1, 1, 6, 4)
    draw_curves(ax, rows, "position", "loss", "loss", results.labels(rows), {})
    trained = max(row["trained"] for row in rows)
    last = max(row["position"] for row in rows)
    ax.set_xticks(range(0, math.ceil(last) + trained, trained))
    where = rows[0]["split"] + results.on_different_data(rows)
    ax.set(title=f"loss at each position, {where}",
           xlabel="position, tokens; dashed: as trained")
    save(figure, path)

def draw_curves(ax, rows, x, y, metric, label_of, styles):
    """Draws y, which is a value of this metric, against x, with one curve for each label. A point
    that some run of a curve lacks is left out, and losses far above the lowest are cut off, because
    they would hide how the others differ. The dict styles tells curves of one colour apart, and all
    panels of a figure share it, as they share the legend."""
    curves = {}  # {(label, pe): {x: {run: y}}}
    for row in rows:
        if y in row:
            points = curves.setdefault((label_of[row["run"]], row["pe"]), {})
            points.setdefault(row[x], {})[row["run"]] = row[y]
    for (label, pe), points in curves.items():
        runs = max(points.values(), key=len).keys()
        at = sorted(value for value in points if points[value].keys() == runs)
        mean = [statistics.fmean(points[value].values()) for value in at]
        low = [min(points[value].values()) for value in at]
        high = [max(points[value].values()) for value in at]
        color = COLORS.get(pe, "#b0b0b0")  # grey for a method that the table lacks
        number = sum(of_color == color for of_color, _ in styles)
        style = styles.setdefault((color, label), STYLES[number % len(STYLES)])
        ax.plot(at, mean, label=label, color=color, linestyle=style, marker=".")
        ax.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
    ax.set_ylabel(results.METRICS.get(metric, metric))
    if metric.endswith(("loss", "ppl")):
        low, high = ax.dataLim.intervaly
        high = min(high, max(1.7 * low, low + 0.5))
        margin = 0.05 * (high - low) or 0.05
        ax.set_ylim(low - margin, high + margin)
    decorate(ax, {row["trained"] for row in rows if "trained" in row})

# --- attention: which tokens, what is measured in each layer, and how it is drawn -----------------

def tokens_to_show(run, name, files, split):
    """Returns the tokens (B, T) for the figure of this name. They are the beginnings of the text
    files "a.txt,b.txt", cut to the shortest, or else of segments spread over the split. A map shows
    only the first of them. T is at most SHORT and at most the model's block_size."""
    length = min(SHORT, run.model.cfg.block_size)
    if files:
        encode = tokenizer(run.meta).encode
        paths = [os.path.expanduser(path) for path in files.split(",")]
        for path in paths:
            measure_text(path)  # raises ValueError if it is not UTF-8
        texts = [encode(Path(path).read_text("utf-8"))[:length] for path in paths]
        shortest = min(len(text) for text in texts)
        if not shortest:
            raise ValueError(f"text={files!r} names an empty file; leave it out")
        idx = torch.tensor([text[:shortest] for text in texts], device=run.device)
    else:
        split = run.split(split)
        window = max(length, split.row_length - 1)  # a row is read from its start
        x, _ = run.read(split, split.windows(window, TEXTS), window)
        idx = x[:, :length]
    return idx[:1] if name in MAPS else idx

@torch.no_grad()
def measure(model, idx, name):
    """Returns {layer: what the figure of this name shows of it}, averaged over the texts idx
    (B, T). Layers that have nothing to show are left out."""
    layers = {}
    measure_layer, _ = FIGURES[name]

    def add(attn, args):
        x, pos, angles, _ = args
        found = measure_layer(attn, x, *attn.encode(x, pos, angles, {}))
        if found is not None:
            i = attentions.index(attn)
            layers[i] = layers.get(i, 0) + found.cpu() / len(idx)

    attentions = [block.attn for block in model.h]
    hooks = [attn.register_forward_pre_hook(add) for attn in attentions]
    for text in idx:
        model(text[None])
    for hook in hooks:
        hook.remove()
    return layers

def norms(attn, x, q, k, *rest):
    """Returns (2, n), the norms in q and in k of the pair of entries that rotates at each
    frequency, averaged over tokens and heads (PoPE Figures 3 to 6). In PoPE such a norm is a
    magnitude mu_c. Returns None if the layer rotates nothing."""
    for pe in attn.pes:
        if overrides(type(pe), "rotate"):
            pairs = torch.stack((q, k))
            if isinstance(pe, RoPE):  # with rope_fraction, the other dimensions do not rotate
                pairs = pairs[..., : pe.rotated_width(attn.cfg)]
            pairs = pairs.unflatten(-1, (2, -1))  # (2, 1, H, T, 2, n)
            return pairs.norm(dim=-2).mean((1, 2, 3))

def learned_rotation(attn, x, *rest):
    """Returns (H, n), which holds PoPE's delta_c, or the mean of CARoPE's f^c over the tokens
    divided by its value at initialisation. Returns None if the layer has neither method."""
    for pe in attn.pes:
        if isinstance(pe, PoPE):
            return pe.delta
        if isinstance(pe, CARoPE):
            tokens = x.transpose(0, 1)  # (T, 1, C), since the phase of a text of one token is f^c
            q = x.new_zeros(len(tokens), pe.H, 1, pe.d)
            cache = {}
            pe.rotate(q, q, tokens, None, cache)
            mean = cache["phi"].mean((0, 2))  # (H, n)
            return mean / frequencies(pe.cfg.base, mean.size(1), mean)

def cope_map(attn, name, q, k, v, unrotated_q, i, j, per_key):
    """Calls the layer's CoPE method of this name, gates or logit_bias. Returns its result as a map
    (H, T, T) that is nan where the key follows the query. Returns None if the layer has no CoPE."""
    for pe, gate_k in zip(attn.bias_pes, per_key):
        if isinstance(pe, CoPE):
            logits = scaled_dot_products(q, k, attn.d)
            found = getattr(pe, name)(unrotated_q, logits, i, j, gate_k)
            return found[0].masked_fill(j > i, math.nan)

def gates(attn, x, *operands):
    """Returns CoPE's gates g_ij (CoPE Figure 7)."""
    return cope_map(attn, "gates", *operands)

def position_weights(attn, x, *operands):
    """Returns CoPE's attention from position alone, as if q.k were the same for all keys. It is
    exp(z_i[p_ij]), divided by the largest in its row (CoPE Figure 4)."""
    z = cope_map(attn, "logit_bias", *operands)
    if z is not None:
        return (z - z.nan_to_num(-math.inf).amax(-1, keepdim=True)).exp()

FIGURES = {  # {name: (function of an Attention, its input x and what its `encode` returns, title)}
    "frequency": (norms, "magnitude of q and k at each frequency, mean over heads"),
    "rotation": (learned_rotation,
                 "PoPE's delta, or CARoPE's mean frequencies divided by those at the start"),
    "gates": (gates, "gates, how much of each key a query counts"),
    "positions": (position_weights,
                  "attention from position alone, the largest weight of each query set to 1"),
}
MAPS = ("gates", "positions")  # the others are lines over frequencies

def draw_attention(run, name, layers, tokens, heads, path):
    """Writes to <path>.png a picture of what `measure` returned. tokens (T,) are those of the first
    text, which label a map, and heads, such as "4.3,1.2", chooses maps."""
    widths = {layer.size(-1) for layer in layers.values()}
    if len(widths) != 1:
        raise ValueError(f"figure={name!r} has nothing to show of pe={run.model.cfg.pe!r}, "
                         "or its layers differ in kind")
    if name in MAPS:
        decode = tokenizer(run.meta).decode
        figure = draw_maps(layers, heads, [decode([token]) for token in tokens.tolist()])
    elif name == "frequency":
        figure = draw_lines(run, layers, ("queries", "keys"))
    else:
        figure = draw_lines(run, layers, [f"head {h + 1}" for h in range(run.model.cfg.n_head)])
        if "carope" in run.model.cfg.pe:
            figure.axes[0].set_yscale("log")  # of all panels, which share the axis
    figure.suptitle(f"{run.name}: {FIGURES[name][1]}", wrap=True)
    save(figure, path)

def draw_lines(run, layers, names):
    """Draws a panel for each layer, with lines over its frequencies. The axis shows the period of
    each frequency, which for CARoPE is that at initialisation."""
    figure, axes = panels(len(layers), 4, 3, 2.6, sharey=True)
    for ax, (i, lines) in zip(axes, layers.items()):
        theta = frequencies(run.model.cfg.base, lines.size(1), lines)
        for pe in run.model.h[i].attn.pes:
            if isinstance(pe, RoPE):  # rope_scaling changes its frequencies
                theta = pe.theta(lines)
        periods = (2 * math.pi / theta).tolist()
        for h, (line, name) in enumerate(zip(lines, names)):
            style = STYLES[h // 10 % len(STYLES)]  # matplotlib has ten colours, C0 to C9
            ax.plot(periods, line, color=f"C{h % 10}", linestyle=style, linewidth=1, label=name)
        ax.set(xlabel="period, tokens; dashed: as trained", xscale="log", title=f"layer {i + 1}")
        decorate(ax, [run.trained])
    return figure

def draw_maps(layers, heads, words):
    """Draws a map of queries by keys for every head, with a row of maps for each layer. If heads is
    given, as in "4.3,1.2", only these are drawn, in this order, and labelled with the tokens."""
    maps = {f"{i + 1}.{h + 1}": head for i, layer in layers.items()
            for h, head in enumerate(layer)}
    if heads:
        names = [choose("heads", name, maps) for name in heads.split(",")]
        across = len(names)
        inches = max(3, len(words) / TOKENS_PER_INCH)
    else:
        names = list(maps)
        across = len(names) // len(layers)
        inches = max(1.5, min(4.5, 16 / across))
    figure, axes = panels(len(names), across, inches, inches, sharex=True, sharey=True)
    line_ends = [t for t, word in enumerate(words) if "\n" in word]
    at = range(len(words))
    shown = [word.replace(" ", "·").replace("\n", "↵").replace("$", r"\$") for word in words]
    style = {"fontsize": 72 / TOKENS_PER_INCH, "fontfamily": "monospace"}  # an inch has 72 points
    for ax, name in zip(axes, names):
        image = ax.imshow(maps[name].numpy(), "Blues", vmin=0, vmax=1, interpolation="nearest")
        ax.scatter(line_ends, line_ends, 20, "crimson", marker="+", linewidths=1)
        layer, head = name.split(".")
        ax.set_title(f"layer {layer}, head {head}", fontsize=8)
        ax.set_facecolor("0.9")
        if heads:
            ax.set_xticks(at, shown, rotation=0 if max(map(len, words)) == 1 else 90, **style)
            ax.set_yticks(at, shown, **style)
            ax.tick_params(length=0, pad=1, labelbottom=True, labelleft=True)
    figure.supxlabel("key (+ marks the end of a line)", fontsize=10)
    figure.supylabel("query", fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.5)
    return figure
