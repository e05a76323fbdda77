"""
Writes text with trained models, and measures their loss on texts of any length:

    python sample.py RUN ... --prompt="def main("    text; on a task, answers marked right or wrong
    python sample.py RUN ... --evaluate=val,sparse   loss and errors over whole splits
    python sample.py RUN ... --extrapolate=1,2,4,8   loss at these multiples of the trained length

RUN is a run directory, such as out/quickstart_pope. RUN@key=value,key=value changes options of a
trained model, as in out/quickstart_rope@rope_scaling=ntk,rope_factor=8. Everything that is measured
is also appended to RUN/results.jsonl. Models compute in float32 and without the Triton kernels, so
that numbers from different machines can be compared.
"""
import argparse
import math
import os
import sys

import torch

import config
from config import Mistake
from data import locate
from data.shards import Split
from data.tokenizer import tokenizer
from model import GPT, TEST_TIME, GPTConfig, trained_length
from train import (
    append_records,
    pick_device,
    score_sums,
    scores,
    set_threads,
    to_device,
    tokenizer_name,
)

BATCH = 8192  # tokens per forward pass
SEGMENT = 1024  # a longer text is read in segments of this length, to bound the memory
SPANS = 16  # --extrapolate reads this many spans of text, spread evenly over the split
EVAL_TOKENS = 131072  # tokens in all spans together

# --- the command line -----------------------------------------------------------------------------

def main(words):
    args = arguments(words)
    runs = [Run(name, args.device, args.data) for name in args.runs]
    if args.evaluate:
        evaluate(runs, args.evaluate)
    elif args.extrapolate:
        extrapolate(runs, args.extrapolate, args.split, args.eval_tokens, args.window)
    else:
        for run in runs:
            if run.is_task:
                write_answers(run, args)
            else:
                write_text(run, args)

def arguments(words):
    """Returns the options of a command line."""
    parser = config.Parser(__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--evaluate", type=comma_separated, metavar="SPLITS",
                        help="splits to evaluate as a whole, such as val,sparse")
    action.add_argument("--extrapolate", type=multiples, metavar="MULTIPLES",
                        help="lengths to evaluate at, as multiples of the trained length: 0.5,1,2")
    add_run_options(parser)
    add_data_options(parser)
    lengths = parser.add_argument_group("--extrapolate")
    lengths.add_argument("--eval_tokens", type=config.integer, default=EVAL_TOKENS, metavar="N",
                         help="tokens to read at each length [%(default)s]")
    lengths.add_argument("--window", type=config.integer, metavar="N",
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
    text.add_argument("--temperature", type=config.number, default=0.8,
                      help="0: always the most probable token [%(default)s]")
    text.add_argument("--top_k", type=config.integer, default=0, metavar="K",
                      help="sample only from the k most probable tokens; 0: from all [%(default)s]")
    text.add_argument("--seed", type=config.integer, default=1337,
                      help="of the samples [%(default)s]")
    return parser.parse_intermixed_args(words)

def add_run_options(parser):
    """Adds the options that say which runs to read, and on which device."""
    parser.add_argument("runs", nargs="+", type=config.text, metavar="RUN",
                        help="run directory, or RUN@key=value")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto",
                        help="auto: the fastest available [auto]")

def add_data_options(parser):
    """Adds the options that say on which data the runs are evaluated."""
    parser.add_argument("--data", type=config.text,
                        help="a data set or folder to read [the run's own]")
    parser.add_argument("--split",
                        help="a split of the data set [the first that training evaluated]")

def comma_separated(text):
    words = text.split(",")
    if "" in words:
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return list(dict.fromkeys(words))

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

# --- a trained model ------------------------------------------------------------------------------

class Run:
    """A trained model and the data set to evaluate it on, which is the run's own by default. name
    is a run directory, or "directory@key=value,...", which changes options of the model."""

    def __init__(self, name, device="auto", data=None):
        folder, _, changes = name.partition("@")
        self.folder = os.path.normpath(folder)
        self.options = self.read_changes(name, changes)
        self.name = with_options(self.folder, self.options)
        self.device = pick_device(device)
        self.model, saved = GPT.from_checkpoint(self.folder, self.device, **self.options)
        set_threads(self.device, self.model.cfg.n_embd)
        self.step = saved["step"]
        self.config = saved["config"]  # all options of the training
        self.flags = saved.get("flags", {})  # those that name it in tables
        self.settings = saved.get("settings")  # a checksum of its config file, see train.identify
        self.meta = saved["meta"]  # meta.json of the data set that it was trained on
        self.is_task = self.meta["loss"] == "mask"
        self.trained = trained_length(saved)  # tokens per sequence in training
        self.data = data or self.config["data"]
        self.reads_its_own = data is None

    def read_changes(self, name, changes):
        """Returns {option: value} of a text such as "rope_scaling=ntk,rope_factor=8"."""
        words = [change for change in changes.split(",") if change]
        for word in words:
            option = word.partition("=")[0]
            if option not in TEST_TIME:
                raise Mistake(f"{name}: {option} cannot be changed after training; only "
                              f"{', '.join(TEST_TIME)} can")
        try:
            return config.parse(GPTConfig, [f"--{word}" for word in words])
        except Mistake as mistake:
            raise Mistake(f"{name}: {mistake}") from None

    def open_split(self, name=None):
        """Opens a split of the data set, by default the first that training evaluated. Raises
        Mistake if the set has another tokenizer than the run, or if it is the run's own but was
        written again, because it may then hold other text than before."""
        split = Split(locate(self.data), name or self.config["eval_splits"].split(",")[0])
        if split.meta["tokenizer"] != self.meta["tokenizer"]:
            raise Mistake(f"{split.folder} was tokenized with {tokenizer_name(split.meta)}, but "
                          f"{self.name} was trained with {tokenizer_name(self.meta)}; prepare the "
                          "data again with the tokenizer of the run")
        if self.reads_its_own and not split.is_same_set(self.meta):
            raise Mistake(f"{split.folder} has changed since {self.name} was trained on it; to "
                          f"evaluate on it as it is now, use --data={self.data}")
        return split

    def length(self, split):
        """Returns the number of tokens per sequence of the split, which is the same as in training
        unless the split has rows of a length of its own."""
        return split.row_length - 1 if split.rows else self.trained

    def about(self):
        """Returns what identifies the run in a table or picture, as a dict."""
        return {"run": self.folder, "config": self.config["config"], "pe": self.model.cfg.pe,
                "flags": self.flags, "settings": self.settings, "seed": self.config["seed"],
                "step": self.step, "options": self.options, "trained": self.trained}

    def record(self, values, **measured):
        """Appends a record to RUN/results.jsonl. It holds the values, {metric: number}, apart from
        those that are None, and `measured`, which says what was measured:

            data         the data set, or the task
            split        its split
            fingerprint  a checksum of the data
            length       tokens per sequence
            multiple     of --extrapolate: length / trained length
            tokens       of --extrapolate: how many tokens were read
            window       of --extrapolate: how many tokens a token sees for window_loss
        """
        values = {metric: value for metric, value in values.items() if value is not None}
        path = os.path.join(self.folder, "results.jsonl")
        try:
            append_records(path, {**self.about(), **measured, "torch": torch.__version__,
                                  "device": self.device.type, "values": values})
        except OSError as error:  # it may be somebody else's directory
            print(f"{path} could not be written ({error.strerror}), so this is only printed",
                  file=sys.stderr)

def with_options(name, options):
    """Returns a name such as out/quickstart_rope@rope_scaling=ntk,rope_factor=8."""
    changes = []
    for option, value in options.items():
        text = f"{value:g}" if isinstance(value, float) else value
        changes.append(f"{option}={text}")
    return f"{name}@{','.join(changes)}" if changes else name

# --- text and answers -----------------------------------------------------------------------------

def write_text(run, args):
    codec = tokenizer(run.meta["tokenizer"])
    start = codec.encode(args.prompt) or [run.meta["separator"] or 0]
    idx = torch.tensor([start], device=run.device)
    context = run.trained if args.context is None else args.context
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
    x, y = to_device(run.device, *split.read(starts, length))
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

# --- whole splits ---------------------------------------------------------------------------------

def evaluate(runs, names):
    """Prints and records the scores over whole splits. Of a stream of text, it reads as many
    windows of the trained length as fit, spread evenly."""
    splits = {run: [run.open_split(name) for name in names] for run in runs}
    for run in runs:
        for split in splits[run]:
            length = run.length(split)
            if length > run.model.limit:
                print(f"{run.name}, {split.split}: {length} tokens are more than its "
                      f"{run.model.limit} positions")
                continue
            starts = split.windows(length)
            found = scores(score_sums(run.model, split, starts, length, at_once(length)))
            line = f"{run.name}, {split.split}: loss {loss_and_perplexity(found['loss'])}"
            if "token_error" in found:
                line += (f", {found['token_error']:.2f}% of the targets are wrong, in "
                         f"{found['sequence_error']:.2f}% of the rows")
            print(line, flush=True)
            run.record(found, data=run.data, split=split.split, fingerprint=split.fingerprint,
                       length=length)

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

# --- longer texts than in training ----------------------------------------------------------------

def extrapolate(runs, multiples, name, tokens, window=None):
    """Prints and records the two losses of `measure` for each multiple of the trained length. The
    window is that of window_loss, or None for the trained length."""
    width = max(24, *(len(run.name) for run in runs))
    heading = None
    for run in runs:
        split = run.open_split(name)
        lengths = [round(multiple * run.trained) for multiple in multiples]
        texts = spans(split, lengths, tokens)
        of_window = window or run.trained
        measured = measure(run, split, lengths, texts, of_window)
        of_run = f"loss in nats (perplexity), on {run.data}"
        if heading != of_run:
            heading = of_run
            print(heading)
            print_row("", [f"{multiple:g}x" for multiple in multiples], width)
        for title, metric in ((run.name, "loss"),
                              (f"  seeing the last {of_window}", "window_loss")):
            cells = [f"ends at {run.model.limit}" if losses[metric] is None
                     else loss_and_perplexity(losses[metric]) for losses in measured]
            print_row(title, cells, width)
        for multiple, length, losses in zip(multiples, lengths, measured):
            run.record(losses, data=run.data, split=split.split, fingerprint=split.fingerprint,
                       length=length, multiple=multiple, window=of_window,
                       tokens=sum(stop - start for start, stop in texts))

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
    require_text(split, "--extrapolate")
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

def require_text(split, what):
    """Raises Mistake if the split does not hold the stream of text that `what` needs."""
    if split.rows or split.masks:
        raise Mistake(f"{split.folder} is a task, but {what} needs a stream of text; use "
                      "sample.py --evaluate")

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
            x, y = to_device(run.device, *split.read(starts, length))
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

if __name__ == "__main__":
    config.run(main)
