"""
What eval/walk.py needs besides positional encodings: texts, tables and pictures (these need
matplotlib).
"""
import functools
import io
import json
import math
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Wedge
from PIL import Image  # matplotlib needs it too

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # where model.py is, whatever folder a notebook runs in

from model import GPT, PES, GPTConfig, RoPE, rotate_pairs, scaled_dot_products

# The models are so small that more threads would only wait for each other
torch.set_num_threads(1)

# --- small models ---------------------------------------------------------------------------------

TRAINED, LONGER = 64, 512  # bytes that a small model reads at once, in training and afterwards
SMALL = GPTConfig(vocab_size=256, block_size=TRAINED, n_layer=2, n_head=4, n_embd=64)
UNSEEN = "argparse.py"  # the module that no model is trained on

@functools.cache
def texts():
    """Returns the modules of Python's standard library without UNSEEN, (N,), and 32 segments of
    UNSEEN, (32, LONGER + 1). Both hold bytes."""
    library = Path(os.__file__).parent
    modules = [path for path in sorted(library.glob("[a-z]*.py")) if path.name != UNSEEN]
    seen = b"".join(path.read_bytes() for path in modules)
    unseen = torch.tensor(list((library / UNSEEN).read_bytes()))
    starts = torch.linspace(0, len(unseen) - LONGER - 1, 32).long()[:, None]
    seen = torch.frombuffer(bytearray(seen), dtype=torch.uint8)
    return seen, unseen[starts + torch.arange(LONGER + 1)]

def random_segments(n, length):
    """Returns n segments of the text for training, (n, length)."""
    text, _ = texts()
    starts = torch.randint(len(text) - length + 1, (n, 1))
    return text[starts + torch.arange(length)].long()

def changed(gpt, **options):
    """Returns a model with the weights of gpt, but other options."""
    other = GPT(replace(gpt.cfg, **options))
    other.load_state_dict(gpt.state_dict())
    return other

def stopped(gpt, pairs, angles):
    """Returns a RoPE model with the weights of gpt, in which the function `angles` sets the angles
    of q and k that are more than 63 bytes apart. Section 6 has this function."""
    class Stopped(RoPE):
        def logit_bias(self, q, logits, i, j, k):
            """Replaces the logits of distant keys. k is rotated already, and q is not."""
            theta = self.theta(q)
            of_q, of_k = angles(pairs, i, j[:, None], theta)
            of_k = of_k - j[:, None] * theta  # by how much to rotate k further
            q = rotate_pairs(q, of_q.cos(), of_q.sin())
            k = rotate_pairs(k, of_k.cos(), of_k.sin())
            distant = scaled_dot_products(q, k, self.d)
            return torch.where(i - j >= TRAINED, distant - logits, 0.0)

    PES["stopped"] = Stopped
    try:
        return changed(gpt, pe="stopped")
    finally:
        del PES["stopped"]

@torch.no_grad()
def losses_of(gpt):
    """Returns the loss at each position, (LONGER,), as a mean over the unseen segments."""
    _, segments = texts()
    _, losses = gpt(segments[:, :-1], segments[:, 1:], reduction="none")
    return losses.mean(0)

@torch.no_grad()
def loss_in_windows(gpt):
    """Returns the mean loss of the last TRAINED bytes of the unseen segments, if each sees at most
    the last TRAINED. For this, it stands in the second half of a window."""
    _, segments = texts()
    half = TRAINED // 2
    windows = segments[:, -3 * half - 1 :].unfold(1, TRAINED + 1, half).flatten(0, 1)
    _, losses = gpt(windows[:, :-1], windows[:, 1:], reduction="none")
    return losses[:, half:].mean().item()

# --- tables ---------------------------------------------------------------------------------------

def print_columns(title, columns, rows):
    """Prints a table of numbers. rows is {name: a number for each column}."""
    print(f"{title:12}", *[f"{column:>6}" for column in columns])
    for name, numbers in rows.items():
        texts = [f"{round(float(number), 2) + 0.0:.4g}" for number in numbers]  # + 0.0 mends -0
        print(f"{name:12}", *[f"{text:>6}" for text in texts])

def print_losses(models):
    """Prints the mean loss of each model in the first and in the last bytes of the unseen segments,
    and in the last bytes if it sees no more than in training. models is {name: GPT}. Returns
    {name: the losses at all positions (LONGER,)}."""
    print(f"nats per byte     first {TRAINED}   last {TRAINED} of {LONGER}   "
          f"last {TRAINED}, seeing at most {TRAINED}")
    losses = {name: losses_of(gpt) for name, gpt in models.items()}
    for name, values in losses.items():
        first, last = values[:TRAINED].mean(), values[-TRAINED:].mean()
        print(f"{name:17} {first:8.2f} {last:16.2f} {loss_in_windows(models[name]):26.2f}")
    return losses

# --- larger models, from eval/results.jsonl -------------------------------------------------------

def published(pe, data, split, metric):
    """Returns what a method has on texts of 1024 bytes in the experiment echo_small, as a mean over
    the seeds."""
    values = []
    for record in records():
        found = record["config"], record["pe"], record["data"], record["split"], record["length"]
        plain = not record.get("flags") and not record.get("options")
        if plain and found == ("config/echo_small.py", pe, data, split, 1024):
            values.append(record["values"][metric])
    return statistics.fmean(values)

@functools.cache
def records():
    lines = (HERE / "results.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]

# --- pictures -------------------------------------------------------------------------------------

WIDTH = 9  # inches, so that letters of 10 points are read easily in a picture of 900 pixels
RED, BLUE, ORANGE, GREEN = "#C1272D", "#0072B2", "#E08A00", "#009E73"
folder = Path("out/walk")  # where pictures go

def show(figure, name, what):
    """Saves a picture, or shows it in a notebook. `what` says what it shows."""
    drawn, png = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=150)
    # 256 colours are enough, and make the file a third as large
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(png, "PNG", optimize=True)
    if "ipykernel" in sys.modules:
        from IPython import display

        display.display(display.Image(png.getvalue()))
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    path.write_bytes(png.getvalue())
    print(f"picture {path}: {what}")

def bare(ax):
    """Removes half of a panel's frame, and draws a thin line at zero."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.axhline(0, zorder=0, linewidth=1, color="0.8")

def name_curves(ax):
    """Writes the name of each curve at its end, in its colour. Names that would overlap move up."""
    low, high = ax.get_ylim()
    free = low
    for line in sorted(ax.get_lines(), key=lambda line: line.get_ydata()[-1]):
        if line.get_label().startswith("_"):  # a line that has no name
            continue
        x, y = line.get_xdata()[-1], max(line.get_ydata()[-1], free)
        ax.annotate(line.get_label(), (x, y), (8, 0), textcoords="offset points", va="center",
                    fontsize=11, weight="bold", color=line.get_color(), annotation_clip=False)
        free = y + 0.07 * (high - low)

@torch.no_grad()
def draw_distance():
    """Draws three biases over the distance: random ones of relative and t5, and those of alibi."""
    torch.manual_seed(3)
    farthest = 160
    cfg = GPTConfig(n_head=4, n_embd=64, block_size=128)
    pos = torch.arange(farthest)
    added = {}
    for name in ("relative", "t5", "alibi"):
        pe = PES[name](cfg)
        q = torch.zeros(1, 4, farthest, 16)
        if name == "relative":
            pe.a.normal_()
            pe.a[16:] *= 0.35  # as if near distances mattered more
            q = torch.randn(1, 4, 1, 16).expand(q.shape)
        if name == "t5":
            pe.table[:, 0] = torch.randn(32) - 0.25 * torch.arange(32)
        bias = pe.logit_bias(q, None, pos[:, None], pos, None).expand(1, 4, -1, -1)
        added[name] = bias[0, :, -1].flip(-1)  # of the last query, (H, distances)
    figure = Figure((WIDTH, 3.3), layout="constrained")
    axes = figure.subplots(1, 3)
    titles = {"relative": "q·a for one query", "t5": "a number per range",
              "alibi": "a slope per head"}
    for ax, (name, title) in zip(axes, titles.items()):
        ax.set_title(f"$\\bf{{{name}}}$: {title}", fontsize=10, loc="left")
        ax.set_xlabel("distance of the key", fontsize=10)
        ax.set(xticks=(0, 64, 128), xlim=(-3, farthest), yticks=(0,))
        bare(ax)
    axes[0].set_ylabel("added to the logit", fontsize=10)
    axes[0].plot(added["relative"][0, :128], ".", color=BLUE, markersize=5)
    axes[0].text(144, axes[0].get_ylim()[0] / 3, "nothing", color=RED, fontsize=10, ha="center")
    axes[0].plot(range(128, farthest), [0] * 32, color=RED, linewidth=3)
    t5 = added["t5"][0].tolist()
    axes[1].stairs(t5, [n - 0.5 for n in range(farthest + 1)], baseline=None, color=BLUE,
                   linewidth=2.5)
    low, high = min(t5), max(t5)
    axes[1].set_ylim(low - 0.5, high + 0.5)
    axes[1].annotate("one number for\n113 and more", (136, t5[-1]), (158, 0.65 * low), fontsize=10,
                     ha="right", arrowprops=dict(arrowstyle="-", color="0.5", relpos=(0.7, 0)))
    axes[2].set_ylim(-9, 0.8)
    for head, place in enumerate(((38, -8.6), (68, -7.4), (105, -2.9), (105, 0.15))):
        axes[2].plot(added["alibi"][head], color=BLUE, linewidth=2.5)
        axes[2].text(*place, f"m = 1/{4 ** (head + 1)}", fontsize=10, color=BLUE)
    show(figure, "distance", "What they add: points, steps that grow wider, and falling lines")

def draw_base():
    """Draws how the pairs of a head of width 16 change a logit over the distance, for two bases."""
    pairs, farthest = 8, 64
    figure = Figure((WIDTH, 3.4), layout="constrained")
    panels = figure.subplots(ncols=2, sharey=True)
    for ax, base in zip(panels, (100, 10000)):
        theta = RoPE(replace(SMALL, base=float(base))).theta(torch.zeros(1))
        wave = (theta[:, None] * torch.arange(farthest)).cos()  # (pairs, farthest)
        ax.pcolormesh(wave.numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
        for edge in range(1, pairs):
            ax.axhline(edge, color="white", linewidth=5)
        ax.set_title(f"base = {base}", loc="left", fontsize=12, weight="bold")
        ax.set_xlabel("distance of the key", fontsize=10)
        ax.set_xticks(range(0, farthest + 1, 16))
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    panels[0].set_ylim(pairs, 0)  # the fastest pair is at the top
    labels = ["pair 0 (fast)", *[f"pair {c}" for c in range(1, pairs - 1)], "pair 7 (slow)"]
    panels[0].set_yticks([c + 0.5 for c in range(pairs)], labels, fontsize=10)
    panels[1].text(farthest / 2, 5.5, "hardly changes", color="white", fontsize=12, weight="bold",
                   ha="center", va="center")
    panels[1].set_title("red raises the logit, blue lowers it", loc="right", fontsize=10)
    show(figure, "base", "The waves of eight pairs, each slower than the one above")

PLACES = {("rope", "nouns"): (2.7, 2.3), ("rope", "verbs"): (4.9, 2.05),  # of the names of curves
          ("pope", "nouns"): (3, 3.55), ("pope", "verbs"): (3, 0.45)}

def draw_words():
    """Draws the logits of nouns and verbs over the distance, in RoPE with the query (-2, 0) and in
    PoPE with the query (2, 0) and a delta of half a rotation. An arrow rotates by 60 degrees per
    position."""
    angle = torch.arange(13) * math.pi / 3
    softplus = torch.nn.functional.softplus
    q = softplus(torch.tensor([2.0, 0.0]))
    waves = {"rope": {}, "pope": {}}
    for word, key, beta in (("nouns", (1.0, 0.0), 0), ("verbs", (0.0, 1.0), math.pi / 2)):
        waves["rope"][word] = 2 * torch.cos(angle + math.pi - beta)
        waves["pope"][word] = (q @ softplus(torch.tensor(key))) * torch.cos(angle + math.pi)
    figure = Figure((WIDTH, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    titles = {"rope": "verbs have another wave", "pope": "verbs have a lower wave"}
    queries = {"rope": "q is (-2, 0)", "pope": "q is (2, 0)"}
    for ax, (name, title) in zip(axes, titles.items()):
        for (word, wave), color in zip(waves[name].items(), (BLUE, RED)):
            ax.plot(wave, ".-", color=color, linewidth=2.5, markersize=10)
            ax.text(*PLACES[name, word], word, color=color, fontsize=12, weight="bold", ha="center")
        ax.set_title(f"$\\bf{{{name}}}$: {title}", fontsize=11, loc="left")
        ax.set_title(queries[name], fontsize=10, loc="right", color="0.4")
        ax.set_xlabel("distance of the key", fontsize=10)
        ax.set_xticks(range(0, 13, 3))
        bare(ax)
    axes[0].set_ylabel("logit", fontsize=10)
    axes[0].set_ylim(-3.7, 4.2)
    show(figure, "words", "The waves of nouns and verbs, with different crests and with the same")

def draw_dials():
    """Draws the circle of each pair of RoPE in the small model, with the angles it has met."""
    theta = RoPE(SMALL).theta(torch.zeros(1)).tolist()
    figure = Figure((WIDTH, 1.9))
    axes = figure.subplots(1, 8, gridspec_kw=dict(
        left=0.005, right=0.995, top=0.74, bottom=0.02, wspace=0.04))
    for c, (ax, angle) in enumerate(zip(axes, theta)):
        met, reached = (min(360, math.degrees(angle * (n - 1))) for n in (TRAINED, LONGER))
        ax.add_patch(Wedge((0, 0), 1, met, max(met, reached), facecolor=RED))
        ax.add_patch(Wedge((0, 0), 1, 0, met, facecolor="0.75"))
        ax.add_patch(Wedge((0, 0), 1, 0, 360, facecolor="none", edgecolor="0.5"))
        step = math.degrees(angle)
        ax.text(0, -1.3, f"{step:.{1 if step < 0.1 else 2}g}° per byte", fontsize=9.5, ha="center",
                va="center", color="0.4")
        ax.set_title(f"pair {c}", fontsize=11)
        ax.set(aspect="equal", xlim=(-1.1, 1.1), ylim=(-1.5, 1.1))
        ax.axis("off")
    figure.text(0.005, 0.9, f"met within {TRAINED} bytes", fontsize=11, color="0.5", weight="bold")
    figure.text(0.25, 0.9, f"new within {LONGER} bytes", fontsize=11, color=RED, weight="bold")
    show(figure, "dials", "The angles of each pair that are met in training, and new ones")

def draw_losses(losses):
    """Draws the first three losses over the position. losses is {name: (LONGER,)}."""
    figure = Figure((WIDTH, 3.3))
    ax = figure.subplots(gridspec_kw=dict(left=0.07, right=0.8, top=0.97, bottom=0.15))
    for (name, values), color in zip(losses.items(), ("black", ORANGE, BLUE)):
        means = values.unflatten(0, (-1, 32)).mean(1).tolist()
        ax.plot(range(16, LONGER, 32), means, color=color, label=name, linewidth=2.5)
    ax.axvline(TRAINED, color="0.4", linestyle="--", linewidth=1)
    ax.annotate("trained length", (TRAINED, ax.get_ylim()[1]), (4, -8), color="0.4", fontsize=10,
                textcoords="offset points")
    ax.set_xlabel("position, bytes", fontsize=10)
    ax.set_ylabel("loss, nats per byte", fontsize=10)
    ax.set_xticks(range(0, LONGER + 1, 128))
    ax.spines[["top", "right"]].set_visible(False)
    name_curves(ax)
    show(figure, "stopped", "The loss over the position, which stays low if the slow pairs stop")

def draw_copies(methods):
    """Draws by how much a copy lowers the loss of larger models, over its distance, and how much
    they gain from distant text in ordinary code."""
    figure = Figure((WIDTH, 3.3))
    ax, bars = figure.subplots(1, 2, width_ratios=(2, 1), gridspec_kw=dict(
        left=0.07, right=0.99, top=0.9, bottom=0.15, wspace=0.35))
    colors = dict(zip(methods, ("black", ORANGE, GREEN, BLUE, RED, "0.5", "0.7")))
    distances = (64, 128, 256, 512, 900)
    for n, pe in enumerate(methods):
        without = published(pe, "echo", "new_1024", "loss")
        saved = [without - published(pe, "echo", f"at{n}_1024", "loss") for n in distances]
        ax.plot(distances, saved, ".-", color=colors[pe], label=pe, linewidth=2.5, markersize=10)
        gain = published(pe, "stdlib", "val", "window_loss") - published(
            pe, "stdlib", "val", "loss")
        bars.barh(n, gain, color=colors[pe])
        bars.text(gain + math.copysign(0.03, gain), n, f"{gain:+.2f}", fontsize=10, va="center",
                  ha="left" if gain > 0 else "right")
    ax.set_xscale("log")
    ax.set_xticks(distances, [64, 128, 256, 512, "900 (start)"])
    ax.minorticks_off()
    ax.set_xlabel("how many bytes back the copy stands", fontsize=10)
    ax.set_ylabel("nats per byte", fontsize=10)
    ax.set_title("what a copy saves", fontsize=11, loc="left", weight="bold")
    bare(ax)
    name_curves(ax)
    bars.set_title("what distant code saves", fontsize=11, loc="left", weight="bold")
    bars.set_yticks(range(len(methods)), methods, fontsize=11, weight="bold")
    bars.set_xlim(-1.12, 0.42)
    bars.set_xticks((-0.5, 0))
    bars.set_xlabel("nats per byte", fontsize=10)
    bars.axvline(0, color="0.6", linewidth=0.8)
    bars.spines[["top", "right", "left"]].set_visible(False)
    bars.tick_params(axis="y", length=0)
    show(figure, "copies", "What copies and distant text save with five methods")

# --- what each method adds to the logits ----------------------------------------------------------

SENTENCE = "cat sleeps . dog bites the old man ?".split()
NOUNS = torch.tensor([word in ("cat", "dog", "man") for word in SENTENCE])
STOP = torch.tensor([word == "." for word in SENTENCE])
D = 16  # the width of the only head
ANSWERS = {  # {what the effect depends on: {method: what its panel shows}}
    "where query and key are": {
        "learned": "a vector\nper position", "sinusoidal": "arrows that\nrotate",
        "expe": "the position\nas a number"},
    "their distance, so each diagonal has one colour": {
        "rope": "waves", "t5": "a number\nper range", "alibi": "a slope"},
    "the words between them": {
        "carope": "rotates at\nnouns", "cope": "counts nouns", "fox": "fades at “.”"},
}

@torch.no_grad()
def effect(name, counts):
    """Returns what the method adds to the logit of query i and key j, (T, T), minus its mean. It is
    nan where the key follows the query. All queries are the same vector, and so are all keys.
    counts (T,) is True for the words that matter to carope, cope and fox."""
    torch.manual_seed(1)  # chosen so that the panels look different
    T = len(counts)
    n_head = 4 if name == "alibi" else 1  # the first of four heads has the slope 1/4
    pe = PES[name](GPTConfig(
        n_head=n_head, n_embd=D, block_size=T, base=100.0, sinusoidal_scale=False, t5_buckets=8,
        t5_max_distance=12, cope_gates="values", cope_npos=8, cope_scale_z=True, expe_l=1,
        expe_theta=0.4))
    for key, p in pe.named_parameters():
        if key == "W":
            p[0] = 1.0  # carope and fox read only the first entry of x
        elif key != "b":
            p.normal_()
    x = torch.zeros(1, T, D)
    x[..., 0] = torch.where(counts, -5.0, 6.0)  # few other words rotate or fade anything
    q, k = torch.randn(2, D)
    q[[0, D // 2]] = 0.0  # the pair that carope rotates by the same angle at every word
    gates = torch.where(counts, 20.0, -20.0)  # CoPE's are the sigmoids of q.v / sqrt(d)
    v = gates[:, None] * q / q.square().sum() * D**0.5
    q, k = q.expand(1, T, D), k.expand(1, T, D)
    plain_logits = scaled_dot_products(q, k, D)

    # the hooks, in the order in which a layer calls them
    pos = torch.arange(T)
    q = pe.inputs(pe.embed(q, pos), pos)[:, None]  # (1, 1, T, d)
    k = pe.inputs(pe.embed(k, pos), pos)[:, None]
    encoded_q, k = pe.encode_qk(q, k, x, pe.per_position(x, pos), {})
    logits = scaled_dot_products(encoded_q, k, D)
    per_key = pe.per_key(x, k, v[None, None], {})
    bias = pe.logit_bias(q, logits, pos[:, None], pos, per_key)
    added = (logits + bias - plain_logits)[0, 0].masked_fill(pos > pos[:, None], math.nan)
    return added - added.nanmean()

def draw_methods():
    """Draws a panel for each of nine methods, in a row for each answer."""
    figure = Figure((WIDTH, 7.6), layout="constrained")
    figure.text(0.99, 0.993, "red: above the panel's mean, blue: below", fontsize=10.5, ha="right",
                va="top")
    for part, (answer, methods) in zip(figure.subfigures(3, 1), ANSWERS.items()):
        part.suptitle(f"The effect depends on {answer}", x=0.01, ha="left", fontsize=12,
                      weight="bold")
        axes = part.subplots(1, 3)
        for ax, (name, shows) in zip(axes, methods.items()):
            added = effect(name, STOP if name == "fox" else NOUNS)
            strongest = added.nan_to_num().abs().max()
            ax.imshow(added.numpy(), "RdBu_r", vmin=-strongest, vmax=strongest)
            corner = dict(ha="right", va="top", transform=ax.transAxes)  # above the diagonal
            ax.text(1, 1, name, weight="bold", fontsize=12, **corner)
            ax.text(1, 0.88, shows, fontsize=10.5, **corner)
            ax.set_xticks(range(len(SENTENCE)), SENTENCE, fontsize=9, rotation=90)
            ax.set_yticks([])
            ax.tick_params(length=0, pad=1)
            ax.spines[:].set_visible(False)
        axes[0].set_yticks(range(len(SENTENCE)), SENTENCE, fontsize=9)
    show(figure, "methods", "What nine methods add to the logits of a sentence, in three rows")
