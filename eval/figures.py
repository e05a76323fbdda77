"""
The pictures that sample.py draws. A method has the same colour in each of them. Runs that differ
in their seed alone form one curve: their mean, and a band from the lowest to the highest.
"""
import collections
import functools
import math
import os
import re

import torch

from data.text import tokenizer
from eval import results
from model import PE, CoPE

COLORS = {
    "pope": "#d62728",
    "rope": "#1f77b4",
    "cope": "#2ca02c",
    "cope+rope": "#17becf",
    "carope": "#9467bd",
    "expe": "#ff7f0e",
    "alibi": "#8c564b",
    "fox": "#e3b505",
    "relative": "#bcbd22",
    "t5": "#e377c2",
    "nope": "#7f7f7f",
    "learned": "#111111",
    "sinusoidal": "#9edae5",
    "exqpe": "#ffbb78",
    "cope_mlp": "#98df8a",
    "cope_alibi": "#006d2c",
}
OTHER = "#b0b0b0"  # any other mix of methods
LINES = ("-", "--", ":", "-.")  # for the second, third, ... curve of one colour
AXES = {
    "length": "tokens in the sequence; dashed: the trained length",
    "position": "position in the longest sequence; dashed: the trained length",
    "step": "training steps",
    "tokens": "training tokens",
}


def panels(n, across, width, height, **options):
    """(figure, n axes), at most `across` in a row; width and height of each in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("no picture without one more package: pip install matplotlib") from None
    columns, rows = min(across, n), math.ceil(n / across)
    figure = Figure((width * columns + 1, height * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat[n:]:
        ax.set_visible(False)
    return figure, axes.flat[:n]


def save(figure, path):
    """Write <path>.png, with a legend of all lines below."""
    lines = {}
    for ax in figure.axes:
        lines |= {line.get_label(): line for line in ax.get_legend_handles_labels()[0]}
    if lines:
        fit = figure.get_figwidth() / (0.8 + 0.085 * max(map(len, lines)))  # of the longest name
        columns = max(1, min(6, len(lines), int(fit)))
        figure.legend(lines.values(), lines, loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(path + ".png", dpi=120)
    print(f"wrote {path}.png")


def plain(ax, trained=()):
    """A grid, no box, and a dashed line at each trained length."""
    for length in trained:
        ax.axvline(length, color="0.4", linestyle="--", linewidth=0.8)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


# --------------------------------------------------------------------------------------------------
# curves of many runs


def draw_losses(table, path):
    """The rows of losses.py: loss against length and against position, or errors against length."""
    if "multiple" in table[0]:
        longest = {row["run"]: row for row in table if "sums" in row}
        found = [("", "length", "loss", table), ("", "position", "loss", positions(longest.values()))]
        return draw_curves(found, path, sharey=True)
    if len({row["length"] for row in table}) > 1:
        keys = [key for key in ("token_error", "sequence_error") if any(key in row for row in table)]
        draw_curves([("", "length", key, table) for key in keys or ["loss"]], path)


def positions(rows):
    """Rows of the loss at each quarter of the trained length, from the longest sequences of each
    run."""
    found = []
    for row in rows:
        width = max(1, row["trained"] // 4)
        loss, targets = row["sums"]
        for n, (part, count) in enumerate(zip(loss.split(width), targets.split(width))):
            if len(part) == width and count.sum():
                at = dict(position=(n + 0.5) * width, loss=(part.sum() / count.sum()).item())
                found.append({key: row[key] for key in ("run", "pe", "trained")} | at)
    return found


def draw_report(lines, path):
    """A panel for each config and split that was measured at several lengths: the loss of
    --extrapolate, or errors of --evaluate on a task. lines: of results.jsonl."""
    found = {}  # (title, metric): rows
    for line in lines:
        title = os.path.basename(line["config"]).removesuffix(".py")
        split, _, multiple = line["split"].rpartition(" ")
        extrapolated = line["metric"] == "loss" and multiple.endswith("x")
        if extrapolated and split != "val":
            title += f", {split}"
        if extrapolated or line["metric"] == "token_error":
            row = line | {line["metric"]: line["value"]}
            found.setdefault((title, line["metric"]), []).append(row)
    several = {key: rows for key, rows in found.items() if len({row["length"] for row in rows}) > 1}
    if several:
        draw_curves([(title, "length", y, rows) for (title, y), rows in several.items()], path)


def draw_training(rows, keys, against, path):
    """A panel for each key of the logs. Its height is that of all values but those of the first
    twentieth, which would leave no room for the rest."""
    for key in keys:
        known = sorted({name for row in rows for name in row} - {"run", "pe", "step", "tokens"})
        if key not in known:
            raise ValueError(f"keys={key!r} is in no log.jsonl of these runs; there are "
                             + ", ".join(known))
    draw_curves([("", against, key, rows) for key in keys], path)


def draw_curves(found, path, sharey=False):
    """<path>.png with a panel for each (title, x, y, rows), the rows' y against their x."""
    try:
        figure, axes = panels(len(found), 2, 5, 3.8, sharey=sharey)
    except ImportError as error:
        return print(error)  # the numbers are there
    for ax, (title, x, y, rows) in zip(axes, found):
        thin = "window_loss" in rows[0] and y == "loss"
        if thin:
            draw_each(ax, rows, x, "window_loss", linewidth=0.6)
        draw_each(ax, rows, x, y, label=True, marker="." if x == "length" else "")
        plain(ax, {row["trained"] for row in rows if x in ("length", "position")})
        ax.set(title=title, ylabel=results.METRICS.get(y, y), xlabel=AXES[x])
        if thin:
            ax.set_xlabel(AXES[x] + "\nthin: each token sees the last trained length alone")
        if x == "length":
            lengths = sorted({row["length"] for row in rows})
            ax.set_xscale("log", base=2)
            ax.set_xticks(lengths, lengths, rotation=90 if len(lengths) > 6 else 0)
            ax.minorticks_off()
        limit_height(ax, x, y)
    if sharey:
        low, high = zip(*(ax.dataLim.intervaly for ax in axes))
        axes[0].set_ylim(loss_limits(min(low), max(high)))
    save(figure, path)


def draw_each(ax, rows, x, y, label=False, **style):
    """y against x, a curve for each label of the rows."""
    names, drawn = results.labels(rows), collections.Counter()
    for name in dict.fromkeys(names.values()):
        points = {}
        for row in (row for row in rows if names[row["run"]] == name):
            pe = row["pe"]
            if y in row:
                points.setdefault(row[x], []).append(row[y])
        look = dict(color=COLORS.get(pe, OTHER), linestyle=LINES[drawn[pe] % len(LINES)])
        drawn[pe] += 1
        at = sorted(points)
        means = [sum(points[place]) / len(points[place]) for place in at]
        ax.plot(at, means, label=name if label else None, **look, **style)
        band = [min(points[place]) for place in at], [max(points[place]) for place in at]
        ax.fill_between(at, *band, color=look["color"], alpha=0.15, linewidth=0)


def limit_height(ax, x, y):
    low, high = ax.dataLim.intervaly
    if x in ("step", "tokens"):
        end = ax.dataLim.x1
        later = [value for line in ax.lines for at, value in line.get_xydata() if at >= end / 20]
        margin = 0.05 * (max(later) - min(later)) or 0.05
        ax.set_ylim(min(later) - margin, max(later) + margin)
    elif y == "loss":
        ax.set_ylim(loss_limits(low, high))
    else:
        ax.set_ylim(0, None)


def loss_limits(low, high):
    """From the lowest loss up. One that explodes leaves the picture."""
    return low - 0.05, min(high, max(1.7 * low, low + 0.5)) + 0.05


# --------------------------------------------------------------------------------------------------
# what the heads of one run learned


def draw_heads(run, cfg, path):
    """<path>.png of cfg.figure: of the text files of cfg.text, or else of ten stretches of the
    split. It takes 256 tokens of each, or the trained length where that is less; `distance` takes
    four times the trained length."""
    length = min(256, run.model.cfg.block_size)
    if cfg.figure == "distance":
        length = min(4 * run.trained, run.limit)
    texts = read_texts(run, cfg, length)
    figure = FIGURES[cfg.figure](run, texts, cfg.heads)
    label = results.labels([run.columns("", 0)])[run.name]
    figure.suptitle(f"{label}: {TITLES[cfg.figure]}", wrap=True)
    save(figure, path)


def read_texts(run, cfg, length):
    """[tokens (T,), ...], T at most `length`."""
    if not cfg.text:
        split = run.split(cfg.split)
        window = max(length, run.length(split) if split.rows else 0)
        x, _ = run.read(split, split.windows(window, 10), window)
        return list(x[:, :length])
    texts, encode = [], tokenizer(run.meta).encode
    for name in cfg.text.split(","):
        try:
            with open(name, encoding="utf-8") as file:
                tokens = encode(file.read())[:length]
        except (OSError, UnicodeDecodeError):
            raise ValueError(f"text={name!r} is no file of UTF-8 text; name one") from None
        if not tokens:
            raise ValueError(f"text={name!r} is empty; name a file that holds some text")
        texts.append(torch.tensor(tokens, device=run.device))
    return texts


@torch.no_grad()
def inside(model, text):
    """Yields of each layer its number, its Attention, and what that computes on a text (T,). There
    is a forward pass for each, as the weights of all might not fit in memory."""
    for i, block in enumerate(model.h):
        block.attn.kept = {}
        model(text[None])
        kept, block.attn.kept = block.attn.kept, None
        yield i, block.attn, kept


def rotates(pe):
    return type(pe).rotate is not PE.rotate


def norms(model, texts):
    """{layer: (2, n)}: for q and k, the 2-norm of the pair of numbers that turns at frequency c, in
    PoPE the magnitude mu of component c. Mean over texts, tokens and heads (PoPE Figures 3 to 6)."""
    result = {}
    for text in texts:
        pos = torch.arange(len(text), device=text.device)
        for i, attn, kept in inside(model, text):
            for pe in filter(rotates, attn.pes):
                turned = torch.stack(pe.rotate(kept["q"], kept["k"], kept["x"], pos, {}))
                pairs = turned.unflatten(-1, (2, -1)).norm(dim=-2)  # (2, 1, H, T, n)
                result[i] = result.get(i, 0) + pairs.mean((1, 2, 3)).cpu() / len(texts)
    if len({layer.size(-1) for layer in result.values()}) != 1:
        raise ValueError("figure='frequency' shows rope, carope or pope, but the run has "
                         f"pe={model.cfg.pe!r}")
    return result


def weights_by_distance(model, texts):
    """{layer: (H, T)}: the attention weight at each distance 0..T-1, mean over all pairs of a query
    and a key at that distance."""
    longest = max(map(len, texts))
    sums, counts = {}, torch.zeros(longest)
    for text in texts:
        T = len(text)
        counts[:T] += torch.arange(T, 0, -1)
        for i, _, kept in inside(model, text):
            found = [kept["weights"][0].diagonal(-n, 1, 2).sum(1) for n in range(T)]  # each (H,)
            layer = sums.setdefault(i, torch.zeros(len(found[0]), longest))
            layer[:, :T] += torch.stack(found, 1).float().cpu()
    return {i: layer / counts for i, layer in sums.items()}


def maps(model, text, name):
    """{layer: (H, T, T)}, nan in the future: CoPE's gates g_ij (CoPE Figure 7) or, from positions
    p_ij alone, the attention exp(z_i[p_ij]) over the largest in its row, as if q.k were the same
    for all keys (Figure 4)."""
    result, pos = {}, torch.arange(len(text), device=text.device)
    i, j = pos[:, None], pos
    for layer, attn, kept in inside(model, text):
        for pe in (pe for pe in attn.pes if isinstance(pe, CoPE)):
            features = pe.key_features(kept["x"], kept["k"], kept["v"], {})
            shown = pe.gates(kept["q"], kept["logits"], i, j, features)  # (1, H, T, T)
            if name == "positions":
                z = pe.bias_at(pe.positions(shown), kept["q"]).masked_fill(j > i, -math.inf)
                shown = (z - z.amax(-1, keepdim=True)).exp()
            result[layer] = shown[0].masked_fill(j > i, math.nan).cpu()
    if not result:
        raise ValueError(f"figure={name!r} shows cope, cope_mlp or cope_alibi, but the run has "
                         f"pe={model.cfg.pe!r}")
    return result


def draw_norms(run, texts, _):
    """Heat maps for q and for k, a row for each frequency, named by its period in training (CARoPE:
    at the start), and a column for each layer."""
    layers = norms(run.model, texts)
    sides = torch.stack(list(layers.values()), -1)  # (2, n, layers)
    n, base = sides.size(1), run.model.cfg.base
    figure, axes = panels(2, 2, max(4, len(layers) / 4), 4, sharey=True)
    periods = [2 * math.pi * base ** (c / n) for c in range(n)]
    within = sum(period <= run.trained for period in periods)
    for ax, name, side in zip(axes, ("queries", "keys"), sides):
        image = ax.imshow(side.numpy(), vmin=0, vmax=sides.max().item(), aspect="auto")
        ax.axhline(within - 0.5, color="white", linewidth=1, linestyle="--")
        ax.set(title=name, xlabel="layer")
        ax.set_xticks(range(len(layers)), [i + 1 for i in layers], fontsize=8)
    ticks = range(0, n, max(1, n // 8))
    axes[0].set_yticks(ticks, [f"{periods[c]:,.0f}" for c in ticks])
    axes[0].set_ylabel("period of the frequency, tokens")
    figure.supxlabel(f"above the dashed line: periods within the {run.trained} trained tokens",
                     fontsize=10)
    figure.colorbar(image, ax=list(axes))
    return figure


def draw_distances(run, texts, _):
    """A panel for each layer, a line for each head. Far distances are means over an eighth of an
    octave."""
    layers = weights_by_distance(run.model, texts)
    T = layers[0].size(1)
    begins = sorted({0, *(round(2 ** (n / 8)) for n in range(8 * int(math.log2(T)) + 8))})
    begins = [begin for begin in begins if begin < T]
    figure, axes = panels(len(layers), 4, 3, 2.6, sharey=True)
    for ax, (i, layer) in zip(axes, layers.items()):
        for h, head in enumerate(layer):
            means = [part.mean().item() for part in head.tensor_split(begins[1:])]
            ax.plot(begins, means, LINES[h // 10 % 4], color=f"C{h % 10}", linewidth=1,
                    label=f"head {h + 1}")
        ticks = [0, *(4**n for n in range(10) if 4**n < T)]
        ax.set_xscale("symlog", base=2, linthresh=1)  # from 0, the token itself
        ax.set_xticks(ticks, ticks)
        ax.set(title=f"layer {i + 1}", xlabel="distance, tokens", yscale="log", xlim=(0, T))
        plain(ax, [run.trained])
    least = min(layer.clamp(min=1e-6).min().item() for layer in layers.values())
    axes[0].set(ylim=(least, 1.2))  # of every panel
    figure.supylabel("attention weight", fontsize=10)
    return figure


def draw_maps(run, texts, chosen, name):
    """A map of queries by keys of the first text, for each of the heads chosen, "4.3,1.2", or for
    all of them, a row for each layer."""
    layers = maps(run.model, texts[0], name)
    there = {f"{i + 1}.{h + 1}": head for i, layer in layers.items() for h, head in enumerate(layer)}
    names = chosen.split(",") if chosen else list(there)
    for word in names:
        if word not in there:
            raise ValueError(f"heads={word!r} is no layer.head of this figure; "
                             f"choose among {', '.join(there)}")
    across = len(names) if chosen else len(names) // len(layers)
    side = max(1.5, min(4.5, 16 / across))  # inches
    figure, axes = panels(len(names), across, side, side, sharex=True, sharey=True)
    decode = tokenizer(run.meta).decode
    starts, ends, sizes = marks([decode([token]) for token in texts[0].tolist()])
    for ax, word in zip(axes, names):
        image = ax.imshow(there[word].numpy(), "Blues", vmin=0, vmax=1, interpolation="nearest")
        ax.scatter(ends, ends, sizes, "crimson", marker="+", linewidths=1)
        ax.set_title("layer {}, head {}".format(*word.split(".")), fontsize=8)
        ax.set_facecolor("0.9")
        ax.set_xticks(list(starts), starts.values(), fontsize=7, parse_math=False, rotation=90)
        ax.set_yticks(list(starts), starts.values(), fontsize=7, parse_math=False)
    figure.supxlabel("key; + ends a line, a large + a blank line or a heading", fontsize=10)
    figure.supylabel("query", fontsize=10)
    figure.colorbar(image, ax=list(axes), shrink=0.5)
    return figure


def marks(words):
    """Of a text's tokens: {where a line begins: its first letters}, where lines end, and the size of
    the sign there, large for a blank line and for a heading as Wikipedia marks it, "= Title ="."""
    starts, ends, sizes, first = {}, [], [], 0
    for t, word in enumerate(words):
        if "\n" not in word and t < len(words) - 1:
            continue
        line = "".join(words[first : t + 1])
        if "\n" in word:
            heading = re.fullmatch(r"\s*=.*=\s*", line)
            ends.append(t)
            sizes.append(80 if heading or not line.strip() or line.count("\n") > 1 else 20)
        if line.strip() and t - first > len(words) // 20:  # else there is no room for its letters
            starts[first] = line.strip()[:14]
        first = t + 1
    return starts, ends, sizes


FIGURES = {
    "frequency": draw_norms,
    "distance": draw_distances,
    "gates": functools.partial(draw_maps, name="gates"),
    "positions": functools.partial(draw_maps, name="positions"),
}
TITLES = {
    "frequency": "magnitude of q and k at each frequency, mean over heads and texts",
    "distance": "mean attention weight at each distance; dashed: the trained length",
    "gates": "gates, how much of each key a query counts",
    "positions": "attention from position alone, the largest weight of each query set to 1",
}
