r"""
What eval/walk.py needs besides positional encodings: small models, the results of larger ones, and
pictures (these need matplotlib).

This command renders walk.md again (after `pip install jupytext nbconvert ipykernel`):

    RENDER=1 jupytext --to ipynb --set-kernel python3 --execute -o - eval/walk.py |
    jupyter nbconvert --stdin --to markdown --CoalesceStreamsPreprocessor.enabled=True \
        --output-dir eval --output walk
"""
import dataclasses
import functools
import io
import math
import os
import statistics
import sys
import textwrap
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Wedge
from PIL import Image  # matplotlib needs it too

import config
from eval import curves, report
from model import GPT, PES, GPTConfig, RoPE, scaled_dot_products

IN_NOTEBOOK = "ipykernel" in sys.modules

def begin(doc):
    """Prints the lesson's docstring and ends the script if it is run with --help."""
    if not IN_NOTEBOOK:
        config.run(config.Parser(doc).parse_args)

def heading(text):
    """Prints what the next lines show. A notebook has headings of its own."""
    if not IN_NOTEBOOK:
        print(f"\n{text}")

# --- small models ---------------------------------------------------------------------------------

TRAINED, LONGER = 64, 512  # bytes that the small models read at once, in training and afterwards
SMALL = GPTConfig(vocab_size=256, block_size=TRAINED, n_layer=2, n_head=4, n_embd=64, cope_npos=32)
UNSEEN = "argparse.py"  # the part of the text that no model is trained on

@functools.cache
def texts():
    """Returns the modules of Python's standard library without UNSEEN, (N,), and 64 segments of
    UNSEEN, (64, LONGER + 1), as bytes."""
    library = Path(os.__file__).parent
    modules = [path for path in sorted(library.glob("[a-z]*.py")) if path.name != UNSEEN]
    train = b"".join(path.read_bytes() for path in modules)
    train = torch.frombuffer(bytearray(train), dtype=torch.uint8)
    unseen = torch.tensor(list((library / UNSEEN).read_bytes()))
    starts = torch.linspace(0, len(unseen) - LONGER - 1, 64).long()[:, None]
    return train, unseen[starts + torch.arange(LONGER + 1)]

def train(pe, steps=300, seed=0):
    """Returns a small model with this method, trained on segments of TRAINED bytes."""
    text, _ = texts()
    torch.manual_seed(seed)
    gpt = GPT(dataclasses.replace(SMALL, pe=pe))
    optimizer = gpt.configure_optimizers(0.1, 3e-3, (0.9, 0.99), "cpu")
    for _ in range(steps):
        starts = torch.randint(len(text) - TRAINED, (16, 1))
        segments = text[starts + torch.arange(TRAINED + 1)].long()
        _, loss = gpt(segments[:, :-1], segments[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gpt.clamp_parameters()  # keeps pope's delta within its bounds
    return gpt.eval()

def changed(gpt, **options):
    """Returns a model with the weights of gpt, but other options."""
    other = GPT(dataclasses.replace(gpt.cfg, **options))
    other.load_state_dict(gpt.state_dict())
    return other.eval()

@torch.no_grad()
def losses_of(gpt):
    """Returns the loss at each position, (LONGER,), as a mean over the unseen segments."""
    _, segments = texts()
    _, losses = gpt(segments[:, :-1], segments[:, 1:], reduction="none")
    return losses.mean(0)

# --- larger models, from eval/results.jsonl -------------------------------------------------------

def published(methods):
    """Returns the results of these methods on text, with the options of config/quickstart.py."""
    lines = report.read([Path(__file__).with_name("results.jsonl")])
    return [line for line in lines
            if line["experiment"] == "quickstart" and line["pe"] in methods
            and line["multiple"] and not line["flags"] and not line["options"]]

def mean_loss(lines, pe, metric, multiple):
    """Returns the value of a metric for the method pe, at this multiple of the trained length, as
    a mean over the seeds."""
    return statistics.fmean(line["value"] for line in lines if (
        line["pe"], line["metric"], line["multiple"]) == (pe, metric, multiple))

# --- how a picture is shown -----------------------------------------------------------------------

WIDTH = 9  # inches, so that letters of 9 points can be read in a picture that is 900 pixels wide

def show(figure, section, name, what):
    """Shows a picture of a section of the lesson. A script writes it to out/ and says so. While
    walk.md is rendered, which sets RENDER, the picture goes to eval/walk_files/, and a link to it
    onto the page. `what` says what the picture shows."""
    drawn, png = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=150)
    # 256 colours are enough, and make the file a third as large
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(png, "PNG", optimize=True)
    if not IN_NOTEBOOK:
        path = Path("out") / f"walk_{name}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png.getvalue())
        heading(textwrap.fill(f"{section}. {path} shows {what}", 100, subsequent_indent="   "))
        return
    from IPython import display

    if "RENDER" in os.environ:
        folder = Path(__file__).with_name("walk_files")
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.png").write_bytes(png.getvalue())
        display.display(display.Markdown(f"![{what[0].upper()}{what[1:]}](walk_files/{name}.png)"))
    else:
        display.display(display.Image(png.getvalue()))

# --- what each method adds to attention -----------------------------------------------------------

LINE = "a giraffe ate a bun"
BEGINS_WORD = torch.tensor([t == 0 or LINE[t - 1] == " " for t in range(len(LINE))])
IS_A = torch.tensor([letter == "a" for letter in LINE])
D = 32  # the width of the only head
ANSWERS = {  # {what the effect depends on: {method: what its panel shows}}
    "The effect depends on where query and key are": {
        "learned": "a vector\nper position", "sinusoidal": "waves over\npositions",
        "expe": "the position\nas a number", "exqpe": "this number\nin big steps"},
    "It depends only on their distance, so each diagonal has one colour": {
        "rope": "waves that\ncontent shifts", "pope": "waves with a\ncommon crest",
        "relative": "a vector\nper distance", "t5": "a number per\ndistance range",
        "alibi": "fades with\ndistance"},
    "It depends on the letters between them: those that begin words count (in fox, every “a”)": {
        "carope": "rotates at\neach word", "fox": "fades at\neach “a”",
        "cope": "a vector per\nword count", "cope_mlp": "a curve over\nword counts",
        "cope_alibi": "fades with\nword count"},
}

@torch.no_grad()
def effect(name, heeded):
    """Returns what the method adds to the logit of query i and key j, (T, T), minus its mean. It is
    nan where the key follows the query. heeded (T,) is True for the letters that matter to carope,
    fox and all kinds of cope."""
    torch.manual_seed(6)  # chosen so that no two panels look alike
    T = len(heeded)
    n_head = 4 if name == "alibi" else 1  # the first of four heads has the slope 1/4
    # most of these options make the steps large, so that so short a text shows them
    pe = PES[name](GPTConfig(
        n_head=n_head, n_embd=D, block_size=T, base=100.0, sinusoidal_scale=False, t5_buckets=8,
        t5_max_distance=16, cope_gates="values", cope_npos=8, cope_scale_z=True,
        cope_slopes="geometric", cope_m0=0.8, expe_l=5, expe_theta=0.25, expe_theta2=1.25))
    std = 0.5 if name == "learned" else 1.0  # learned vectors act twice, on q and on k
    for key, p in pe.named_parameters():
        if key == "W":
            p[0] = 1.0  # carope and fox read the first entry of x
        elif key not in ("b", "delta"):
            p.normal_(0, std)

    # the content: the layer's input x, which only carope and fox read, and q, k and v
    x = torch.zeros(1, T, D)
    x[..., 0] = torch.where(heeded, -1.0, 6.0)
    a, b = 1.5 * torch.randn(2, D)
    a[[0, D // 2]] = 0.0  # the pair that carope rotates by the same angle at every letter
    q = a.expand(1, T, D)
    k = b.expand(1, T, D)
    gate_logits = torch.where(heeded, 20.0, -20.0)  # which in cope are q.v / sqrt(d) here
    v = gate_logits[:, None] * a / a.square().sum() * D**0.5
    plain_logits = scaled_dot_products(q, k, D)  # those without the method

    # the hooks, in the order in which a layer calls them
    pos = torch.arange(T)
    q = pe.inputs(pe.embed(q, pos), pos)[:, None]  # (1, 1, T, d)
    k = pe.inputs(pe.embed(k, pos), pos)[:, None]
    if name in ("expe", "exqpe"):
        q = q * (torch.arange(D) == 0)  # the head reads only the first entry
    encoded_q, k = pe.encode_qk(q, k, x, pe.per_position(x, pos), {})
    logits = scaled_dot_products(encoded_q, k, D)
    per_key = pe.per_key(x, k, v[None, None], {})
    bias = pe.logit_bias(q, logits, pos[:, None], pos, per_key)

    added = (logits + bias - plain_logits)[0, 0].masked_fill(pos > pos[:, None], math.nan)
    return added - added.nanmean()

def draw_methods():
    """Draws a panel for each method, in a row for each answer."""
    figure = Figure((WIDTH, 6.6), layout="constrained")
    for part, (answer, methods) in zip(figure.subfigures(3, 1), ANSWERS.items()):
        part.suptitle(answer, x=0.01, ha="left", fontsize=11, weight="bold")
        axes = part.subplots(1, 5)
        for ax, (name, shows) in zip(axes, methods.items()):
            heeded = IS_A if name == "fox" else BEGINS_WORD
            image = ax.imshow(effect(name, heeded).numpy(), "RdBu_r", vmin=-3, vmax=3)
            corner = dict(ha="right", va="top", transform=ax.transAxes)  # above the diagonal
            ax.text(1, 1, name, weight="bold", fontsize=10, **corner)
            ax.text(1, 0.88, shows, fontsize=9, **corner)
            ax.set_xticks(range(len(LINE)), LINE, fontsize=7.5, family="monospace")
            ax.set_yticks([])
            ax.tick_params(length=0, pad=1)
            ax.spines[:].set_visible(False)
        axes[0].set_yticks(range(len(LINE)), LINE, fontsize=7.5, family="monospace")
        for ax in axes[len(methods):]:  # the first row has room for a legend
            ax.axis("off")
            ax.text(0, 1, "Each line is a letter that\nlooks back (the query),\n"
                    "each column a letter that\nit sees (the key).", fontsize=9, va="top")
            bar = part.colorbar(image, cax=ax.inset_axes([0, 0.3, 1, 0.07]),
                                orientation="horizontal", ticks=[-3, 0, 3])
            bar.set_label("added to the logit, minus\nthe mean of the panel\n(red: attends more)",
                          fontsize=9)
    show(figure, 3, "methods", "what each method adds to the logits of a short text, in three "
         "rows: by position, by distance, and by the letters in between.")

# --- one pair of entries --------------------------------------------------------------------------

SETS = {
    "rope": "Content: length and first angle\nPosition: the rotation from there",
    "pope": "Content: only the length\nPosition: the whole angle",
    "carope": "Content: length and first angle, and\nat each token the rotation from there",
}

def draw_pairs(points, products):
    """Draws two panels for each method, for two keys with different contents. points, {method:
    [(T, 2), (T, 2)]}, are the places of each key's pair in the plane, at the first T positions.
    products, {method: [(N,), (N,)]}, are its products with a query at the distances 0 to N - 1."""
    figure = Figure((WIDTH, 5.0))
    axes = figure.subplots(2, 3, height_ratios=[1.25, 1], sharey="row", gridspec_kw=dict(
        left=0.055, right=0.99, top=0.94, bottom=0.1, wspace=0.06, hspace=0.42))
    for n, name in enumerate(points):
        color = curves.COLORS[name]
        plane, wave = axes[:, n]
        for at, product, strength in zip(points[name], products[name], (1.0, 0.45)):
            for t, (x, y) in enumerate(at.tolist()):
                first = t == 0
                plane.plot((0, x), (0, y), color=color, alpha=strength, linewidth=3 if first else 1)
                plane.plot(x, y, "o", color=color, alpha=strength, markersize=7 if first else 4)
                if strength == 1:
                    away = 1 + 0.17 / math.hypot(x, y)
                    plane.text(away * x, away * y, str(t), color=color, fontsize=10, ha="center",
                               va="center", weight="bold" if first else "normal")
            wave.plot(product.tolist(), ".-", color=color, alpha=strength, linewidth=1.5)
        plane.axhline(0, color="0.85", linewidth=0.8, zorder=0)
        plane.axvline(0, color="0.85", linewidth=0.8, zorder=0)
        plane.set(aspect="equal", xlim=(-1.5, 1.5), ylim=(-0.45, 1.55), xticks=[], yticks=[])
        plane.spines[:].set_visible(False)
        plane.set_title(name, color=color, fontsize=12, weight="bold")
        plane.set_xlabel(SETS[name], fontsize=9.5)
        curves.decorate(wave)
        wave.axhline(0, color="0.6", linewidth=0.8)
        wave.set_xlabel("distance of the key", fontsize=9.5)
    axes[1, 0].set_ylabel("q.k of this pair", fontsize=9.5)
    show(figure, 4, "pairs", "one pair of entries of two keys at positions 0 to 6, as RoPE, PoPE "
         "and CARoPE rotate it, and below its product with a query over the distance.")

# --- the angles of RoPE ---------------------------------------------------------------------------

DIALS = {  # what a row shows
    "rope": "pairs 3 to 7 meet\nnew angles",
    "linear": "nothing is new, but a\ntoken rotates all pairs\nan eighth as far",
    "ntk": "pair 0 as far as ever,\npair 7 an eighth, the\nothers in between",
    "yarn": "slow pairs an eighth,\nas in linear, fast ones\na little farther",
}
KNOWN, NEW = "0.75", curves.OTHER_COLORS[0]

def draw_dials(options):
    """Draws a dial for each pair of RoPE, in a row for each way to scale the frequencies. options
    is {row: changes of SMALL}, of which those of rope are none."""
    theta = {row: RoPE(dataclasses.replace(SMALL, **changes)).theta(torch.zeros(1)).tolist()
             for row, changes in options.items()}
    trained = [math.degrees(TRAINED * angle) for angle in theta["rope"]]
    figure = Figure((WIDTH, 5.9))
    axes = figure.subplots(4, 9, width_ratios=[2.1] + [1] * 8, gridspec_kw=dict(
        left=0.005, right=0.995, top=0.92, bottom=0.09, wspace=0.04, hspace=0.12))
    for row, (name, angles) in zip(axes, theta.items()):
        for ax in row:
            ax.axis("off")
        row[0].text(0, 0.9, name, weight="bold", fontsize=11, va="top")
        row[0].text(0, 0.68, DIALS[name], fontsize=9.5, va="top")
        for ax, angle, known in zip(row[1:], angles, trained):
            known = min(360, known)
            reached = min(360, math.degrees(LONGER * angle))
            ax.add_patch(Wedge((0, 0), 1, known, max(known, reached), facecolor=NEW))
            ax.add_patch(Wedge((0, 0), 1, 0, known, facecolor=KNOWN))
            ax.add_patch(Wedge((0, 0), 1, 0, 360, facecolor="none", edgecolor="0.5"))
            step = math.degrees(angle)
            ax.text(0, -1.3, f"{step:.{1 if step < 0.1 else 2}g}°", fontsize=9.5, ha="center",
                    va="center")
            ax.set(aspect="equal", xlim=(-1.1, 1.1), ylim=(-1.5, 1.1))
    for c, (ax, degrees) in enumerate(zip(axes[0][1:], trained)):
        ax.set_title(f"pair {c}\n{degrees / 360:.2g}", fontsize=9.5)
    axes[0][0].text(0, 1.16, f"rotations in {TRAINED} bytes:", fontsize=9.5)
    legend = {f"angles within {TRAINED} bytes, as in training": KNOWN,
              f"new angles within {LONGER} bytes": NEW}
    figure.legend([Patch(facecolor=color) for color in legend.values()], legend.keys(),
                  loc="lower left", bbox_to_anchor=(0.19, 0), ncols=2, frameon=False, fontsize=10)
    figure.text(0.005, 0.022, "°: angle per token", fontsize=10)
    show(figure, 5, "dials", f"which angles each pair of RoPE has met within the trained length of "
         f"{TRAINED} bytes, and which are new at {LONGER}, also after scaling the frequencies.")

def draw_losses(panels):
    """Draws panels {title: {label: losses (LONGER,)}}. The first curve of each is RoPE's."""
    figure = Figure((WIDTH, 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for ax, (heading, losses) in zip(axes, panels.items()):
        for (label, values), style in zip(losses.items(), curves.STYLES):
            means = values.unflatten(0, (-1, 32)).mean(1).tolist()
            color = curves.COLORS["rope"] if style == "-" else "0.35"
            ax.plot(range(16, LONGER, 32), means, style, color=color, label=label, linewidth=2)
        ax.set_title(heading, loc="left", fontsize=10.5)
        ax.set(xlabel="position, bytes; dashed: as trained", xticks=range(0, LONGER + 1, 128))
        curves.decorate(ax, [TRAINED])
    axes[0].set_ylabel("loss, nats per byte")
    curves.name_curves(*axes)
    show(figure, 5, "stopped", "the loss of a small RoPE model at each position of a longer text, "
         "if some of its pairs stop, and if its frequencies are scaled.")

# --- the loss beyond the trained length -----------------------------------------------------------

def draw_lengths(methods, in_windows):
    """Draws the published losses over length, with a curve for each method. The method in_windows
    also has a dashed one, for its loss if each byte sees at most as much as in training."""
    lines = published(methods)
    drawn = [line | {"label": line["pe"]} for line in lines if line["metric"] == "loss"]
    drawn += [line | {"label": f"{in_windows}, seeing the last {line['trained']}"} for line in lines
              if line["metric"] == "window_loss" and line["pe"] == in_windows]
    figure = Figure((WIDTH, 4), layout="constrained")
    ax = figure.subplots()
    curves.draw_curves(ax, drawn, "length", "value", curves.COLORS)
    curves.length_axis(ax, {line["length"]: line["length"] for line in drawn})
    ax.set(xlabel="length of the text, bytes; dashed: as trained", ylabel="loss, nats per byte")
    curves.name_curves(ax)
    show(figure, 6, "lengths", "the loss of larger models over the length of the text. RoPE's "
         "rises most, those of CoPE, FoX and ALiBi hardly or not at all.")

def print_costs(methods):
    """Prints both comparisons of the loss at 8x, for the methods of published models."""
    lines = published(methods)
    print("          A: 1x   B: 8x   C: 8x, the last 128   B - A   B - C")
    for pe in methods:
        short = mean_loss(lines, pe, "loss", 1)
        long = mean_loss(lines, pe, "loss", 8)
        last = mean_loss(lines, pe, "window_loss", 8)
        print(f"{pe:8}  {short:.3f}   {long:.3f}   {last:.3f}                 {long - short:+.2f}"
              f"   {long - last:+.2f}")
