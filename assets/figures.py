"""The pictures that sample.py draws: loss and error against length, and what the heads learned. Needs matplotlib.

A method has the same colour in every picture (COLORS). Runs that differ in their seed alone form one curve, their mean,
with a band from the lowest to the highest. Dashed vertical lines mark the trained length.
"""
import collections
import math
import os
import re

import torch
from torch.nn.modules.module import register_module_forward_hook

from model import CoPE, dots, heads

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
LINES = ("-", "--", ":", "-.")  # for the second, third, ... curve of a method
FIGURES = {
    "frequency": "magnitude of q and k at each frequency, mean over the text",
    "positions": "attention from position alone, the largest weight of each query set to 1",
    "gates": "gates, how much of each key a query counts",
    "distance": "attention weight against distance, mean over the queries that reach so far back",
}


def pyplot():
    """matplotlib.pyplot that draws into files. Raises ImportError without the library."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError("no picture without one more package: pip install matplotlib") from None
    plt.switch_backend("Agg")
    return plt


def save(figure, path):
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
    print(f"wrote {path}")


# ---------------------------------------------------------------------------------------------------
# curves of many runs


def labels(pes):
    """{run: label}, from {run: its cfg.pe}: what tells the runs apart. `out/quickstart_pope` and its other seed
    `out/quickstart_pope_seed1338` are both "pope"."""
    names, stems = {}, []
    for run, pe in pes.items():
        directory = run.partition("@")[0]
        names[run] = re.sub(r"_seed\d+$", "", os.path.normpath(directory))
        stems.append(names[run].removesuffix(pe))
    common = os.path.commonprefix(stems)
    cut = 1 + max(common.rfind("_"), common.rfind(os.sep))
    result = {}
    for run, name in names.items():
        options = run.partition("@")[2].replace(",", ", ")
        result[run] = name[cut:] + (f" ({options})" if options else "")
    return result


def curves(pes):
    """[(label, its runs, how to draw its line)], from {run: its cfg.pe}, in the order given."""
    members, methods, drawn = collections.defaultdict(list), {}, collections.Counter()
    for run, label in labels(pes).items():
        members[label].append(run)
        methods[label] = pes[run]
    result = []
    for label, runs in members.items():
        pe = methods[label]
        style = dict(color=COLORS.get(pe, OTHER), linestyle=LINES[drawn[pe] % len(LINES)])
        drawn[pe] += 1
        result.append((label, runs, style))
    return result


def draw_curve(ax, points, **style):
    """A line through the means, and a band from the lowest to the highest; points: {x: [y of each seed]}."""
    points = {x: ys for x, ys in sorted(points.items()) if ys}
    x = list(points)
    ax.plot(x, [sum(ys) / len(ys) for ys in points.values()], **style)
    if any(len(ys) > 1 for ys in points.values()):
        lowest, highest = [min(ys) for ys in points.values()], [max(ys) for ys in points.values()]
        ax.fill_between(x, lowest, highest, color=style["color"], alpha=0.15, linewidth=0)


def points(table, runs, metric):
    """{length: [value of each run]} of the rows of a table that have this metric."""
    result = {}
    for row in table:
        if row["run"] in runs and row.get(metric, "") != "":
            result.setdefault(row["length"], []).append(row[metric])
    return result


def lengths_axis(ax, lengths):
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, lengths)
    ax.minorticks_off()


def plain(ax, trained=()):
    """A grid, no box, and a dashed line at each trained length."""
    for length in trained:
        ax.axvline(length, color="0.4", linestyle="--", linewidth=0.8)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def legend(figure, ax):
    handles, names = ax.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(6, len(names)), frameon=False)


def draw_extrapolation(table, pes, trained, split, by_position):
    """Loss against length, and against the position within the longest length.

    table: rows of run, length, loss, window_loss; pes, trained: {run: its cfg.pe, its block_size}; by_position: {run:
    loss of every position (T,)}.
    """
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(10, 5), sharey=True, layout="constrained")
    for label, runs, style in curves(pes):
        losses, windows = points(table, runs, "loss"), points(table, runs, "window_loss")
        draw_curve(left, losses, label=label, marker="o", markersize=4, linewidth=1.6, **style)
        left.plot(list(windows), [sum(ys) / len(ys) for ys in windows.values()], linewidth=0.6, color=style["color"])
        width = max(1, trained[runs[0]] // 4)  # a mean over a quarter of the trained length, against the noise
        along = {}
        for run in runs:
            whole = by_position[run][: len(by_position[run]) // width * width]
            for n, loss in enumerate(whole.view(-1, width).mean(1).tolist()):
                along.setdefault((n + 0.5) * width, []).append(loss)
        draw_curve(right, along, linewidth=1.6, **style)
    lowest, highest = min(left.dataLim.ymin, right.dataLim.ymin), left.dataLim.ymax
    left.set_ylim(lowest - 0.05, min(highest, 1.7 * lowest) + 0.05)  # a loss that explodes leaves the picture
    lengths_axis(left, sorted({row["length"] for row in table}))
    for ax in (left, right):
        plain(ax, set(trained.values()))
    left.set(xlabel="tokens in the sequence; thin: each token sees the last trained length alone",
             ylabel=f"{split} loss, nats per token")
    right.set(xlabel="position in the longest sequence")
    legend(figure, left)
    return figure


def draw_errors(table, pes, trained):
    """Error, or loss where every target counts, against the length of the splits.

    table: rows of run, split, length, loss and, on a task, token_error and sequence_error in percent; pes, trained:
    {run: its cfg.pe, the length that it was trained on}.
    """
    names = {"token_error": "wrong targets, %", "sequence_error": "rows with a wrong target, %"}
    names = {metric: name for metric, name in names.items() if any(metric in row for row in table)}
    names = names or {"loss": "loss, nats per token"}
    figure, axes = pyplot().subplots(1, len(names), figsize=(1 + 4.5 * len(names), 5), squeeze=False,
                                     layout="constrained")
    for ax, (metric, name) in zip(axes[0], names.items()):
        for label, runs, style in curves(pes):
            draw_curve(ax, points(table, runs, metric), label=label, marker="o", markersize=4, **style)
        lengths_axis(ax, sorted({row["length"] for row in table}))
        plain(ax, set(trained.values()))
        ax.set(xlabel="tokens in the row", ylabel=name)
    legend(figure, axes[0, 0])
    return figure


@torch.no_grad()
def recall_errors(model, splits, device):
    """{length: {n: (wrong answers, answers)}} over splits of data/recall.py, where the queries stand 2^n to 2^(n+1) - 1
    tokens after their key's first place in the row."""
    result = {}
    for split in splits:
        length = split.row_length - 1
        cells = result.setdefault(length, collections.defaultdict(lambda: torch.zeros(2)))
        for start in split.windows(length):
            x, y = (torch.from_numpy(a[0]).to(device) for a in split.read([start], length))
            wrong = model(x[None], y[None])[0][0].argmax(-1) != y
            for place in (y != -1).nonzero().flatten().tolist():
                distance = place - (x == x[place]).tolist().index(True)
                cells[int(math.log2(distance))] += torch.tensor([wrong[place], 1])
    return result


def draw_recall(errors, pes):
    """A map of error for each curve: distance by length. errors: {run: {length: recall_errors}}."""
    drawn = curves(pes)
    figure, axes = pyplot().subplots(1, len(drawn), figsize=(1.5 + 2.6 * len(drawn), 3), squeeze=False, sharey=True,
                                     layout="constrained")
    lengths = sorted({length for by_length in errors.values() for length in by_length})
    most = 1 + max(n for by_length in errors.values() for cells in by_length.values() for n in cells)
    for ax, (label, runs, _) in zip(axes[0], drawn):
        grid = torch.full((len(lengths), most), math.nan)
        for i, length in enumerate(lengths):
            for n in range(most):
                wrong, answers = sum(errors[run].get(length, {}).get(n, torch.zeros(2)) for run in runs)
                if answers:
                    grid[i, n] = 100 * wrong / answers
        image = ax.imshow(grid.numpy(), "magma_r", vmin=0, vmax=100, aspect="auto", origin="lower")
        ax.set_xticks(range(most), [2**n for n in range(most)], rotation=90)
        ax.set(title=label, xlabel="distance, from")
    axes[0, 0].set_yticks(range(len(lengths)), lengths)
    axes[0, 0].set_ylabel("tokens in the row")
    figure.colorbar(image, ax=axes, label="wrong answers, %")
    return figure


# ---------------------------------------------------------------------------------------------------
# what the heads of one run learned


def draw(figure, model, idx, words):
    """One of FIGURES on the tokens idx (B, T); `words`: the text of those of the first row."""
    if figure == "frequency":
        return draw_norms(pyplot(), norms(model, idx), model.cfg.base)
    if figure == "distance":
        return draw_distances(weights_by_distance(model, idx), model.cfg.block_size)
    return draw_maps(pyplot(), maps(model, idx[:1], figure), lines(words))


def inside(model, idx):
    """Of each layer in a pass over idx (B, T): its Attention, its input x (B, T, C), and q, k, v (B, H, T, d) before
    rotation."""
    outputs = {}
    with register_module_forward_hook(lambda module, args, out: outputs.update({module: out})):
        model(idx)
    for block in model.h:
        attn = block.attn
        q, k = outputs[attn.c_qk].chunk(2, -1)
        yield attn, outputs[block.ln_1], *(heads(y, attn.H) for y in (q, k, outputs[attn.c_v]))


@torch.no_grad()
def norms(model, idx):
    """{layer: (2, H, n)}: for q and k, the 2-norm of the pair of numbers that turns at frequency c, mean over the tokens
    (PoPE Figures 3 to 6, whose mean is over the heads too). In PoPE that is the magnitude mu of component c."""
    result, pos = {}, torch.arange(idx.size(1), device=idx.device)
    for i, (attn, x, q, k, _) in enumerate(inside(model, idx)):
        for pe in attn.pes:
            if pe.rotates:
                pairs = torch.stack(pe.rotate(q, k, x, pos, None)).unflatten(-1, (2, -1))  # (2, B, H, T, 2, n)
                result[i] = pairs.norm(dim=-2).mean((1, 3)).cpu()
    if len({a.size(-1) for a in result.values()}) != 1:
        raise ValueError(f"figure='frequency' shows rope, carope or pope, but the run has pe={model.cfg.pe!r}")
    return result


@torch.no_grad()
def maps(model, idx, figure):
    """{layer: (H, T, T)} for idx (1, T), zero in the future: CoPE's gates g_ij (CoPE Figure 7) or, from positions p_ij
    alone, the attention exp(z_i[p_ij]) over the largest in its row, as if q.k were the same for all keys (Figure 4)."""
    result, pos = {}, torch.arange(idx.size(1), device=idx.device)
    dist = pos[:, None] - pos
    for i, (attn, x, q, k, v) in enumerate(inside(model, idx)):
        for pe in attn.pes:
            if isinstance(pe, CoPE):
                g = pe.gates(q, dots(q, k, attn.d), dist, pe.remember(x, v, None))  # (1, H, T, T)
                z = pe.interpolate(q, pe.positions(g)).masked_fill(dist < 0, -math.inf)
                alone = (z - z.amax(-1, keepdim=True)).exp()
                result[i] = (g if figure == "gates" else alone)[0].cpu()
    if not result:
        raise ValueError(f"figure={figure!r} shows cope, cope_mlp or cope_alibi, but the run has pe={model.cfg.pe!r}")
    return result


@torch.no_grad()
def weights_by_distance(model, idx):
    """{layer: (H, T)}: the attention weight at each distance 0..T-1, mean over the queries that reach so far back and
    over the texts of idx (B, T)."""
    B, T = idx.shape
    result, pos = {}, torch.arange(T, device=idx.device)
    one_hot = torch.eye(T, device=idx.device)
    for text in idx:
        for i, (attn, x, q, k, v) in enumerate(inside(model, text[None])):
            turned = (q, k) if attn.rotation is None else attn.rotation.rotate(q, k, x, pos, None)
            memories = [pe.remember(x, v, None) for pe in attn.biases]
            # with one-hot values the outputs of attention are its weights
            weights = attn.dense(*turned, one_hot.expand(1, attn.H, T, T), pos, q, k, memories)[0]  # (H, T, T)
            sums = [weights.diagonal(-distance, 1, 2).sum(1) for distance in range(T)]
            result[i] = result.get(i, 0) + torch.stack(sums, 1).cpu()
    return {i: sums / (B * torch.arange(T, 0, -1)) for i, sums in result.items()}


def lines(words):
    """[(first token, last token, text)] of each line of a text, which is given token by token."""
    result, first = [], 0
    for t, word in enumerate(words):
        if "\n" in word or t == len(words) - 1:
            result.append((first, t, "".join(words[first : t + 1])))
            first = t + 1
    return result


def draw_norms(plt, norms, base):
    """Heat maps for q and for k on one scale: a row per frequency, named by its period in training (CARoPE: at the start);
    above, a column per head; below, a column per layer, the mean over its heads."""
    L, (_, H, n) = len(norms), next(iter(norms.values())).shape
    figure, axes = plt.subplots(2, 2, figsize=(max(10, L * H / 12), 8), sharey=True, layout="constrained")
    every, highest = torch.cat(list(norms.values()), 1), max(a.max() for a in norms.values())
    means = torch.stack([a.mean(1) for a in norms.values()], 1)  # (2, L, n)
    for row, columns, width in zip(axes, (every, means), (H, 1)):
        for ax, name, side in zip(row, ("queries", "keys"), columns):
            image = ax.imshow(side.T.numpy(), "viridis", vmin=0, vmax=highest, aspect="auto", interpolation="nearest")
            ax.vlines([i * width - 0.5 for i in range(1, L)], -0.5, n - 0.5, color="white", linewidth=1)
            ax.set_xticks([(i + 0.5) * width - 0.5 for i in range(L)], [i + 1 for i in norms])
            ax.set(title=name, xlabel="layer, with a column per head" if width > 1 else "layer, mean over its heads")
    ticks = range(0, n, max(1, n // 8))
    for ax in axes[:, 0]:
        ax.set_yticks(ticks, [f"{2 * math.pi * base ** (c / n):,.0f}" for c in ticks])
        ax.set_ylabel(f"period of frequency c, 2\u03c0 {base:g}$^{{c/{n}}}$ tokens")
    figure.colorbar(image, ax=axes)
    return figure


def draw_maps(plt, maps, lines):
    """A map of queries by keys for each layer and head."""
    L, (H, T, _) = len(maps), next(iter(maps.values())).shape
    side = max(1.3, min(2.4, 16 / H))  # inches
    figure, axes = plt.subplots(L, H, figsize=(side * H + 2, side * L + 2), squeeze=False, layout="constrained")
    colors = plt.get_cmap("Blues").with_extremes(bad="0.9")
    future = torch.ones(T, T).triu(1) > 0
    ended = [(last, text) for _, last, text in lines if "\n" in text]
    ends = [last for last, _ in ended]
    sizes = [20 if text.strip() and text.count("\n") == 1 else 80 for _, text in ended]
    begun = [(first, text.strip()) for first, last, text in lines if last - first > T // 20]  # else there is no room
    starts = {first: text[:14] for first, text in begun if text}
    for row, (i, layer) in zip(axes, maps.items()):
        for h, ax in enumerate(row):
            weights = layer[h].masked_fill(future, math.nan).numpy()
            image = ax.imshow(weights, colors, vmin=0, vmax=1, interpolation="nearest")
            ax.scatter(ends, ends, sizes, "crimson", marker="+", linewidths=1)
            ax.set_title(f"layer {i + 1}, head {h + 1}", fontsize=8)
            ax.set(xticks=[], yticks=[])
        row[0].set_yticks(list(starts), starts.values(), fontsize=7, parse_math=False)
    for ax in axes[-1]:
        ax.set_xticks(list(starts), starts.values(), fontsize=7, parse_math=False, rotation=90)
    figure.supxlabel("key; the letters begin a line, + ends one, a large + a blank one", fontsize=10)
    figure.supylabel("query", fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.5)
    return figure


def draw_distances(weights, trained):
    """A panel for each layer, a line for each head: the mean attention weight at every distance."""
    wide = min(4, len(weights))
    tall = math.ceil(len(weights) / wide)
    figure, axes = pyplot().subplots(tall, wide, figsize=(3 * wide + 1, 2.6 * tall + 0.6), squeeze=False, sharex=True,
                                     sharey=True, layout="constrained")
    for ax in axes.flat[len(weights) :]:
        ax.set_visible(False)
    for ax, (i, layer) in zip(axes.flat, weights.items()):
        for h, head in enumerate(layer):
            ax.plot(head.tolist(), color=f"C{h % 10}", linewidth=0.8, label=f"head {h + 1}")
        ax.set(title=f"layer {i + 1}", yscale="log")
        ax.set_xscale("symlog", base=2, linthresh=1)  # from 0, the token itself
        plain(ax, [trained])
    figure.supxlabel("distance, tokens; dashed: the trained length", fontsize=10)
    figure.supylabel("attention weight", fontsize=10)
    legend(figure, axes[0, 0])
    return figure
