"""
Losses of trained models, over whole splits and past the trained length. `evaluate` and
`extrapolate` measure: they yield a list of rows for each run. `write` prints, saves and draws them.
"""
import math
import sys
import time
from itertools import groupby

import torch
import torch.nn.functional as F

from eval import figures, results
from model import refuse

BATCH = 8192  # tokens per forward pass
SEGMENT = 1024  # a longer sequence runs in cached segments of this length, to bound the memory
STRETCHES = 16  # pieces of text, spread evenly over the split, that `extrapolate` reads
TOKENS = 131072  # in all stretches together

@torch.no_grad()
def error_sums(model, x, y):
    """Float64 (5,), sums over x, y (B, T): loss in nats, targets, wrong argmaxes, rows with a wrong
    argmax, all rows. Greedy decoding reproduces exactly the rows without a wrong argmax."""
    logits, loss = model(x, y)
    wrong, n = (logits.argmax(-1) != y) & (y != -1), (y != -1).sum()
    sums = torch.stack([loss * n, n, wrong.sum(), wrong.any(1).sum()]).cpu().double()
    return torch.cat((sums, torch.tensor([len(x)])))

def scores(sums, masked):
    """error_sums as loss in nats per target, perplexity and, for a masked task, percentages."""
    loss, targets, wrong, wrong_rows, rows = sums.tolist()
    refuse(not targets, "no target to evaluate carries loss; evaluate more, or check the mask")
    result = dict(loss=loss / targets, ppl=math.exp(min(loss / targets, 700)))
    if masked:
        result |= dict(token_error=100 * wrong / targets, sequence_error=100 * wrong_rows / rows)
    return result

def evaluate(runs, names):
    """Yields the rows of each run: its scores over whole splits, in a stream over every full
    window. A row has no scores if the split's sequences exceed the model's limit."""
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
    window_loss, where a token sees only as many previous tokens as in training. A loss below
    window_loss means that distant context helps. Windows of each length tile the same stretches of
    text, the last one shorter, so all lengths have exactly the same targets."""
    multiples, texts = sorted(set(map(float, multiples.split(",")))), {}
    for run in runs:  # fail before measuring
        split = run.split(name)
        texts[run] = split, stretches(split, run.trained, multiples, tokens)
    if tokens != TOKENS:
        name += f" ({tokens:,} tokens)"  # a report keeps these numbers apart
    for run, (split, spans) in texts.items():
        rows, known = [], {}
        for multiple in multiples:
            length = round(multiple * run.trained)
            tiles = [(a, min(a + length, stop)) for start, stop in spans
                     for a in range(start, stop, length)]
            near = tiled_loss(run, split, tiles, run.trained, known)
            rows.append(dict(split=f"{name} {multiple:g}x", length=length))
            if length <= run.limit:
                far = tiled_loss(run, split, tiles, length, {}) if length > run.trained else near
                rows[-1] |= dict(loss=far, ppl=math.exp(min(far, 700)))
            rows[-1]["window_loss"] = near
        yield rows

def stretches(split, trained, multiples, tokens):
    """[(start, stop), ...] of the text to evaluate. They depend only on the split and `tokens`. If
    the split has no more tokens, one stretch covers it."""
    refuse(split.rows, f"{split.folder} holds rows of {split.row_length} tokens; extrapolation "
           "needs a stream of text, --evaluate takes rows")
    total = split.tokens - 1  # the last token is only a target
    n = tokens // STRETCHES if tokens < total else total
    for multiple in multiples:
        length = round(multiple * trained)
        more = f"--eval_tokens={STRETCHES * length} or more, or " if n < length <= total else ""
        refuse(not 1 <= length <= n, f"extrapolate={multiple:g} times {trained} tokens is not in "
               f"1 to {n}, the length of a stretch of {split.folder}; use {more}another multiple")
    starts = split.windows(n, STRETCHES if n < total else 1)
    return [(start, start + n) for start in starts.tolist()]

def tiled_loss(run, split, tiles, width, known):
    """Mean loss of the targets in the tiles, (start, stop), when a token sees at most the last
    `width` tokens of its tile. known caches token_losses, so none is computed twice."""
    views = [view for start, stop in tiles for view in windows(start, stop, width)]
    known |= token_losses(run, split, {window for window, _ in views} - known.keys())
    sums = sum(known[window][:, first - window[0] :].double().sum(1) for window, first in views)
    loss, targets = sums.tolist()
    refuse(not targets, "no token here has a target; evaluate more of them, or check the mask")
    return loss / targets

def windows(start, stop, width):
    """Yields ((begin, end), first) for windows of at most `width` tokens, whose targets count from
    `first` on. They overlap by half, so from the second window on, a target that counts sees at
    least half a window."""
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
    """Yields the items in batches of one length and about BATCH tokens. Prints its progress every
    ten seconds."""
    parts, shown = [], time.monotonic()
    for tokens, group in groupby(sorted(items, key=length), length):
        group, n = list(group), max(1, BATCH // tokens)
        parts += [(tokens, group[i : i + n]) for i in range(0, len(group), n)]
    for i, (tokens, part) in enumerate(parts):
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{name}, {tokens} tokens: {i / len(parts):.0%}", file=sys.stderr, flush=True)
        yield part

def write(runs, measured, path):
    """Print and save the rows of each run as soon as they are measured. Then draw them all."""
    lines, width = [], max(24, *(len(run.name) for run in runs))
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
    results.write_csv(path, lines)
    figures.draw_by_length(lines, path)

def cell(row, key, limit):
    if "token_error" in row:
        return f"{row['token_error']:.2f}% {row['sequence_error']:.2f}%"
    loss = row.get(key)
    return f"ends at {limit}" if loss is None else f"{loss:.4f} ({math.exp(min(loss, 700)):.2f})"
