"""
Writes text with trained models, and checks how they read longer texts than in training:

    python sample.py RUN ... --prompt="def main("    text; on a task, answers marked right or wrong
    python sample.py RUN ... --extrapolate=1,2,4,8   loss at these multiples of the trained length

RUN is a run directory, such as out/quickstart_pope. RUN@key=value,key=value changes options of a
trained model, as in out/quickstart_rope@rope_scaling=ntk,rope_factor=8. The losses are also
appended to RUN/results.jsonl. Models compute in float32 and without the Triton kernels, so that
numbers from different machines can be compared. (eval/scores.py measures whole splits.)
"""
import argparse
import math
import sys

import torch

import config
from config import Mistake, devices, require, runs
from data.tokenizer import tokenizer

BATCH = 8192  # tokens per forward pass
SEGMENT = 1024  # a longer text is read in segments of this length, to bound the memory
SPANS = 16  # --extrapolate reads this many spans of text, spread evenly over the split
EVAL_TOKENS = 131072  # tokens in all spans together
FOR_LENGTHS = "--eval_tokens", "--window"  # the options that only --extrapolate reads
FOR_TEXT = ("--num_samples", "--prompt", "--max_new_tokens", "--context", "--temperature",
            "--top_k", "--seed")  # those that it does not read

# --- the command line -----------------------------------------------------------------------------

def main(words):
    args = arguments(words)
    trained = [runs.TrainedRun(name, args.device, args.data) for name in args.runs]
    if args.extrapolate:
        extrapolate(trained, args.extrapolate, args.split, args.eval_tokens, args.window)
        return
    for run in trained:
        if run.is_task:
            write_answers(run, args)
        else:
            write_text(run, args)

def arguments(words):
    """Returns the options of a command line."""
    parser = config.Parser(__doc__)
    runs.add_run_options(parser)
    runs.add_data_options(parser)
    lengths = parser.add_argument_group("longer texts")
    lengths.add_argument("--extrapolate", type=multiples, metavar="MULTIPLES",
                         help="lengths to read, as multiples of the trained length: 0.5,1,2")
    lengths.add_argument("--eval_tokens", type=config.count, default=EVAL_TOKENS, metavar="N",
                         help="tokens to read at each length [%(default)s]")
    lengths.add_argument("--window", type=config.count, metavar="N",
                         help="compare with the loss if a token sees at most the last N [the "
                              "trained length]")
    text = parser.add_argument_group("text, or answers to a task")
    text.add_argument("--num_samples", type=config.integer, default=2, metavar="N",
                      help="texts, or rows of a task, to show [%(default)s]")
    text.add_argument("--prompt", default="", help="text to continue [a new document]")
    text.add_argument("--max_new_tokens", type=config.integer, default=300, metavar="N",
                      help="length of each text [%(default)s]")
    text.add_argument("--context", type=config.integer, metavar="N",
                      help="tokens that the model sees at most; 0: all [the trained length]")
    text.add_argument("--temperature", type=config.not_negative, default=0.8,
                      help="0: always the most probable token [%(default)s]")
    text.add_argument("--top_k", type=config.integer, default=0, metavar="K",
                      help="sample only from the k most probable tokens; 0: from all [%(default)s]")
    text.add_argument("--seed", type=config.integer, default=1337,
                      help="of the samples [%(default)s]")
    args = parser.parse_intermixed_args(words)
    for word in words:
        name = word.partition("=")[0]
        require(name not in FOR_TEXT or not args.extrapolate,
                f"{name} does nothing with --extrapolate")
        require(name not in FOR_LENGTHS or args.extrapolate, f"{name} needs --extrapolate")
    return args

def multiples(text):
    """Returns the numbers in a text such as 1,2,4,8. The order does not matter."""
    try:
        numbers = sorted({float(word) for word in text.split(",")})
    except ValueError:
        numbers = [math.nan]
    if not 0 < numbers[0] <= numbers[-1] < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers above 0, such as 1,2,4")
    return numbers

# --- text and answers -----------------------------------------------------------------------------

def write_text(run, args):
    codec = tokenizer(run.meta["tokenizer"])
    start = codec.encode(args.prompt) or [run.meta["separator"] or 0]
    idx = torch.tensor([start], device=run.device)
    context = run.trained if args.context is None else args.context
    seen = context or len(start) + args.max_new_tokens - 1
    require(seen <= run.model.limit, f"{run.name} has only {run.model.limit} positions, and would "
            f"see {seen} tokens; use --context={run.model.limit}")
    for i in range(args.num_samples):
        torch.manual_seed(args.seed + i)
        tokens = run.model.generate(
            idx, args.max_new_tokens, args.temperature, args.top_k, context)[0].tolist()
        if not args.prompt:
            tokens = tokens[1:]  # the separator is not part of the text
        print(f"--- {run.name}, sample {i + 1}")
        print(codec.decode(tokens))

@torch.no_grad()
def write_answers(run, args):
    """Prints rows of a task, in which the model's answers stand in brackets."""
    split = run.open_split(args.split)
    length = run.length(split)
    decode = tokenizer(run.meta["tokenizer"]).decode_continuation
    between = ""
    if isinstance(run.meta["tokenizer"], dict):  # a token is a symbol, rather than a piece of text
        between = " "
    starts = split.windows(length, args.num_samples)
    x, y = devices.to_device(run.device, *split.read(starts, length))
    predicted = run.model(x, y)[0].argmax(-1)
    print(f"{run.name}, {split.split} split; answers are [right] or [wrong, not right]")
    rows = zip(x.tolist(), y.tolist(), predicted.tolist())
    for i, (tokens, targets, answers) in enumerate(rows, 1):
        last = [token for token in targets[-1:] if token != -1]  # of the row, if it is known
        words = [decode([token]) for token in tokens + last]
        asked = [t for t in range(length) if targets[t] != -1]
        for t in asked:
            answer = decode([answers[t]])
            if answers[t] != targets[t]:
                answer += f", not {words[t + 1]}"
            words[t + 1] = f"[{answer}]"
        right = sum(answers[t] == targets[t] for t in asked)
        print(f"--- row {i}, {right} of {len(asked)} right")
        end = max(asked, default=length) + 2  # what follows is padding
        print(between.join(words[:end]))

# --- longer texts than in training ----------------------------------------------------------------

def extrapolate(trained, multiples, name, tokens, window=None):
    """Prints and records the two losses of `measure` for each multiple of the trained length. The
    window is that of window_loss, or None for the trained length."""
    width = max(24, *(len(run.name) for run in trained))
    heading = None
    for run in trained:
        split = run.open_split(name)
        lengths = [round(multiple * run.trained) for multiple in multiples]
        texts = spans(split, lengths, tokens)
        of_window = window or run.trained
        read = sum(stop - start for start, stop in texts)
        print(f"{run.name} reads {read:,} tokens at each length", file=sys.stderr)
        measured = measure(run, split, lengths, texts, of_window)
        if heading != run.data:
            heading = run.data
            print(f"loss in nats (perplexity), on {run.data}")
            print_row("", [f"{multiple:g}x" for multiple in multiples], width)
        for title, metric in ((run.name, "loss"),
                              (f"  seeing the last {of_window}", "window_loss")):
            cells = [f"ends at {run.model.limit}" if losses[metric] is None
                     else loss_and_perplexity(losses[metric]) for losses in measured]
            print_row(title, cells, width)
        for multiple, length, losses in zip(multiples, lengths, measured):
            run.record(losses, run.data, split.split, split.fingerprint, length, multiple=multiple,
                       window=of_window, tokens=read)

def measure(run, split, lengths, texts, window):
    """Returns a dict of two losses for each length, on texts, which are (start, stop) pairs. N is
    the window, which is usually the trained length.

    For `loss`, the text is cut into pieces of this length, and the model reads each of them from
    its beginning. `loss` is None if the model does not have so many positions. For `window_loss`,
    the text is cut in the same way, but a token sees at most the last N tokens of its piece. It
    sees at least the last N / 2, unless it is nearer to the beginning of the piece. If `loss` is
    clearly lower, the model has gained from distant text. Both losses fall with the length as long
    as the model reads well, because a smaller fraction of the tokens is near the beginning of a
    piece and has little context. All lengths read the same text, so they have exactly the same
    targets."""
    windows = []  # a pair for each length: the windows of `loss`, and those of `window_loss`
    for length in lengths:
        pieces = [(begin, min(begin + length, stop))  # the last of a span may be shorter
                  for start, stop in texts for begin in range(start, stop, length)]
        of_loss = windows_of(pieces, length) if length <= run.model.limit else None
        windows.append((of_loss, windows_of(pieces, window)))
    # many windows occur more than once, but each is read only once
    needed = set()
    for of_loss, of_window_loss in windows:
        for begin, _, end in (of_loss or []) + of_window_loss:
            needed.add((begin, end))
    losses = token_losses(run, split, needed)
    measured = []
    for of_loss, of_window_loss in windows:
        loss = mean_loss(losses, of_loss) if of_loss else None
        measured.append({"loss": loss, "window_loss": mean_loss(losses, of_window_loss)})
    return measured

def print_row(name, cells, width):
    columns = "".join(f" {text:>18}" for text in cells)
    print(f"{name:{width}}{columns}", flush=True)

def spans(split, lengths, tokens):
    """Returns [(start, stop), ...] of the text to read, which depends only on the split and on
    `tokens`. If the split has no more tokens than that, it is one span. Raises Mistake if one of
    the lengths does not fit into a span."""
    require(not split.rows and not split.masks,
            f"{split.folder} is a task, but this needs a stream of text; use eval/scores.py")
    count = 1
    size = split.tokens - 1  # the last token is only a target
    if tokens < size:
        count = SPANS
        size = tokens // SPANS
    for length in lengths:
        if not 1 <= length <= size:
            raise Mistake(f"a length of {length} tokens is not from 1 to {size}, which is the size "
                          f"of a span of {split.folder}; use another multiple, or a larger "
                          "--eval_tokens if the split has more text")
    return [(start, start + size) for start in split.windows(size, count).tolist()]

def windows_of(pieces, width):
    """Cuts pieces of text, which are pairs (start, stop), into windows (begin, first, end) of at
    most `width` tokens. In each window, only the losses of the tokens from `first` to `end` count.
    The tokens before `first` are read again, so that those after it see at least half a window.
    With a width of 4, a piece (0, 8) has the windows (0, 0, 4), (2, 4, 6) and (4, 6, 8)."""
    windows = []
    for start, stop in pieces:
        first = start
        while first < stop:
            new = width if first == start else math.ceil(width / 2)
            end = min(first + new, stop)
            windows.append((max(start, end - width), first, end))
            first = end
    return windows

@torch.no_grad()
def token_losses(run, split, windows):
    """Returns a dict that maps each window (begin, end) of the split to the losses in nats of its
    tokens' targets, a tensor (end - begin,)."""
    of_length = {}  # {length: windows}, because those of one length can be read together
    for begin, end in sorted(windows):
        of_length.setdefault(end - begin, []).append((begin, end))
    found = {}
    for length, same in of_length.items():
        for part in batches(same, length):
            starts = [begin for begin, _ in part]
            x, y = devices.to_device(run.device, *split.read(starts, length))
            cache = run.model.new_cache()  # through which a segment sees those before it
            losses = []
            for x_part, y_part in zip(x.split(SEGMENT, 1), y.split(SEGMENT, 1)):
                _, loss = run.model(x_part, y_part, cache, return_logits=False, reduction="none")
                losses.append(loss)
            found.update(zip(part, torch.cat(losses, 1).cpu()))
    return found

def mean_loss(losses, windows):
    """Returns the mean loss of the tokens that count in these windows (begin, first, end). losses
    are those of token_losses."""
    counted = [losses[begin, end][first - begin :] for begin, first, end in windows]
    return torch.cat(counted).double().mean().item()

def loss_and_perplexity(loss):
    return f"{loss:.4f} ({math.exp(min(loss, 700)):.2f})"  # a larger exponent would overflow

def at_once(length):
    """Returns how many sequences of this length the model reads at a time."""
    return max(1, BATCH // length)

def batches(items, length):
    """Yields the items, which stand for sequences of this length, in lists of at_once(length)."""
    size = at_once(length)
    for i in range(0, len(items), size):
        yield items[i : i + size]

if __name__ == "__main__":
    config.run(main)
