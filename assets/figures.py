"""The pictures that sample.py draws, with matplotlib: curves of runs, and what the heads learned.

A method has the same colour in every picture (COLORS). Runs that differ in their seed alone form
one curve, their mean, with a band from the lowest to the highest.
"""
import collections
import json
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
BATCH = 8192  # tokens per forward pass
OTHER = "#b0b0b0"  # any other mix of methods
LINES = ("-", "--", ":", "-.")  # for the second, third, ... curve of one colour
FIGURES = {
    "frequency": "magnitude of q and k at each frequency, mean over the text",
    "positions": "attention from position alone, the largest weight of each query set to 1",
    "gates": "gates, how much of each key a query counts",
    "distance": "mean attention weight at each distance; dashed: the trained length",
}


def pyplot():
    """matplotlib.pyplot that draws into files. Raises ImportError without the library."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError("no picture without one more package: pip install matplotlib") from None
    plt.switch_backend("Agg")
    return plt


def subplots(rows, columns, width, height, **options):
    """(figure, its axes as an array (rows, columns)); width, height of the figure in inches."""
    return pyplot().subplots(rows, columns, figsize=(width, height), squeeze=False,
                             layout="constrained", **options)


def panels(n, across, width, height, **options):
    """(figure, n axes), at most `across` in a row; width, height of each in inches."""
    columns, rows = min(across, n), math.ceil(n / across)
    figure, axes = subplots(rows, columns, width * columns + 1, height * rows + 0.8, **options)
    for ax in axes.flat[n:]:
        ax.set_visible(False)
    return figure, axes.flat[:n]


def save(figure, path):
    figure.savefig(path + ".png", dpi=120)
    pyplot().close(figure)
    print(f"wrote {path}.png")


# --------------------------------------------------------------------------------------------------
# curves of many runs


def labels(pes, steps={}):
    """{run: label}: what tells the runs apart, from {run: its pe} and {run: its steps}, where these
    differ. The labels of `out/quickstart_pope` and of its other seed `out/quickstart_pope_seed1338`
    are both "pope"."""
    names, stems = {}, []
    for run, pe in pes.items():
        names[run] = re.sub(r"_seed\d+$", "", run.partition("@")[0])
        stems.append(names[run].removesuffix(pe))
    common = os.path.commonprefix(stems)
    cut = 1 + max(common.rfind("_"), common.rfind(os.sep))
    steps_differ, result = len(set(steps.values())) > 1, {}
    for run, name in names.items():
        options = run.partition("@")[2].replace(",", ", ")
        result[run] = f"{name[cut:]} ({options})" if options else name[cut:]
        if steps_differ:
            result[run] += f", {steps[run]:,} steps"
    return result


def curves(pes, steps={}):
    """[(label, its runs, color and linestyle)], from {run: its pe} and {run: its steps}."""
    members, drawn, result = {}, collections.Counter(), []
    for run, label in labels(pes, steps).items():
        members.setdefault(label, []).append(run)
    for label, runs in members.items():
        pe = pes[runs[0]]
        style = dict(color=COLORS.get(pe, OTHER), linestyle=LINES[drawn[pe] % len(LINES)])
        drawn[pe] += 1
        result.append((label, runs, style))
    return result


def draw_curve(ax, points, **style):
    """A line through the means and a band from the lowest to the highest; points: {x: [y of each
    run]}."""
    x = sorted(points)
    ys = [points[at] for at in x]
    ax.plot(x, [sum(y) / len(y) for y in ys], **style)
    lowest, highest = [min(y) for y in ys], [max(y) for y in ys]
    ax.fill_between(x, lowest, highest, color=style["color"], alpha=0.15, linewidth=0)


def points(table, runs, metric):
    """{length: [value of each run]} of the rows of a table that have this metric."""
    result = {}
    for row in table:
        if row["run"] in runs and metric in row:
            result.setdefault(row["length"], []).append(row[metric])
    return result


def loss_axis(*axes):
    """From the lowest loss of these axes, which share theirs, up; one that explodes leaves the picture."""
    lowest, highest = min(ax.dataLim.ymin for ax in axes), max(ax.dataLim.ymax for ax in axes)
    axes[0].set_ylim(lowest - 0.05, min(highest, 1.7 * lowest) + 0.05)


def lengths_axis(ax, table):
    lengths = sorted({row["length"] for row in table})
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, lengths, rotation=90 if len(lengths) > 6 else 0)
    ax.minorticks_off()


def plain(ax, trained=()):
    """A grid, no box, and a dashed line at each trained length."""
    for length in trained:
        ax.axvline(length, color="0.4", linestyle="--", linewidth=0.8)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def legend(figure, *axes):
    lines = {}
    for ax in axes:
        lines |= {line.get_label(): line for line in ax.get_legend_handles_labels()[0]}
    fit = figure.get_figwidth() / (0.8 + 0.085 * max(map(len, lines)))  # inches of the longest name
    columns = max(1, min(6, len(lines), int(fit)))
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=columns, frameon=False)


def draw_extrapolation(table, by_position, path):
    """Loss against length, and against the position within the longest length. table: rows of run,
    pe, split, trained, length, loss, window_loss; by_position: {run: loss at each position,
    (T,)}."""
    figure, ((left, right),) = subplots(1, 2, 10, 5, sharey=True)
    trained = {row["run"]: row["trained"] for row in table}
    for label, runs, style in curves({row["run"]: row["pe"] for row in table}):
        windows = points(table, runs, "window_loss")
        draw_curve(left, windows, **style | dict(linewidth=0.6))
        draw_curve(left, points(table, runs, "loss"), label=label, marker=".", **style)
        width = max(1, trained[runs[0]] // 4)  # the mean over a quarter of the trained length
        along = {}
        for run in (run for run in runs if run in by_position):
            whole = by_position[run][: len(by_position[run]) // width * width]
            for n, loss in enumerate(whole.view(-1, width).mean(1).tolist()):
                along.setdefault((n + 0.5) * width, []).append(loss)
        draw_curve(right, along, **style)
    loss_axis(left, right)
    lengths_axis(left, table)
    for ax in (left, right):
        plain(ax, set(trained.values()))
    left.set(xlabel="tokens in the sequence\nthin: each sees the last trained length alone",
             ylabel=f"{table[0]['split']} loss, nats per token")
    right.set(xlabel="position in the longest sequence\ndashed: the trained length")
    legend(figure, left)
    save(figure, path)


def draw_errors(table, path):
    """Errors, or the loss where every target counts, against the length of the splits. table: rows
    of run, pe, trained, length, loss and, on a task, token_error and sequence_error in percent."""
    metrics = {"token_error": "wrong targets, %", "sequence_error": "rows with a wrong target, %"}
    if not any("token_error" in row for row in table):
        metrics = {"loss": "loss, nats per token"}
    figure, axes = subplots(1, len(metrics), 1 + 4.5 * len(metrics), 5)
    for ax, (metric, name) in zip(axes[0], metrics.items()):
        for label, runs, style in curves({row["run"]: row["pe"] for row in table}):
            draw_curve(ax, points(table, runs, metric), label=label, marker=".", **style)
        lengths_axis(ax, table)
        plain(ax, {row["trained"] for row in table})
        ax.set(xlabel="tokens in the row; dashed: the trained length", ylabel=name)
        if metric != "loss":
            ax.set_ylim(bottom=0)
    legend(figure, axes[0, 0])
    save(figure, path)


def draw_report(lines, path):
    """A panel for each config that was evaluated at several lengths: loss of --extrapolate, one for
    each split, or errors of --evaluate on a task, against length. lines: of results.jsonl."""
    found = {}  # title -> lines
    for line in lines:
        title = os.path.basename(line["config"]).removesuffix(".py")
        split, _, multiple = line["split"].rpartition(" ")
        if line["metric"] == "loss" and multiple.endswith("x"):
            found.setdefault(title if split == "val" else f"{title}, {split}", []).append(line)
        if line["metric"] == "token_error":
            found.setdefault(title, []).append(line)
    found = {name: here for name, here in found.items() if len({line["length"] for line in here}) > 1}
    if not found:
        return
    figure, axes = panels(len(found), 2, 5, 3.6)
    for ax, (name, here) in zip(axes, found.items()):
        metric = here[-1]["metric"]
        table = [line | {metric: line["value"]} for line in here if line["metric"] == metric]
        steps = {line["run"]: line["steps"] for line in table}
        for label, runs, style in curves({line["run"]: line["pe"] for line in table}, steps):
            draw_curve(ax, points(table, runs, metric), label=label, marker=".", **style)
        lengths_axis(ax, table)
        plain(ax, {line["trained"] for line in table})
        ax.set(title=name, xlabel="tokens; dashed: as trained")
        if metric == "loss":
            loss_axis(ax)
            ax.set_ylabel("loss, nats per token")
        else:
            ax.set(ylabel="wrong targets, %", ylim=(0, 100))
    legend(figure, *axes)
    save(figure, path)


@torch.no_grad()
def recall_errors(model, splits, device):
    """{(length, n): [wrong, ...]} over splits of data/recall.py: for each query that stands 2^n to
    2^(n+1) - 1 tokens after its key's first place in the row, whether its answer is wrong."""
    result = collections.defaultdict(list)
    for split in splits:
        length = split.row_length - 1
        starts, n = split.windows(length), max(1, BATCH // length)
        for i in range(0, len(starts), n):
            batch = split.read(starts[i : i + n], length)
            x, y = (torch.from_numpy(a).to(device) for a in batch)
            wrong = (model(x, y)[0].argmax(-1) != y).tolist()
            rows = x.tolist()
            for row, place in (y != -1).nonzero().tolist():
                distance = place - rows[row].index(rows[row][place])
                result[length, int(math.log2(distance))].append(wrong[row][place])
    return result


def draw_recall(models, splits, device, path):
    """<path>_distance.png: for each curve a map of its errors, distance by length."""
    pyplot()  # before the evaluation, if it is not there
    errors = {run: recall_errors(model, splits[run], device) for run, (model, _) in models.items()}
    drawn = curves({run: model.cfg.pe for run, (model, _) in models.items()})
    trained = {checkpoint["meta"]["row_length"]["train"] - 1 for _, checkpoint in models.values()}
    figure, axes = panels(len(drawn), 5, 2.6, 2.6, sharey=True)
    cells = {cell for run in errors for cell in errors[run]}
    lengths = sorted({length for length, _ in cells})
    bins = sorted({n for _, n in cells})
    for ax, (label, runs, _) in zip(axes, drawn):
        grid = torch.full((len(lengths), len(bins)), math.nan)  # nan: no query stands there
        for length, n in cells:
            wrong = [miss for run in runs for miss in errors[run][length, n]]
            if wrong:
                grid[lengths.index(length), bins.index(n)] = 100 * sum(wrong) / len(wrong)
        image = ax.imshow(grid.numpy(), "magma_r", vmin=0, vmax=100, aspect="auto", origin="lower")
        ax.set_facecolor("0.9")
        for row in (row for row, length in enumerate(lengths) if length in trained):
            ax.axhline(row + 0.5, color="0.4", linestyle="--", linewidth=0.8)
        ax.set_xticks(range(len(bins)), [2**n for n in bins], rotation=90)
        ax.set_yticks(range(len(lengths)), lengths)
        ax.set_title(label)
    figure.supxlabel("tokens from the key in the pair to the query, or up to twice as many", fontsize=10)
    figure.supylabel("tokens in the row; dashed: trained up to here", fontsize=10)
    figure.colorbar(image, ax=list(axes), label="wrong answers, %")
    save(figure, path + "_distance")


def draw_training(runs, keys, against, path):
    """A panel for each key of the runs' logs, against "step" or the number of training "tokens". It is
    as high as all values but those of the first twentieth, which would leave no room for the rest."""
    logs = {run: read_log(run) for run in runs}
    for run, (_, log) in logs.items():
        for key in keys:
            if key not in log:
                raise ValueError(f"keys={key!r} is not in {run}/log.jsonl; it has {', '.join(sorted(log))}")
    figure, axes = subplots(1, len(keys), 1 + 4.5 * len(keys), 5)
    for ax, key in zip(axes[0], keys):
        for label, members, style in curves({run: cfg["pe"] for run, (cfg, _) in logs.items()}):
            values = {}
            for run in members:
                cfg, log = logs[run]
                scale = cfg["batch_size"] * cfg["block_size"] if against == "tokens" else 1
                for step, value in log[key].items():
                    values.setdefault(step * scale, []).append(value)
            draw_curve(ax, values, label=label, **style)
        end = ax.dataLim.xmax
        later = [y for line in ax.lines for x, y in line.get_xydata() if x >= end / 20]
        margin = 0.05 * (max(later) - min(later)) or 0.05
        plain(ax)
        ax.set(xlabel=against, ylabel=key, ylim=(min(later) - margin, max(later) + margin))
    legend(figure, axes[0, 0])
    save(figure, path)


def read_log(run):
    """(config, {key: {step: value}}) of RUN/log.jsonl: `loss` of training, `val/loss` of a
    split."""
    name = os.path.join(run, "log.jsonl")
    if not os.path.isfile(name):
        raise FileNotFoundError(f"{name} does not exist; name run directories that train.py wrote")
    cfg, log = {}, {}
    with open(name, encoding="utf-8") as file:
        for line in map(json.loads, file):
            cfg = line.get("config", cfg)
            if "step" in line:
                step, prefix = line.pop("step"), f"{line.pop('split')}/" if "split" in line else ""
                for key, value in line.items():  # a step that a kill undid comes twice: the last
                    log.setdefault(prefix + key, {})[step] = value
    return cfg, log


# --------------------------------------------------------------------------------------------------
# what the heads of one run learned


def draw_heads(folder, run, name, model, trained, idx, words, chosen):
    """Write <run>_<name>.png, one of FIGURES, on the texts idx (B, T). Maps are of the first text,
    whose tokens spell `words`, and of the heads chosen, "4.3,1.2", or of all."""
    if name == "frequency":
        figure = draw_norms(norms(model, idx), model.cfg.base, trained)
    elif name == "distance":
        figure = draw_distances(weights_by_distance(model, idx), trained)
    else:
        figure = draw_maps(choose_heads(maps(model, idx[:1], name), chosen), lines(words))
    directory, at, options = run.partition("@")
    file = f"{os.path.basename(directory)}{at}{options}_{name}"
    figure.suptitle(f"{labels({run: model.cfg.pe})[run]}: {FIGURES[name]}", wrap=True)
    save(figure, os.path.join(folder, file))


def read_text(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        raise ValueError(f"text={path!r} is no file of UTF-8 text; name one") from None


def inside(model, idx):
    """Of each layer in a pass over idx (B, T): its Attention, its input x (B, T, C), and q, k, v
    (B, H, T, d) before rotation."""
    outputs = {}
    with register_module_forward_hook(lambda module, args, out: outputs.update({module: out})):
        model(idx)
    for block in model.h:
        attn = block.attn
        q, k = outputs[attn.c_qk].chunk(2, -1)
        yield attn, outputs[block.ln_1], *(heads(y, attn.H) for y in (q, k, outputs[attn.c_v]))


@torch.no_grad()
def norms(model, idx):
    """{layer: (2, H, n)}: for q and k, the 2-norm of the pair of numbers that turns at frequency
    c, mean over the tokens (PoPE Figures 3 to 6, whose mean is over the heads too). In PoPE that
    is the magnitude mu of component c."""
    result, pos = {}, torch.arange(idx.size(1), device=idx.device)
    for i, (attn, x, q, k, _) in enumerate(inside(model, idx)):
        for pe in attn.pes:
            if pe.rotates:
                pairs = torch.stack(pe.rotate(q, k, x, pos, None))  # (2, B, H, T, 2 n)
                pairs = pairs.unflatten(-1, (2, -1))  # (2, B, H, T, 2, n)
                result[i] = pairs.norm(dim=-2).mean((1, 3)).cpu()
    if len({a.size(-1) for a in result.values()}) != 1:
        raise ValueError("figure='frequency' shows rope, carope or pope, "
                         f"but the run has pe={model.cfg.pe!r}")
    return result


@torch.no_grad()
def maps(model, idx, figure):
    """{layer: (H, T, T)} for idx (1, T), zero in the future: CoPE's gates g_ij (CoPE Figure 7) or,
    from positions p_ij alone, the attention exp(z_i[p_ij]) over the largest in its row, as if q.k
    were the same for all keys (Figure 4)."""
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
        raise ValueError(f"figure={figure!r} shows cope, cope_mlp or cope_alibi, "
                         f"but the run has pe={model.cfg.pe!r}")
    return result


@torch.no_grad()
def weights_by_distance(model, idx):
    """{layer: (H, T)}: the attention weight at each distance 0..T-1, mean over the queries that
    reach so far back and over the texts idx (B, T)."""
    B, T = idx.shape
    result, pos = {}, torch.arange(T, device=idx.device)
    one_hot = torch.eye(T, device=idx.device)
    for text in idx:
        for i, (attn, x, q, k, v) in enumerate(inside(model, text[None])):
            raw_q, raw_k = q, k
            if attn.rotation is not None:
                q, k = attn.rotation.rotate(q, k, x, pos, None)
            memories = [pe.remember(x, v, None) for pe in attn.biasing]
            # with one-hot values, the outputs of attention are its weights
            values = one_hot.expand(1, attn.H, T, T)
            weights = attn.dense(q, k, values, pos, raw_q, raw_k, memories)[0]  # (H, T, T)
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


def draw_norms(norms, base, trained):
    """Heat maps for q and for k on one scale: a row per frequency, named by its period in training
    (CARoPE: at the start). Above, a column per head; below, a column per layer, its heads' mean."""
    L, (_, H, n) = len(norms), next(iter(norms.values())).shape
    highest = max(layer.max().item() for layer in norms.values())
    heads = torch.cat(list(norms.values()), 1)  # (2, L H, n)
    figure, axes = subplots(2, 2, min(24, max(10, L * H / 12)), 8, sharey=True)
    periods = [2 * math.pi * base ** (c / n) for c in range(n)]
    within = sum(period <= trained for period in periods)
    ticks = range(0, n, max(1, n // 8))
    for row, columns, width in zip(axes, (heads, heads.unflatten(1, (L, H)).mean(2)), (H, 1)):
        for ax, name, side in zip(row, ("queries", "keys"), columns):
            image = ax.imshow(side.T.numpy(), vmin=0, vmax=highest, aspect="auto")
            bounds = [i * width - 0.5 for i in range(1, L)]
            ax.vlines(bounds, -0.5, n - 0.5, color="white", linewidth=1)
            ax.axhline(within - 0.5, color="white", linewidth=1, linestyle="--")
            ax.set_xticks([(i + 0.5) * width - 0.5 for i in range(L)], [i + 1 for i in norms])
            ax.set(title=name, xlabel="layer, a column per head" if width > 1 else "layer, heads' mean")
        row[0].set_yticks(ticks, [f"{periods[c]:,.0f}" for c in ticks])
        row[0].set_ylabel(f"period of frequency c, 2\u03c0 {base:g}$^{{c/{n}}}$ tokens")
    figure.supxlabel(f"above the dashed line: periods within the {trained} trained tokens", fontsize=10)
    figure.colorbar(image, ax=axes)
    return figure


def choose_heads(maps, chosen):
    """Rows of ((layer, head), its map (T, T)): those of "4.3,1.2", counted from 1, or a row for
    each layer where that is empty."""
    if not chosen:
        return [[((i, h), head) for h, head in enumerate(layer)] for i, layer in maps.items()]
    there = {}
    for i, layer in maps.items():
        for h, head in enumerate(layer):
            there[f"{i + 1}.{h + 1}"] = ((i, h), head)
    for word in chosen.split(","):
        if word not in there:
            raise ValueError(f"heads={word!r} is no layer.head of this figure; "
                             f"choose among {', '.join(there)}")
    return [[there[word] for word in chosen.split(",")]]


def draw_maps(grid, lines):
    """Maps of queries by keys, from choose_heads; lines: of the text."""
    L, H, T = len(grid), len(grid[0]), len(grid[0][0][1])
    side = max(1.3, min(2.4 if L > 1 else 4.8, 16 / H))  # inches
    figure, axes = subplots(L, H, side * H + 2, side * L + 2)
    colors = pyplot().get_cmap("Blues").with_extremes(bad="0.9")
    future = torch.ones(T, T).triu(1) > 0
    ends, sizes, starts = [], [], {}
    for first, last, text in lines:
        if "\n" in text:
            title = re.fullmatch(r"\s*=.*=\s*", text)  # as Wikipedia marks it
            ends.append(last)
            sizes.append(80 if title or not text.strip() or text.count("\n") > 1 else 20)
        if text.strip() and last - first > T // 20:  # else there is no room for its letters
            starts[first] = text.strip()[:14]
    for row, maps in zip(axes, grid):
        for ax, ((i, h), head) in zip(row, maps):
            weights = head.masked_fill(future, math.nan).numpy()
            image = ax.imshow(weights, colors, vmin=0, vmax=1, interpolation="nearest")
            ax.scatter(ends, ends, sizes, "crimson", marker="+", linewidths=1)
            ax.set_title(f"layer {i + 1}, head {h + 1}", fontsize=8)
            ax.set(xticks=[], yticks=[])
        row[0].set_yticks(list(starts), starts.values(), fontsize=7, parse_math=False)
    for ax in axes[-1]:
        ax.set_xticks(list(starts), starts.values(), fontsize=7, parse_math=False, rotation=90)
    key = "key; letters begin a line, + ends one, a large + a blank one or a title"
    figure.supxlabel(key, fontsize=10)
    figure.supylabel("query", fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.5)
    return figure


def draw_distances(weights, trained):
    """A panel for each layer, a line for each head: the mean attention weight at every distance, of
    those far away over an eighth of an octave."""
    T = next(iter(weights.values())).size(1)
    begins = sorted({0, *(round(2 ** (n / 8)) for n in range(8 * int(math.log2(T)) + 8))})
    begins = [begin for begin in begins if begin < T]
    figure, axes = panels(len(weights), 4, 3, 2.6, sharey=True)
    for ax, (i, layer) in zip(axes, weights.items()):
        for h, head in enumerate(layer):
            means = [part.mean().item() for part in head.tensor_split(begins[1:])]
            style = dict(color=f"C{h % 10}", linestyle=LINES[h // 10 % len(LINES)], linewidth=1)
            ax.plot(begins, means, label=f"head {h + 1}", **style)
        ticks = [0, *(4**n for n in range(10) if 4**n < T)]
        ax.set_xscale("symlog", base=2, linthresh=1)  # from 0, the token itself
        ax.set_xticks(ticks, ticks)
        ax.set(title=f"layer {i + 1}", xlabel="distance, tokens", yscale="log", xlim=(0, T))
        plain(ax, [trained])
    least = min(layer.clamp(min=1e-6).min().item() for layer in weights.values())
    axes[0].set(ylim=(least, 1.2))  # of every panel
    figure.supylabel("attention weight", fontsize=10)
    legend(figure, axes[0])
    return figure
