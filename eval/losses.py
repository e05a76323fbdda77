"""
Losses of trained models, over whole splits and past the trained length. `evaluate` and
`extrapolate` measure: they yield a list of rows for each run. `write` prints, keeps and draws them.
"""
import itertools
import math
import sys
import time

import torch
import torch.nn.functional as F

from eval import figures, results
from train import error_sums, scores

BATCH = 8192  # tokens per forward pass
SEGMENT = 1024  # a longer sequence runs in cached segments of this length, to bound the memory
STRETCHES = 16  # pieces of text, spread evenly over the split, that `extrapolate` reads
TOKENS = 131072  # in all of them together


def evaluate(runs, names):
    """Yields the rows of each run: its scores over every target of whole splits. A row has no
    scores where the model ends before the split's sequences do."""
    splits = {run: [run.split(name) for name in names] for run in runs}  # fail before measuring
    for run in runs:
        rows = []
        for split in splits[run]:
            length = run.length(split)
            starts, n = split.windows(length), max(1, BATCH // length)
            row = run.columns(split.split, length) | dict(windows=len(starts))
            if length <= run.limit:
                parts = [starts[i : i + n] for i in range(0, len(starts), n)]
                parts = progress(parts, f"{run.name}, {split.split}")
                batches = (run.read(split, part, length) for part in parts)
                row |= scores(error_sums(run.model, batches), split.meta["loss"] == "mask")
            rows.append(row)
        yield rows


def extrapolate(runs, multiples, name, tokens):
    """Yields the rows of each run: its loss at these multiples of the trained length, and its
    window_loss, when each token sees no more than the last tokens, as many as the trained length.
    A model whose loss is the lower one gains from what lies farther back.

    Windows of each length tile the same stretches of text, and what remains at the end of a
    stretch is a shorter window. So all lengths have exactly the same targets."""
    multiples, texts = read_multiples(multiples), {}
    for run in runs:  # fail before measuring
        split = run.split(name)
        texts[run] = split, stretches(split, run.trained, multiples, tokens)
    if tokens != TOKENS:
        name += f" ({tokens:,} tokens)"  # a report keeps these numbers apart
    for run, (split, spans) in texts.items():
        rows, known = [], {}
        for multiple in multiples:
            length = round(multiple * run.trained)
            row = run.columns(name, length) | dict(multiple=f"{multiple:g}")
            tiles = []
            for start, stop in spans:
                tiles += [(a, min(a + length, stop)) for a in range(start, stop, length)]
            sums = by_position(run, split, tiles, run.trained, known)
            row["window_loss"] = mean(sums)
            if length <= run.limit:
                if length > run.trained:
                    sums = by_position(run, split, tiles, length, {})
                row["loss"] = mean(sums)
                row["ppl"] = math.exp(min(row["loss"], 700))
                row["sums"] = sums
            rows.append(row)
        yield rows


def read_multiples(text):
    """The numbers of --extrapolate, in order."""
    try:
        multiples = sorted({float(word) for word in text.split(",")})
        if 0 < multiples[0] and multiples[-1] < math.inf:
            return multiples
    except ValueError:
        pass
    raise ValueError(f"extrapolate={text!r} is no list of multiples; "
                     "write e.g. --extrapolate=1,2,4,8")


def stretches(split, trained, multiples, tokens):
    """[(start, stop), ...] of the text to evaluate, which depends on the split and `tokens` alone:
    the whole split where that has no more. ValueError for a multiple that does not fit."""
    if split.rows:
        raise ValueError(f"{split.folder} holds rows of {split.row_length} tokens; "
                         "extrapolation needs a stream of text, --evaluate takes rows")
    whole = split.tokens - 1  # the last token is only a target
    n = tokens // STRETCHES if tokens < whole else whole
    for multiple in multiples:
        length, asked = round(multiple * trained), f"extrapolate={multiple:g} times {trained} tokens"
        if length < 1:
            raise ValueError(f"{asked} is less than one token")
        if length > whole:
            raise ValueError(f"{asked} do not fit: split {split.split!r} of {split.folder} has "
                             f"{split.tokens} tokens")
        if length > n:
            raise ValueError(f"{asked} do not fit a stretch of the text, {n}; "
                             f"use --eval_tokens={STRETCHES * length} or more")
    starts = split.windows(n, STRETCHES if n < whole else 1)
    return [(start, start + n) for start in starts.tolist()]


def by_position(run, split, tiles, width, known):
    """Sums (2, T) of the loss and of the targets at each position of the tiles, (start, stop), when
    a token sees no more than the last `width` tokens of its tile.

    known: {window: what token_losses returns}, to compute none twice."""
    views = [(start, *view) for start, stop in tiles for view in windows(start, stop, width)]
    known |= token_losses(run, split, {window for _, window, _ in views} - known.keys())
    sums = torch.zeros(2, max(stop - start for start, stop in tiles), dtype=torch.float64)
    for start, window, first in views:
        sums[:, first - start : window[1] - start] += known[window][:, first - window[0] :]
    return sums


def windows(start, stop, width):
    """Yields ((begin, end), first) for windows of at most `width` tokens, of which the targets
    from `first` on count. They overlap by half: from the second on, a target that counts sees half
    a window or more."""
    done = start
    while done < stop:
        end = min(done + (math.ceil(width / 2) if done > start else width), stop)
        yield (max(start, end - width), end), done
        done = end


@torch.no_grad()
def token_losses(run, split, windows):
    """{(begin, end): (2, end - begin)} of these windows: each token's loss in nats, and 1 where it
    has a target."""
    found = {}
    windows = sorted(windows, key=lambda window: (size(window), window))
    for length, group in itertools.groupby(windows, size):
        group, n = list(group), max(1, BATCH // length)
        parts = [group[i : i + n] for i in range(0, len(group), n)]
        for part in progress(parts, f"{run.name}, windows of {length} tokens"):
            x, y = run.read(split, [begin for begin, _ in part], length)
            cache, losses = run.model.new_cache() if length > SEGMENT else None, []
            for xs, ys in zip(x.split(SEGMENT, 1), y.split(SEGMENT, 1)):
                logits = run.model(xs, ys, cache=cache)[0].mT.float()  # (B, V, t)
                losses.append(F.cross_entropy(logits, ys, ignore_index=-1, reduction="none"))
            pairs = torch.stack((torch.cat(losses, 1), y != -1), 1).cpu()  # (B, 2, T)
            found |= zip(part, pairs)
    return found


def size(window):
    return window[1] - window[0]


def mean(sums):
    loss, targets = sums.sum(1).tolist()
    if not targets:
        raise ValueError("no token here has a target; evaluate more of them, or check the mask")
    return loss / targets


def progress(parts, name):
    """Yields the parts. Every ten seconds a line says how far it is."""
    shown = time.monotonic()
    for i, part in enumerate(parts):
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{name}: {i / len(parts):.0%}", file=sys.stderr, flush=True)
        yield part


def write(runs, measured, path):
    """Print and keep the rows of each run as soon as they are measured. Then draw them all."""
    table, width = [], max(24, *(len(run.name) for run in runs))
    for run, rows in zip(runs, measured):
        at_multiples = "multiple" in rows[0]
        if not table:
            print(title(rows))
            names = [row["multiple"] + "x" if at_multiples else row["split"] for row in rows]
            print_row("", names, width)
        print_row(run.name, [cell(row, "loss", run.limit) for row in rows], width)
        if at_multiples:
            cells = [cell(row, "window_loss", run.limit) for row in rows]
            print_row(f"  seeing the last {run.trained}", cells, width)
        for row in rows:
            results.append(run, row, {key: row[key] for key in results.METRICS if key in row})
        table += rows
    results.write_csv(path, [{k: v for k, v in row.items() if k != "sums"} for row in table])
    figures.draw_losses(table, path)


def title(rows):
    if any("token_error" in row for row in rows):
        return "wrong targets, then rows with one"
    if "multiple" in rows[0]:
        return (f"loss in nats (perplexity), {rows[0]['split']}: the same targets at every multiple "
                "of the trained length")
    return "loss in nats (perplexity)"


def cell(row, key, limit):
    if "token_error" in row:
        return f"{row['token_error']:.2f}% {row['sequence_error']:.2f}%"
    if key not in row:
        return f"ends at {limit}"
    return f"{row[key]:.4f} ({math.exp(min(row[key], 700)):.2f})"


def print_row(name, cells, width):
    print(f"{name:{width}}" + "".join(f" {text:>18}" for text in cells), flush=True)
