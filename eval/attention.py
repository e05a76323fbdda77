"""
Draws what the attention of trained models does (this needs matplotlib):

    python -m eval.attention frequency RUN ...    which frequencies the queries and keys use
    python -m eval.attention rotation RUN ...     what PoPE and CARoPE have learned
    python -m eval.attention gates RUN ...        which keys CoPE counts
    python -m eval.attention positions RUN ...    CoPE's attention from position alone

Each picture is written to RUN/<name>.png. The model reads segments of a split, or the beginnings of
the files of --text. They have as many tokens as in training, but 256 at most, or as many as
--length says. The first two pictures are means over all segments or files, and the last two
show only the first one.
"""
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

import config
from config import Mistake, devices, runs
from data.tokenizer import tokenizer
from eval import draw
from model import CARoPE, CoPE, PoPE, RoPE, frequencies, overrides, scaled_dot_products

TEXTS = 10  # segments of the split that are read
SHORT = 256  # tokens of each segment at most, because a larger map would be illegible
MOST_COLORS = 10  # matplotlib names ten colours, C0 to C9
TITLES = {
    "frequency": "magnitude of q and k at each frequency, mean over heads",
    "rotation": "what the rotation has learned",
    "gates": "gates, how much of each key a query counts",
    "positions": "attention from position alone, the largest weight of each query set to 1",
}
MAPS = ("gates", "positions")  # the others are lines over frequencies

def main(words):
    parser = config.Parser(__doc__)
    parser.add_argument("figure", choices=TITLES)
    runs.add_run_options(parser)
    runs.add_data_options(parser)
    parser.add_argument("--length", type=config.count, metavar="N",
                        help="tokens of a segment or file [as in training, but 256 at most]")
    parser.add_argument("--text", type=config.comma_separated, metavar="FILES",
                        help="text files to show, instead of a split")
    parser.add_argument("--out", type=config.text, metavar="FILE",
                        help="another file for the picture")
    args = parser.parse_intermixed_args(words)
    if args.text and (args.data or args.split):
        raise Mistake("--text takes the place of --data and --split; leave them out")
    if args.out and len(args.runs) > 1:
        raise Mistake(f"--out={args.out} names one picture, but there are {len(args.runs)} runs")
    for name in args.runs:
        run = runs.TrainedRun(name, args.device, args.data)
        figure = figure_of(run, args)
        options = run.name.removeprefix(run.folder)  # such as "@rope_scaling=ntk,rope_factor=8"
        draw.save(figure, args.out or f"{run.folder}/{args.figure}{options}.png")

# --- which tokens are read ------------------------------------------------------------------------

def tokens_of_split(run, split, length):
    """Returns the tokens (TEXTS, length) of segments that are spread evenly over the split."""
    window = max(length, split.row_length - 1)  # a row is read from its start
    x, _ = devices.to_device(run.device, *split.read(split.windows(window, TEXTS), window))
    return x[:, :length]

def tokens_of_files(run, paths, length):
    """Returns at most `length` tokens at the beginnings of B text files, cut to the shortest,
    (B, T)."""
    encode = tokenizer(run.meta["tokenizer"]).encode
    texts = []
    for path in paths:
        try:
            text = Path(path).expanduser().read_text("utf-8")
        except UnicodeDecodeError:
            raise Mistake(f"{path} is not UTF-8 text; convert it first") from None
        if not text:
            raise Mistake(f"{path} is empty; leave it out")
        texts.append(encode(text)[:length])
    shortest = min(len(text) for text in texts)
    return torch.tensor([text[:shortest] for text in texts], device=run.device)

# --- what is measured in each layer ---------------------------------------------------------------

class Layer(NamedTuple):
    """An Attention and what it has computed of B texts before its softmax. The names are those of
    Attention.forward and Attention.encode."""
    attn: torch.nn.Module
    x: torch.Tensor  # (B, T, C), the input
    i: torch.Tensor  # (T, 1)
    j: torch.Tensor  # (T,)
    per_position: dict[str, Any]
    q: torch.Tensor  # (B, H, T, d), or of width 2d after PoPE
    k: torch.Tensor  # like q
    v: torch.Tensor  # (B, H, T, d)
    unencoded_q: torch.Tensor  # (B, H, T, d)
    per_key: list[torch.Tensor]

@torch.no_grad()
def measure(model, idx, measure_layer):
    """Returns {number of a layer: what measure_layer returns for its Layer}, for the texts idx
    (B, T). Layers for which it returns None are left out, because they have nothing to show."""
    layers = {}

    def add(attn, args):
        x, pos, j, per_position, _ = args
        encoded = attn.encode(x, pos, per_position, {})
        found = measure_layer(Layer(attn, x, pos[:, None], j, per_position, *encoded))
        if found is not None:
            layers[attentions.index(attn)] = found.detach().cpu()

    attentions = [block.attn for block in model.h]
    hooks = [attn.register_forward_pre_hook(add) for attn in attentions]
    model(idx)
    for hook in hooks:
        hook.remove()
    return layers

def norms(layer):
    """Returns (2, n), the norms in q and in k of the pair of entries that rotates at each of the n
    frequencies, averaged over texts, heads and tokens (PoPE Figures 3 to 6). In PoPE such a norm is
    a magnitude mu_c."""
    for pe in layer.attn.pes:
        if overrides(type(pe), "encode_qk"):
            pairs = torch.stack((layer.q, layer.k))  # (2, B, H, T, d)
            if isinstance(pe, RoPE):  # with rope_fraction, the other dimensions do not rotate
                pairs = pairs[..., : pe.rotated_width(pe.cfg)]
            pairs = pairs.unflatten(-1, (2, -1))  # (2, B, H, T, 2, n)
            return pairs.norm(dim=-2).mean((1, 2, 3))

def learned_rotation(layer):
    """Returns (H, n), which holds PoPE's delta_c in radians, or the mean of CARoPE's f^c over the
    tokens divided by its value at initialisation."""
    for pe in layer.attn.pes:
        if isinstance(pe, PoPE):
            return pe.delta
        if isinstance(pe, CARoPE):
            x = layer.x
            embeddings = layer.per_position["carope"]
            if embeddings is not None:  # they set the frequencies
                x = embeddings
            tokens = x.flatten(0, 1)[:, None]  # as texts of one token, whose phase is f^c
            q = x.new_zeros(len(tokens), pe.H, 1, pe.d)
            cache = {}
            pe.encode_qk(q, q, tokens, None, cache)
            mean = cache["phi"].mean((0, 2))  # (H, n)
            return mean / frequencies(pe.cfg.base, mean.size(1), mean)

def cope_map(layer, name):
    """Calls the layer's CoPE method of this name, gates or logit_bias. Returns its result for the
    first text as a map (H, T, T), which is nan where the key follows the query."""
    for pe, gate_k in zip(layer.attn.bias_pes, layer.per_key):
        if isinstance(pe, CoPE):
            logits = scaled_dot_products(layer.q, layer.k, pe.d)
            found = getattr(pe, name)(layer.unencoded_q, logits, layer.i, layer.j, gate_k)
            return found[0].masked_fill(layer.j > layer.i, math.nan)

def gates(layer):
    """Returns CoPE's gates g_ij, (H, T, T) (CoPE Figure 7)."""
    return cope_map(layer, "gates")

def position_weights(layer):
    """Returns (H, T, T), CoPE's attention from position alone, as if q.k were the same for all
    keys. It is exp(z_i[p_ij]), divided by the largest in its row (CoPE Figure 4)."""
    z = cope_map(layer, "logit_bias")
    if z is not None:
        return (z - z.nan_to_num(-math.inf).amax(-1, keepdim=True)).exp()

MEASURES = {"frequency": norms, "rotation": learned_rotation, "gates": gates,
            "positions": position_weights}

# --- how it is drawn ------------------------------------------------------------------------------

def figure_of(run, args):
    """Returns the figure of a run that the command line asks for."""
    length = args.length or min(SHORT, run.trained)
    if args.text:
        idx = tokens_of_files(run, args.text, length)
    else:
        idx = tokens_of_split(run, run.open_split(args.split), length)
    if args.figure in MAPS:
        idx = idx[:1]
    layers = measure(run.model, idx, MEASURES[args.figure])
    if not layers:
        raise Mistake(f"{args.figure} has nothing to show of {run.name}, because its method is "
                      f"pe={run.model.cfg.pe}")
    if args.figure in MAPS:
        decode = tokenizer(run.meta["tokenizer"]).decode
        figure = draw_maps(layers, [decode([token]) for token in idx[0].tolist()])
    elif args.figure == "frequency":
        figure = draw_lines(run, layers, ("queries", "keys"), sharey=True)
        for ax in figure.axes:
            ax.set_ylabel("magnitude")
    else:
        figure = draw_lines(run, layers, [f"head {h + 1}" for h in range(run.model.cfg.n_head)])
        for ax, i in zip(figure.axes, layers):
            if any(isinstance(pe, CARoPE) for pe in run.model.h[i].attn.pes):
                ax.set(ylabel="mean frequency / initial one", yscale="log")
            else:
                ax.set_ylabel("delta, radians")
    figure.suptitle(draw.plain(f"{run.name}: {TITLES[args.figure]}", 100))
    return figure

def draw_lines(run, layers, names, **options):
    """Draws a panel for each layer, with lines over its frequencies. layers is {layer: (lines, n)},
    there is a name for each line, and options are those of draw.panels. The axis shows the period
    of each frequency in tokens, which for CARoPE is that at initialisation."""
    figure, axes = draw.panels(len(layers), 4, 3.2, 2.6, **options)
    for ax, (i, lines) in zip(axes, layers.items()):
        theta = frequencies(run.model.cfg.base, lines.size(1), lines)
        for pe in run.model.h[i].attn.pes:
            if isinstance(pe, RoPE):  # rope_scaling changes its frequencies
                theta = pe.theta(lines)
        periods = (2 * math.pi / theta).tolist()
        for h, (line, name) in enumerate(zip(lines, names)):
            style = draw.STYLES[h // MOST_COLORS % len(draw.STYLES)]
            ax.plot(periods, line, color=f"C{h % MOST_COLORS}", linestyle=style, linewidth=1,
                    label=name)
        ax.set(xlabel="period, tokens; dashed: as trained", xscale="log", title=f"layer {i + 1}")
        draw.decorate(ax, [run.trained])
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(8, len(names)), frameon=False)
    return figure

def draw_maps(layers, words):
    """Draws a map of queries by keys for every head, with a row of maps for each layer. layers is
    {layer: (H, T, T)}, and words are the texts of the T tokens. The paper marks the titles of
    sections in its Figure 4. Any text has lines, so here the ends of lines are marked."""
    heads = len(next(iter(layers.values())))
    inches = max(1.5, min(4.5, 16 / heads))
    figure, axes = draw.panels(
        heads * len(layers), heads, inches, inches, sharex=True, sharey=True)
    line_ends = [t for t, word in enumerate(words) if "\n" in word]
    maps = [(i, h, head) for i, layer in layers.items() for h, head in enumerate(layer)]
    for ax, (i, h, head) in zip(axes, maps):
        image = ax.imshow(head.numpy(), "Blues", vmin=0, vmax=1, interpolation="nearest")
        ax.scatter(line_ends, line_ends, 20, "crimson", marker="+", linewidths=1)
        ax.set_title(f"layer {i + 1}, head {h + 1}", fontsize=8)
        ax.set_facecolor("0.9")
    figure.supxlabel("key (+ marks the end of a line)", fontsize=10)
    figure.supylabel("query", fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.5)
    return figure

if __name__ == "__main__":
    config.run(main)
