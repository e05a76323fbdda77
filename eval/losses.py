"""
Measures the losses of trained models: over a whole split (`evaluate`), beyond the trained length
(`extrapolate`) and at each position of a long context (`by_position`). Each of the three opens the
splits of all runs first, so that a mistake is reported before any work is done. Its results are
dicts, called rows, which print_rows shows, results.py saves and figures.py draws.
"""
import math
from itertools import groupby

import torch
import torch.nn.functional as F

from eval.results import name_of_split

BATCH = 8192  # tokens per forward pass
SEGMENT = 1024  # a longer sequence runs in cached segments of this length, to bound the memory
STRETCHES = 16  # segments of text, spread evenly over the split, that `extrapolate` reads
TOKENS = 131072  # in all of these together
LONGEST = 8  # `by_position` reads contexts of this many times the trained length
POINTS = 32  # and averages their positions in this many groups, because single ones are noisy

# --- scores of a batch, which train.py uses too ---------------------------------------------------

@torch.no_grad()
def error_sums(model, x, y):
    """Returns five sums over a batch x, y (B, T), as float64: the loss in nats, the targets, the
    wrong targets, the rows with a wrong target, and the rows with any target. A target is wrong if
    another token is more probable, so greedy decoding reproduces the rows without a wrong one."""
    logits, loss = model(x, y)
    is_target = y != -1
    is_wrong = (logits.argmax(-1) != y) & is_target
    targets = is_target.sum()
    sums = [loss * targets, targets, is_wrong.sum(), is_wrong.any(1).sum(), is_target.any(1).sum()]
    return torch.stack(sums).cpu().double()

def scores(sums, masked):
    """Returns a dict of the loss in nats per target, the perplexity and, for a masked task, the
    percentages of wrong targets and of rows with a wrong target. sums are those of error_sums.
    Raises ValueError if there was no target."""
    total, targets, wrong, wrong_rows, rows = sums.tolist()
    if not targets:
        raise ValueError("no target to evaluate carries loss; evaluate more, or check the mask")
    loss = total / targets
    result = {"loss": loss, "ppl": perplexity(loss)}
    if masked:
        result["token_error"] = 100 * wrong / targets
        result["sequence_error"] = 100 * wrong_rows / rows
    return result

def perplexity(loss):
    return math.exp(min(loss, 700))  # because a larger one would overflow

# --- what is measured -----------------------------------------------------------------------------

def evaluate(runs, names):
    """Yields (run, row) for each split of each run. A row holds the scores over the whole split,
    which in a stream means every full window. It has no scores if the sequences of the split are
    longer than the model allows."""
    splits = {run: [run.split(name) for name in names] for run in runs}
    for run in runs:
        for split in splits[run]:
            length = run.length(split)
            row = {"split": split.split, "length": length, "data": split.fingerprint}
            if length <= run.model.limit:
                sums = 0
                for starts in batches(split.windows(length), lambda start: length):
                    x, y = run.read(split, starts, length)
                    sums = sums + error_sums(run.model, x, y)
                row.update(scores(sums, split.meta["loss"] == "mask"))
            yield run, row

def extrapolate(runs, multiples, name, tokens):
    """Yields (run, row) for each run and each multiple of its trained length. `loss` is that of
    windows of this length. For `window_loss`, a token of the same text sees at most as many
    previous tokens as in training, so a loss below it means that distant context helps. The windows
    of each length tile the same stretches of text, and the last one may be shorter, so that all
    lengths have exactly the same targets."""
    splits = {run: run.split(name) for run in runs}
    texts = {run: stretches(splits[run], run.trained, multiples, tokens) for run in runs}
    for run in runs:
        label = name + tokens_read(splits[run], tokens)
        known = {}  # losses in windows of the trained length, which all multiples share
        for multiple in multiples:
            length = round(multiple * run.trained)
            tiles = [(begin, min(begin + length, stop))  # the last of a stretch may be shorter
                     for start, stop in texts[run] for begin in range(start, stop, length)]
            window_loss = tiled_loss(run, splits[run], tiles, run.trained, known)
            row = {"split": f"{label} {multiple:g}x", "length": length,
                   "data": splits[run].fingerprint}
            if length <= run.model.limit:
                row["loss"] = tiled_loss(run, splits[run], tiles, length, dict(known))
                row["ppl"] = perplexity(row["loss"])
            row["window_loss"] = window_loss
            yield run, row

def stretches(split, trained, multiples, tokens):
    """Returns [(start, stop), ...] of the text to evaluate, which depends only on the split and on
    `tokens`. If the split has no more tokens than that, one stretch covers it. Raises ValueError if
    a multiple of the trained length does not fit into a stretch."""
    refuse_rows(split)
    count = 1
    size = split.tokens - 1  # the last token is only a target
    if tokens < size:
        count = STRETCHES
        size = tokens // STRETCHES
    for multiple in multiples:
        length = round(multiple * trained)
        if length < 1:
            raise ValueError(f"extrapolate={multiple:g} times {trained} tokens is less than one; "
                             "use a larger multiple")
        if length > size:
            raise ValueError(f"extrapolate={multiple:g} needs {length} tokens, but a stretch of "
                             f"{split.folder} has {size}; use a smaller multiple, or "
                             f"--eval_tokens={STRETCHES * length} if the split has that many")
    return [(start, start + size) for start in split.windows(size, count).tolist()]

def tokens_read(split, tokens):
    """Returns a suffix for the name of a split, so that a report keeps sizes apart."""
    return "" if tokens == TOKENS else f" ({min(tokens, split.tokens - 1):,} tokens)"

def refuse_rows(split):
    if split.rows:
        raise ValueError(f"{split.folder} holds rows of {split.row_length} tokens, but this "
                         "needs a stream of text; use --evaluate for rows")

def by_position(runs, name, tokens):
    """Returns rows of the mean loss at the positions of a context of LONGEST times the trained
    length. Positions are averaged in POINTS groups, and the `position` of a row is the mean of its
    group. Runs of one data set read the same segments, which are spread evenly over the split and
    hold about `tokens` tokens together. A model of shorter contexts reads their beginnings."""
    splits = {run: run.split(name) for run in runs}
    context = LONGEST * max(run.trained for run in runs)
    for split in splits.values():
        refuse_rows(split)
        context = min(context, tokens, split.tokens - 1)
    size = math.ceil(context / POINTS)
    rows = []
    for run in runs:
        length = min(context, run.model.limit)
        starts = splits[run].windows(context, tokens // context).tolist()
        windows = [(start, start + length) for start in starts]
        found = token_losses(run, splits[run], windows)
        sums = torch.stack(list(found.values())).double().sum(0)  # (2, length)
        positions = torch.arange(1.0, length + 1)
        same = {"run": run.name, "pe": run.model.cfg.pe, "trained": run.trained,
                "split": name_of_split(run, name) + tokens_read(splits[run], tokens),
                "seed": run.config["seed"], "steps": run.step, "experiment": run.experiment,
                "data": splits[run].fingerprint}
        for group, where in zip(sums.split(size, 1), positions.split(size)):
            loss, targets = group.sum(1).tolist()
            rows.append({**same, "position": where.mean().item(), "loss": loss / targets})
    return rows

# --- how a loss is measured -----------------------------------------------------------------------

def tiled_loss(run, split, tiles, width, known):
    """Returns the mean loss of the targets in the tiles, which are (start, stop), when a token sees
    at most the last `width` tokens of its tile. The dict `known` collects what token_losses
    returns, so that no window is computed twice."""
    views = [view for start, stop in tiles for view in windows_of(start, stop, width)]
    unknown = {window for window, _ in views} - known.keys()
    known.update(token_losses(run, split, unknown))
    sums = 0
    for window, first in views:
        sums = sums + known[window][:, first - window[0] :].double().sum(1)
    total, targets = sums.tolist()
    return total / targets

def windows_of(start, stop, width):
    """Yields ((begin, end), first) for windows of at most `width` tokens, in which only the targets
    from `first` on count towards the loss. The windows overlap by half, so from the second window
    on, a target that counts sees at least half a window."""
    done = start
    while done < stop:
        new = width if done == start else math.ceil(width / 2)
        end = min(done + new, stop)
        yield (max(start, end - width), end), done
        done = end

@torch.no_grad()
def token_losses(run, split, windows):
    """Returns {(begin, end): tensor (2, end - begin)} for these windows. Each tensor holds the loss
    of each token in nats, and a 1 where the token has a target."""
    found = {}
    for part in batches(sorted(windows), lambda window: window[1] - window[0]):
        begins = [begin for begin, _ in part]
        length = part[0][1] - part[0][0]
        x, y = run.read(split, begins, length)
        cache = run.model.new_cache() if length > SEGMENT else None
        losses = []
        for x_part, y_part in zip(x.split(SEGMENT, 1), y.split(SEGMENT, 1)):
            logits = run.model(x_part, y_part, cache=cache)[0].mT.float()  # (B, V, t)
            losses.append(F.cross_entropy(logits, y_part, ignore_index=-1, reduction="none"))
        pairs = torch.stack((torch.cat(losses, 1), y != -1), 1)  # (B, 2, T)
        found.update(zip(part, pairs.cpu()))
    return found

def batches(items, length):
    """Yields lists of items of the same length, which hold about BATCH tokens each."""
    for tokens, group in groupby(sorted(items, key=length), length):
        group = list(group)
        size = max(1, BATCH // tokens)
        for i in range(0, len(group), size):
            yield group[i : i + size]

# --- how rows are printed -------------------------------------------------------------------------

def print_rows(run, rows, width, head):
    """Prints a line for the run, whose name is padded to this width, with a column for each row.
    After extrapolation, a second line has the window_loss. Before them come two lines that say what
    the numbers are, unless they are `head`, those of the run before. Returns them."""
    if not rows:
        return head
    has_errors = any("token_error" in row for row in rows)
    what = "wrong targets, then rows with one" if has_errors else "loss in nats (perplexity)"
    above = [f"{what}, on {run.data}", *(row["split"].split()[-1] for row in rows)]
    if above != head:
        print(above[0])
        print_columns("", above[1:], width)
    print_columns(run.name, [cell(row, "loss", run.model.limit) for row in rows], width)
    if "window_loss" in rows[0]:
        cells = [cell(row, "window_loss", run.model.limit) for row in rows]
        print_columns(f"  seeing the last {run.trained}", cells, width)
    return above

def print_columns(name, cells, width):
    columns = "".join(f" {text:>18}" for text in cells)
    print(f"{name:{width}}{columns}", flush=True)

def cell(row, key, limit):
    if "token_error" in row:
        return f"{row['token_error']:.2f}% {row['sequence_error']:.2f}%"
    if key not in row:
        return f"ends at {limit}"
    return f"{row[key]:.4f} ({perplexity(row[key]):.2f})"
