"""
Losses of trained models, over whole splits and past the trained length. `evaluate` and
`extrapolate` measure: they yield a list of rows for each run. `write` prints, keeps and draws them.
"""
import math
import re
import sys
import time
from itertools import groupby

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
            rows.append(dict(split=split.split, length=length))
            if length <= run.limit:
                parts = batches(split.windows(length), lambda _: length, run.name)
                sums = sum(error_sums(run.model, *run.read(split, part, length)) for part in parts)
                rows[-1] |= scores(sums, split.meta["loss"] == "mask")
        yield rows


def extrapolate(runs, multiples, name, tokens):
    """Yields the rows of each run: its loss at these multiples of the trained length, and its
    window_loss, when each token sees no more than the last tokens, as many as the trained length.
    A model whose loss is the lower one gains from what lies farther back.

    Windows of each length tile the same stretches of text, and what remains at the end of a
    stretch is a shorter window. So all lengths have exactly the same targets."""
    if not re.fullmatch(r"\d*\.?\d+(,\d*\.?\d+)*", multiples):
        raise ValueError(f"extrapolate={multiples!r} is no list of multiples; "
                         "write e.g. --extrapolate=1,2,4,8")
    multiples, texts = sorted(set(map(float, multiples.split(",")))), {}
    for run in runs:  # fail before measuring
        split = run.split(name)
        texts[run] = split, stretches(split, run.trained, multiples, tokens)
    if tokens != TOKENS:
        name += f" ({tokens:,} tokens)"  # a report keeps these numbers apart
    for run, (split, spans) in texts.items():
        rows, known = [], {}
        for multiple in multiples:
            length, tiles = round(multiple * run.trained), []
            for start, stop in spans:
                tiles += [(a, min(a + length, stop)) for a in range(start, stop, length)]
            sums = by_position(run, split, tiles, run.trained, known)
            row = dict(split=f"{name} {multiple:g}x", length=length, window_loss=mean(sums))
            if length <= run.limit:
                if length > run.trained:
                    sums = by_position(run, split, tiles, length, {})
                loss = mean(sums)
                row |= dict(loss=loss, ppl=math.exp(min(loss, 700)), sums=sums)
            rows.append(row)
        yield rows


def stretches(split, trained, multiples, tokens):
    """[(start, stop), ...] of the text to evaluate, which depends on the split and `tokens` alone:
    the whole split where that has no more. ValueError for a multiple that does not fit."""
    if split.rows:
        raise ValueError(f"{split.folder} holds rows of {split.row_length} tokens; "
                         "extrapolation needs a stream of text, --evaluate takes rows")
    whole = split.tokens - 1  # the last token is only a target
    n = tokens // STRETCHES if tokens < whole else whole
    for multiple in multiples:
        asked = f"extrapolate={multiple:g} times {trained} tokens"
        length = round(multiple * trained)
        if not 1 <= length <= whole:
            raise ValueError(f"{asked} is not in 1 to {whole}, split {split.split!r} of "
                             f"{split.folder}")
        if length > n:
            raise ValueError(f"{asked} does not fit a stretch of the text, {n}; "
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
    for part in batches(sorted(windows), lambda window: window[1] - window[0], run.name):
        begins, length = [begin for begin, _ in part], part[0][1] - part[0][0]
        x, y = run.read(split, begins, length)
        cache, losses = run.model.new_cache() if length > SEGMENT else None, []
        for xs, ys in zip(x.split(SEGMENT, 1), y.split(SEGMENT, 1)):
            logits = run.model(xs, ys, cache=cache)[0].mT.float()  # (B, V, t)
            losses.append(F.cross_entropy(logits, ys, ignore_index=-1, reduction="none"))
        found |= zip(part, torch.stack((torch.cat(losses, 1), y != -1), 1).cpu())  # (B, 2, T)
    return found


def batches(items, length, name):
    """Yields the items in lists of one length, of some BATCH tokens. Every ten seconds a line says
    how far it is."""
    parts, shown = [], time.monotonic()
    for tokens, group in groupby(sorted(items, key=length), length):
        group, n = list(group), max(1, BATCH // tokens)
        parts += [(tokens, group[i : i + n]) for i in range(0, len(group), n)]
    for i, (tokens, part) in enumerate(parts):
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{name}, {tokens} tokens: {i / len(parts):.0%}", file=sys.stderr, flush=True)
        yield part


def mean(sums):
    loss, targets = sums.sum(1).tolist()
    if not targets:
        raise ValueError("no token here has a target; evaluate more of them, or check the mask")
    return loss / targets


def write(runs, measured, path):
    """Print and keep the rows of each run as soon as they are measured. Then draw them all."""
    lines, quarters, width = [], [], max(24, *(len(run.name) for run in runs))
    for run, rows in zip(runs, measured):
        if run is runs[0]:
            errors = any("token_error" in row for row in rows)
            print("wrong targets, then rows with one" if errors else "loss in nats (perplexity)")
            print(" " * width + "".join(f" {row['split'].split()[-1]:>18}" for row in rows))
        for key in ["loss"] + ["window_loss"] * ("window_loss" in rows[0]):
            name = run.name if key == "loss" else f"  seeing the last {run.trained}"
            cells = "".join(f" {cell(row, key, run.limit):>18}" for row in rows)
            print(f"{name:{width}}{cells}", flush=True)
        lines += results.append(run, rows)
        for sums in [row["sums"] for row in rows if "sums" in row][-1:]:  # of the longest
            quarters += figures.by_quarter(run, sums)
    results.write_csv(path, lines)
    figures.draw_by_length(lines, path, quarters)


def cell(row, key, limit):
    if "token_error" in row:
        return f"{row['token_error']:.2f}% {row['sequence_error']:.2f}%"
    if key not in row:
        return f"ends at {limit}"
    return f"{row[key]:.4f} ({math.exp(min(row[key], 700)):.2f})"
