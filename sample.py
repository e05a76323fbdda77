"""
Writes text with trained models, and measures how good they are, also on longer texts:

    python sample.py RUN ... --prompt="def main("    text; on a task, answers marked right or wrong
    python sample.py RUN ... --evaluate=val,sparse   loss and errors over whole splits
    python sample.py RUN ... --extrapolate=1,2,4,8   loss at these multiples of the trained length

RUN is a run directory, such as out/quickstart_pope. RUN@key=value,key=value changes options of a
trained model, as in out/quickstart_rope@rope_scaling=ntk,rope_factor=8. Everything that is measured
is also appended to RUN/results.jsonl. Models compute in float32, and without the Triton kernels.
"""
import json
import math
import os
from itertools import groupby

import torch
import torch.nn.functional as F

import config
from config import Mistake
from data import locate
from data.shards import Split
from data.tokenizer import identity, tokenizer
from model import GPT, GPTConfig, error_sums, pick_device, scores, trained_length

# The options of a trained model that make sense at test time
TEST_TIME = ("rope_scaling", "rope_factor", "rope_trained", "expe_scale", "relative_capped",
             "block_size")
BATCH = 8192  # tokens per forward pass
SEGMENT = 1024  # a longer text is read in segments of this length, to bound the memory
STRETCHES = 16  # --extrapolate reads this many stretches of text, spread evenly over the split
EVAL_TOKENS = 131072  # tokens in all stretches together

torch.set_flush_denormal(True)  # numbers near 1e-40 slow CPUs down; threads inherit this setting

# --- the command line -----------------------------------------------------------------------------

def arguments(words):
    """Returns the options of a command line."""
    parser = config.Parser(__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--evaluate", type=comma_separated, metavar="SPLITS",
                        help="splits to evaluate as a whole, such as val,sparse")
    action.add_argument("--extrapolate", type=multiples, metavar="MULTIPLES",
                        help="lengths to evaluate at, as multiples of the trained length: 0.5,1,2")
    add_run_options(parser)
    parser.add_argument("--eval_tokens", type=config.integer, default=EVAL_TOKENS, metavar="N",
                        help="extrapolate: tokens to read at each length [131072]")
    parser.add_argument("--num_samples", type=config.integer, default=2, metavar="N",
                        help="texts, or rows of a task, to show [2]")
    text = parser.add_argument_group("text")
    text.add_argument("--prompt", default="", help="text to continue [a new document]")
    text.add_argument("--max_new_tokens", type=config.integer, default=300, metavar="N",
                      help="length of each text [300]")
    text.add_argument("--context", type=config.integer, metavar="N",
                      help="tokens that the model sees at most; 0: all [the trained length]")
    text.add_argument("--temperature", type=float, default=0.8,
                      help="0: always the most probable token [0.8]")
    text.add_argument("--top_k", type=config.integer, default=0, metavar="K",
                      help="sample only from the k most probable tokens; 0: from all [0]")
    text.add_argument("--seed", type=config.integer, default=1337, help="of the samples [1337]")
    return parser.parse_intermixed_args(words)

def add_run_options(parser):
    """Adds the options that say which runs to read, and on which data and device."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, or RUN@key=value")
    parser.add_argument("--data", help="a data set or folder to read [the run's own]")
    parser.add_argument("--split", help="a split of it [the first that training evaluated]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto",
                        help="auto: the fastest available [auto]")

def comma_separated(text):
    return text.split(",")

def multiples(text):
    """Returns the numbers in a text such as 1,2,4,8. The order does not matter."""
    return sorted({float(word) for word in text.split(",")})

def main(words):
    args = arguments(words)
    runs = [Run(name, args.device, args.data) for name in args.runs]
    if args.evaluate:
        evaluate(runs, args.evaluate)
    elif args.extrapolate:
        extrapolate(runs, args.extrapolate, args.split, args.eval_tokens)
    else:
        for run in runs:
            if run.meta["loss"] == "mask":
                write_answers(run, args)
            else:
                write_text(run, args)

# --- a trained model ------------------------------------------------------------------------------

class Run:
    """A trained model and the data set to evaluate it on, which is the run's own by default. name
    is a run directory, or "directory@key=value,...", which changes options of the model."""

    def __init__(self, name, device="auto", data=None):
        folder, at, self.options = name.partition("@")
        self.folder = os.path.normpath(folder)
        self.name = self.folder + at + self.options
        changes = config.parse(
            GPTConfig, [f"--{option}" for option in self.options.split(",") if option])
        for key in changes:
            if key not in TEST_TIME:
                raise Mistake(f"{key} in {name} cannot be changed after training; only "
                              f"{', '.join(TEST_TIME)} can")
        with config.refusals_are_mistakes():
            self.device = pick_device(device)
            self.model, saved = GPT.from_checkpoint(self.folder, self.device, **changes)
        self.step = saved["step"]
        self.config = saved["config"]  # all options of the training
        self.meta = saved["meta"]  # meta.json of the data set that it was trained on
        self.trained = trained_length(saved)  # tokens per sequence in training
        self.data = data or self.config["data"]
        self.reads_its_own = data is None

    def split(self, name=None):
        """Opens a split of the data set, by default the first that training evaluated. Raises
        Mistake if the set has another tokenizer than the run, or if it is the run's own but was
        written again, because it may then hold other text than before."""
        split = Split(locate(self.data), name or self.config["eval_splits"].split(",")[0])
        if identity(split.meta["tokenizer"]) != identity(self.meta["tokenizer"]):
            raise Mistake(f"{split.folder} was tokenized with {split.meta['tokenizer']!r}, but "
                          f"{self.name} was trained with {self.meta['tokenizer']!r}; prepare the "
                          "data again with the tokenizer of the run")
        if self.reads_its_own and split.changes(self.meta):
            raise Mistake(f"{split.folder} has changed since {self.name} was trained on it; to "
                          f"evaluate on it as it is now, use --data={self.data}")
        return split

    def length(self, split):
        """Returns the number of tokens per sequence of the split, which is the same as in training
        unless the split has rows of a length of its own."""
        return split.row_length - 1 if split.rows else self.trained

    def read(self, split, starts, length):
        """Returns x and y, each (n, length), on the model's device."""
        return [torch.from_numpy(part).to(self.device) for part in split.read(starts, length)]

    def record(self, split, length, values, data):
        """Appends a line to RUN/results.jsonl for each of the values, {metric: number}, that were
        measured on sequences of this length. data is a checksum of what was read."""
        if not self.reads_its_own:
            split = f"{self.data} {split}"
        lines = "\n"  # a full disk may have cut the last line short
        for metric, value in values.items():
            lines += json.dumps({
                "run": self.folder, "options": self.options, "config": self.config["config"],
                "pe": self.model.cfg.pe, "seed": self.config["seed"], "step": self.step,
                "split": split, "trained": self.trained, "length": length, "metric": metric,
                "value": value, "data": data, "torch": torch.__version__,
                "device": self.device.type}) + "\n"
        with open(os.path.join(self.folder, "results.jsonl"), "a") as file:
            file.write(lines)

# --- text and answers -----------------------------------------------------------------------------

def write_text(run, args):
    codec = tokenizer(run.meta)
    start = codec.encode(args.prompt) or [run.meta["separator"] or 0]
    idx = torch.tensor([start], device=run.device)
    context = run.trained if args.context is None else args.context
    for i in range(args.num_samples):
        torch.manual_seed(args.seed + i)
        with config.refusals_are_mistakes():  # learned positions end at block_size
            tokens = run.model.generate(
                idx, args.max_new_tokens, args.temperature, args.top_k, context)[0].tolist()
        if not args.prompt:
            tokens = tokens[1:]  # the separator is not part of the text
        print(f"--- {run.name}, sample {i + 1}")
        print(codec.decode(tokens))

@torch.no_grad()
def write_answers(run, args):
    """Prints rows of a task, in which the model's answers stand in brackets."""
    split = run.split(args.split)
    length = run.length(split)
    decode = tokenizer(run.meta).decode
    between = ""
    if isinstance(run.meta["tokenizer"], dict):  # a token is a symbol, rather than a piece of text
        between = " "
    x, y = run.read(split, split.windows(length, args.num_samples), length)
    predicted = run.model(x, y)[0].argmax(-1)
    print(f"{run.name}, {split.split} split; answers are [right] or [wrong, not right]")
    rows = zip(x.tolist(), y.tolist(), predicted.tolist())
    for i, (tokens, targets, answers) in enumerate(rows, 1):
        words = [decode([token]) for token in tokens + targets[-1:] if token != -1]
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
    """Prints and records the scores over whole splits. In a stream of text, these are all windows
    of the trained length, side by side."""
    for run in runs:
        for name in names:
            split = run.split(name)
            length = run.length(split)
            if length > run.model.limit:
                print(f"{run.name}, {name}: {length} tokens are more than its {run.model.limit} "
                      "positions")
                continue
            sums = torch.zeros(5, dtype=torch.float64)
            for starts in batches(split.windows(length), length):
                sums += error_sums(run.model, *run.read(split, starts, length))
            with config.refusals_are_mistakes():
                found = scores(sums, masked=split.meta["loss"] == "mask")
            run.record(name, length, found, split.fingerprint)
            line = f"{run.name}, {name}: loss {loss_and_perplexity(found['loss'])}"
            if "token_error" in found:
                line += (f", {found['token_error']:.2f}% of the targets are wrong, in "
                         f"{found['sequence_error']:.2f}% of the rows")
            print(line, flush=True)

def loss_and_perplexity(loss):
    return f"{loss:.4f} ({math.exp(min(loss, 700)):.2f})"  # a larger exponent would overflow

def batches(items, length):
    """Yields the items, which stand for sequences of this length, in lists of BATCH tokens."""
    size = max(1, BATCH // length)
    for i in range(0, len(items), size):
        yield items[i : i + size]

# --- longer texts than in training ----------------------------------------------------------------

def extrapolate(runs, multiples, name, tokens):
    """Prints and records two losses for each multiple of the trained length.

    For the first, `loss`, the text is cut into pieces of this length, and the model reads each of
    them from its beginning. For the second, `window_loss`, the text is cut in the same way, but
    each token sees at most as many tokens before it as in training. So a `loss` that is lower than
    the `window_loss` shows that the model gains from distant text. All lengths read the same text,
    so they have exactly the same targets."""
    width = max(24, *(len(run.name) for run in runs))
    heading = None
    for run in runs:
        split = run.split(name)
        lengths = [round(multiple * run.trained) for multiple in multiples]
        texts = stretches(split, lengths, tokens)
        full = []  # for each length, the windows that its loss is measured in, see windows_of
        narrow = []  # for each length, those of its window_loss
        for length in lengths:
            pieces = [(begin, min(begin + length, stop))  # the last of a stretch may be shorter
                      for start, stop in texts for begin in range(start, stop, length)]
            fits = length <= run.model.limit
            full.append(windows_of(pieces, length) if fits else [])
            narrow.append(windows_of(pieces, run.trained))
        needed = {(begin, end) for windows in full + narrow for begin, _, end in windows}
        losses = token_losses(run, split, needed)
        of_run = f"loss in nats (perplexity), on {run.data}"
        if heading != of_run:
            heading = of_run
            print(heading)
            print_row("", [f"{multiple:g}x" for multiple in multiples], width)
        cells, narrow_cells = [], []
        for multiple, length, windows, narrow_windows in zip(multiples, lengths, full, narrow):
            found = {}
            if windows:
                found["loss"] = mean_loss(losses, windows)
            found["window_loss"] = mean_loss(losses, narrow_windows)
            label = split.split
            if tokens != EVAL_TOKENS:  # so that a report keeps the two apart
                label += f" ({min(tokens, split.tokens - 1):,} tokens)"
            run.record(f"{label} {multiple:g}x", length, found, split.fingerprint)
            cells.append(loss_and_perplexity(found["loss"]) if windows
                         else f"ends at {run.model.limit}")
            narrow_cells.append(loss_and_perplexity(found["window_loss"]))
        print_row(run.name, cells, width)
        print_row(f"  seeing the last {run.trained}", narrow_cells, width)

def print_row(name, cells, width):
    columns = "".join(f" {text:>18}" for text in cells)
    print(f"{name:{width}}{columns}", flush=True)

def stretches(split, lengths, tokens):
    """Returns [(start, stop), ...] of the text to read, which depends only on the split and on
    `tokens`. If the split has no more tokens than that, it is one stretch. Raises Mistake if one of
    the lengths does not fit into a stretch."""
    if split.rows or split.masks:
        raise Mistake(f"{split.folder} is a task, but --extrapolate needs a stream of text; use "
                      "--evaluate")
    count = 1
    size = split.tokens - 1  # the last token is only a target
    if tokens < size:
        count = STRETCHES
        size = tokens // STRETCHES
    for length in lengths:
        if not 1 <= length <= size:
            raise Mistake(f"a length of {length} tokens is not from 1 to {size}, which is the size "
                          f"of a stretch of {split.folder}; use another multiple, or a larger "
                          "--eval_tokens if the split has more text")
    return [(start, start + size) for start in split.windows(size, count).tolist()]

def windows_of(pieces, width):
    """Returns windows (begin, first, end) of at most `width` tokens, by which a model reads the
    pieces of text, which are pairs (start, stop). Every token of a piece is in `first` to `end` of
    exactly one window, which is where its loss counts. Before `first`, the window repeats half of
    the previous one, so that all tokens but those at the start of a piece see at least that."""
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
    """Returns {(begin, end): the loss in nats of each token's target, (end - begin,)} for these
    windows of the split, given as pairs (begin, end)."""
    def length_of(window):
        return window[1] - window[0]

    found = {}
    for length, same in groupby(sorted(windows, key=lambda window: (length_of(window), window)),
                                key=length_of):
        for part in batches(list(same), length):
            x, y = run.read(split, [begin for begin, _ in part], length)
            cache = run.model.new_cache()  # through which a segment sees those before it
            losses = []
            for x_part, y_part in zip(x.split(SEGMENT, 1), y.split(SEGMENT, 1)):
                logits, _ = run.model(x_part, y_part, cache=cache)
                losses.append(F.cross_entropy(logits.mT, y_part, reduction="none"))
            found.update(zip(part, torch.cat(losses, 1).cpu()))
    return found

def mean_loss(losses, windows):
    """Returns the mean loss of the tokens that count in these windows (begin, first, end). losses
    are those of token_losses."""
    counted = [losses[begin, end][first - begin :] for begin, first, end in windows]
    return torch.cat(counted).double().mean().item()

if __name__ == "__main__":
    config.run(main)
