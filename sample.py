"""
What one does with a trained model:

    python sample.py RUN ... [--key=value]          text; on a task, answers marked right or wrong
    python sample.py RUN ... --evaluate=val,sparse  loss and errors over whole splits
    python sample.py RUN ... --extrapolate=1,2,4,8  loss at these multiples of the trained length
    python sample.py RUN ... --figure=frequency     what the heads learned; =curves: of training
    python sample.py RUN ... --tasks=blimp,piqa     scores on tasks of the lm-evaluation-harness
    python sample.py RUN ... --report=out/report    a table of all these numbers, seeds together

RUN is a run directory, `out/quickstart_pope`. Options of the model can be changed at test time, per
run: `out/quickstart_rope@rope_scaling=yarn,rope_factor=8` or `out/quickstart_expe@expe_scale=0.5`.
Numbers are also appended to RUN/results.jsonl. --help prints all keys.
"""
import math
import os
import re
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import config
from data.shards import Split, locate
from data.text import tokenizer
from model import GPT, PES, GPTConfig, choose
from train import error_sums, load_weights, model_config, pick_device, read_checkpoint, scores

BATCH = 8192  # tokens per forward pass
SEGMENT = 1024  # of them from one sequence; a longer one goes on from the cache, in bounded memory
TEXTS = 10  # stretches of the split that a figure is drawn on


@dataclass
class SampleConfig:
    """Keys of sample.py, after the run directories."""

    prompt: str = ""  # text to go on from; empty: a new document
    num_samples: int = 2  # texts or rows per run
    max_new_tokens: int = 300  # length of each
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 0  # choose among the k likeliest tokens; 0: among all
    seed: int = 1337  # of the choice
    evaluate: str = ""  # splits of the data set, joined by commas: evaluate all of each
    extrapolate: str = ""  # multiples of the trained length, "0.5,1,2,4": evaluate there
    tasks: str = ""  # lm-evaluation-harness tasks, by name or yaml file: score the model on them
    task_limit: int = 0  # tasks: only that many first questions of each; 0: all
    fewshot: int = 0  # tasks: solved examples before each question; 0: as the task's own file says
    eval_tokens: int = 131072  # extrapolate: tokens to evaluate on, the same ones at every length
    split: str = "val"  # of the data set: where to extrapolate, or from which to show rows
    data: str = ""  # a data set or folder of shards to evaluate on; empty: the one trained on
    figure: str = ""  # frequency | positions | gates | distance | curves: draw it
    text: str = ""  # figure: a text file to draw it on; empty: the split
    heads: str = ""  # positions, gates: only these, "4.3,1.2": layer 4, head 3, ...; empty: all
    keys: str = "loss,val/loss"  # curves: keys of log.jsonl; those of a split are SPLIT/KEY
    against: str = "step"  # curves: step | tokens
    report: str = ""  # writes <report>.csv, and <report>.png of what was measured at several lengths
    out: str = ""  # writes <out>.csv, <out>.png; empty: out/evaluation, ...; figures go beside them
    device: str = "auto"  # auto | cpu | cuda | mps


def main(argv):
    if "--extrapolate" in argv:
        raise ValueError("flag '--extrapolate' has no value; write e.g. --extrapolate=1,2,4,8")
    runs = [os.path.normpath(word) for word in argv if not word.startswith("--")]
    cfg = config.load(SampleConfig, [word for word in argv if word.startswith("--")])
    if not runs:
        raise ValueError("no run directory given; e.g. python sample.py out/quickstart_pope")
    if cfg.temperature < 0:
        raise ValueError(f"temperature={cfg.temperature} is negative; use 0 or more")
    if 0 < cfg.temperature < 1e-6:
        raise ValueError(f"temperature={cfg.temperature} is too small to divide by; use 0")
    choose("against", cfg.against, ("step", "tokens"))
    device = pick_device(cfg.device)
    if cfg.report:
        from assets import results

        return results.report(runs, output(cfg.report))
    if cfg.figure == "curves":
        from assets import figures

        path = output(cfg.out or "out/curves")
        return figures.draw_training(runs, cfg.keys.split(","), cfg.against, path)
    models = {run: load(run, device) for run in runs}  # all of them, before the first is evaluated
    if cfg.extrapolate:
        return extrapolate(cfg, models, device)
    if cfg.tasks:
        from config.tasks import harness

        return harness.score_tasks(models, cfg.tasks.split(","), cfg.task_limit, cfg.fewshot)
    if cfg.evaluate:
        return evaluate(cfg, models, device)
    for run, (model, checkpoint) in models.items():
        if cfg.figure:
            picture(cfg, run, model, checkpoint, device)
        elif checkpoint["meta"]["loss"] == "mask":
            write_rows(cfg, run, model, checkpoint, device)
        else:
            write_text(cfg, run, model, checkpoint, device)


def load(run, device):
    """(model, checkpoint without its tensors) of "directory" or "directory@key=value,key=value"."""
    directory, _, options = run.partition("@")
    changes = {}
    for option in filter(None, options.split(",")):
        key, _, text = option.partition("=")
        changes[key] = config.typed(GPTConfig, key, text, run)
    if not os.path.exists(directory):
        raise FileNotFoundError(f"run directory {directory!r} does not exist; train one with "
                                f"`{command_for(directory)}`, public weights are not read")
    checkpoint = read_checkpoint(directory, device)
    model = GPT(model_config(checkpoint, **changes)).to(device).eval()
    load_weights(model, checkpoint, directory)
    return model, {key: checkpoint[key] for key in ("config", "meta", "step")}


def command_for(directory):
    """The command that trains a run of this name, <config>_<pe>, or any run."""
    name = re.sub(r"_seed\d+$", "", os.path.basename(directory))
    for path in config.known_files():
        stem = os.path.basename(path).removesuffix(".py") + "_"
        if name.startswith(stem) and set(re.split("[+,]", name.removeprefix(stem))) <= set(PES):
            return f"python train.py {path} --pe={name.removeprefix(stem)}"
    return "python train.py config/quickstart.py"


def limit(model):
    """The number of tokens past which the model is not defined."""
    return min((pe.limit for pe in model.firsts.values() if pe.limit), default=math.inf)


def trained_length(checkpoint):
    """Tokens in a training sequence: block_size, or fewer where the data are rows."""
    row = checkpoint["meta"]["row_length"].get("train")
    return row - 1 if row else checkpoint["config"]["block_size"]


def data_of(cfg, checkpoint):
    return cfg.data or checkpoint["config"]["data"]


def open_split(cfg, checkpoint, name):
    split = Split(locate(data_of(cfg, checkpoint)), name)
    theirs, ours = split.meta["tokenizer"], checkpoint["meta"]["tokenizer"]
    if theirs != ours:
        raise ValueError(f"{split.folder} holds tokens of {theirs!r}, the run was trained on "
                         f"{ours!r}; write it with the run's")
    return split


def output(path):
    """The path, without an ending, of files to be written, once its folder is there."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder of {path!r} cannot be made ({error.strerror}); "
                         "name another by --out or --report") from None
    return path


# --------------------------------------------------------------------------------------------------
# text, answers, pictures


def write_text(cfg, run, model, checkpoint, device):
    meta = checkpoint["meta"]
    text = tokenizer(meta)
    start = text.encode(cfg.prompt) or [meta["separator"] or 0]
    fit = max(1, limit(model) + 1 - len(start))  # the last token is not read again
    for i in range(cfg.num_samples):
        torch.manual_seed(cfg.seed + i)
        idx = torch.tensor([start], device=device)
        idx = model.generate(idx, min(cfg.max_new_tokens, fit), cfg.temperature, cfg.top_k or None)
        words = idx[0].tolist()
        end = f", which ends at {limit(model)} tokens" if fit < cfg.max_new_tokens else ""
        print(f"--- {run}, sample {i + 1}{end}\n{text.decode(words if cfg.prompt else words[1:])}")


def write_rows(cfg, run, model, checkpoint, device):
    """Rows of a task in which only some tokens carry loss; in place of each, the model's answer."""
    if cfg.prompt:
        raise ValueError(f"prompt={cfg.prompt!r} is for text, but {run} was trained on a task; "
                         "leave it out")
    split, symbol = open_split(cfg, checkpoint, cfg.split), tokenizer(checkpoint["meta"]).decode
    length = split.row_length - 1
    starts = split.windows(length, cfg.num_samples)
    x, y = (torch.from_numpy(a) for a in split.read(starts, length))
    with torch.no_grad():
        answers = model(x.to(device), y.to(device))[0].argmax(-1).cpu()
    print(f"{run}, {cfg.split} split; the model's answers are [right] or [wrong, not right]")
    between = " " if isinstance(checkpoint["meta"]["tokenizer"], dict) else ""
    for i in range(len(x)):
        last = int((y[i] != -1).nonzero().max())  # what follows is padding
        words = [symbol([int(x[i, 0])])]
        for t in range(last + 1):  # position t answers for token t + 1
            if y[i, t] == -1:
                words.append(symbol([int(x[i, t + 1])]))
            else:
                said, right = symbol([int(answers[i, t])]), symbol([int(y[i, t])])
                words.append(f"[{said}]" if said == right else f"[{said}, not {right}]")
        right, total = int((answers[i] == y[i]).sum()), int((y[i] != -1).sum())
        print(f"--- row {i + 1}, {right} of {total} right\n{between.join(words)}")


def picture(cfg, run, model, checkpoint, device):
    """Draw <run>_<figure>.png on a text, or on several stretches of the split: 256 tokens, or the
    trained length where that is less; distance: four times the trained length."""
    from assets import figures

    choose("figure", cfg.figure, (*figures.FIGURES, "curves"))
    code, length = tokenizer(checkpoint["meta"]), min(256, model.cfg.block_size)
    if cfg.figure == "distance":
        length = min(4 * trained_length(checkpoint), limit(model))
    if cfg.text:
        idx = torch.tensor([code.encode(figures.read_text(cfg.text))[:length]])
        if not idx.numel():
            raise ValueError(f"text={cfg.text!r} is empty; name a file that holds some text")
    else:
        split = open_split(cfg, checkpoint, cfg.split)
        window = max(length, split.row_length - 1)
        x, _ = split.read(split.windows(window, TEXTS), window)
        idx = torch.from_numpy(x)[:, :length]
    words = [code.decode([i]) for i in idx[0].tolist()]
    folder = os.path.dirname(output(cfg.out or "out/figure"))
    trained = trained_length(checkpoint)
    figures.draw_heads(folder, run, cfg.figure, model, trained, idx.to(device), words, cfg.heads)


# --------------------------------------------------------------------------------------------------
# whole splits


def evaluate(cfg, models, device):
    """A table of runs by splits, as CSV and, where the splits differ in length, as a picture. Its
    cells are loss and perplexity or, where only some targets carry loss, two percentages: wrong
    targets, and rows with a wrong one."""
    from assets import results

    names, splits = cfg.evaluate.split(","), {}
    for run, (_, checkpoint) in models.items():
        splits[run] = [open_split(cfg, checkpoint, name) for name in names]
    every = sum(splits.values(), [])
    path, width = output(cfg.out or "out/evaluation"), max(map(len, models))
    masked = any(split.meta["loss"] == "mask" for split in every)
    print("wrong targets, then rows with one" if masked else "loss in nats (perplexity)")
    print_row("", names, width)
    table = []
    for run, (model, checkpoint) in models.items():
        rows = [score_split(cfg, run, model, checkpoint, split, device) for split in splits[run]]
        print_row(run, [cell(row, model) for row in rows], width)
        splits[run] = [split for split, row in zip(splits[run], rows) if "loss" in row]
        table += rows
    results.keep(path, table, models)
    if len({row["length"] for row in table}) > 1:
        drawn = draw("draw_errors", table, path)
        if drawn and all(split.folder.name.partition("@")[0] == "recall" for split in every):
            draw("draw_recall", models, splits, device, path)


def score_split(cfg, run, model, checkpoint, split, device):
    """The row of evaluate's table for one run and split; without scores where the model ends."""
    trained = trained_length(checkpoint)
    length = split.row_length - 1 if split.rows else trained
    starts, n = split.windows(length), max(1, BATCH // length)
    row = dict(run=run, pe=model.cfg.pe, data=data_of(cfg, checkpoint), split=split.split)
    row |= dict(trained=trained, length=length, windows=len(starts))
    if length > limit(model):
        return row
    parts = (split.read(starts[i : i + n], length) for i in range(0, len(starts), n))
    batches = ([torch.from_numpy(a).to(device) for a in part] for part in parts)
    return row | scores(error_sums(model, batches), split.meta["loss"] == "mask")


def cell(row, model):
    if "token_error" in row:
        return f"{row['token_error']:.2f}% {row['sequence_error']:.2f}%"
    return f"{row['loss']:.4f} ({row['ppl']:.2f})" if "loss" in row else f"ends at {limit(model)}"


def print_row(name, cells, width):
    print(f"{name:{width}}" + "".join(f" {text:>18}" for text in cells), flush=True)


def draw(name, *args):
    """A picture by figures.py; without matplotlib False and a word, as the table is there."""
    from assets import figures

    try:
        getattr(figures, name)(*args)
    except ImportError as error:
        print(error)
        return False
    return True


# --------------------------------------------------------------------------------------------------
# extrapolation: trained short, tested long


def extrapolate(cfg, models, device):
    """A table of losses, runs by lengths, as CSV and as a picture. Each run has a second row: its
    loss when each token sees no more than the last tokens, as many as the trained length. A method
    whose first row is lower gains from what lies farther back."""
    from assets import results

    multiples = read_multiples(cfg, models)
    texts = [spans(cfg, checkpoint, multiples[-1]) for _, checkpoint in models.values()]
    path, width = output(cfg.out or "out/extrapolation"), max(24, *map(len, models))
    name = cfg.split
    if cfg.eval_tokens != SampleConfig.eval_tokens:  # a report keeps these numbers apart
        name += f" ({cfg.eval_tokens:,} tokens)"
    print(f"loss in nats (perplexity) at multiples of the trained length, {cfg.split} split: the same"
          f"\n{texts[0][0].numel():,} tokens at every length, or a few less; others than train.py evaluates")
    print_row("", [f"{m:g}x" for m in multiples], width)
    table, by_position = [], {}
    for (run, (model, checkpoint)), (x, y) in zip(models.items(), texts):
        trained = checkpoint["config"]["block_size"]
        rows = []
        for m in multiples:
            length = round(m * trained)
            n = x.size(1) // length  # windows of this length tile each span
            xs, ys = (a[:, : n * length].reshape(-1, length) for a in (x, y))
            losses = window_losses(model, xs, ys, trained, device)
            row = dict(run=run, pe=model.cfg.pe, data=data_of(cfg, checkpoint), split=name)
            row |= dict(multiple=f"{m:g}", trained=trained, length=length)
            row["window_loss"] = losses.mean().item()
            if length <= limit(model):
                if length > trained:
                    losses = token_losses(model, xs, ys, device)
                row["loss"] = losses.mean().item()
                row["ppl"] = perplexity(row["loss"])
                by_position[run] = losses.mean(0)  # of the longest length that it can
            rows.append(row)
        print_row(run, [cell(row, model) for row in rows], width)
        seen = [row["window_loss"] for row in rows]
        seen = [f"{loss:.4f} ({perplexity(loss):.2f})" for loss in seen]
        print_row(f"  seeing the last {trained}", seen, width)
        table += rows
    results.keep(path, table, models)
    draw("draw_extrapolation", table, by_position, path)


def read_multiples(cfg, models):
    """The numbers of --extrapolate, in order."""
    try:
        multiples = sorted({float(word) for word in cfg.extrapolate.split(",")})
    except ValueError:
        multiples = [math.nan]
    shortest = min(checkpoint["config"]["block_size"] for _, checkpoint in models.values())
    if not all(1 <= m * shortest < math.inf for m in multiples):
        raise ValueError(f"extrapolate={cfg.extrapolate!r} is no list of multiples; "
                         "write e.g. --extrapolate=1,2,4,8")
    return multiples


def perplexity(loss):
    return math.exp(min(loss, 700))


def spans(cfg, checkpoint, multiple):
    """(x, y), each (n, longest length): stretches of the split, which windows of every length
    tile, but for a rest where a length does not divide the longest."""
    split = open_split(cfg, checkpoint, cfg.split)
    length = round(multiple * checkpoint["config"]["block_size"])
    if split.rows:
        raise ValueError(f"{split.folder} holds rows of {split.row_length} tokens; "
                         "extrapolation needs a stream of text, --evaluate takes rows")
    starts = split.windows(length, max(1, cfg.eval_tokens // length))
    return [torch.from_numpy(a) for a in split.read(starts, length)]


@torch.no_grad()
def token_losses(model, x, y, device):
    """Loss in nats of every token of the (B, T) targets, on the CPU."""
    rows, n = [], max(1, BATCH // min(x.size(1), SEGMENT))
    for xs, ys in zip(x.split(n), y.split(n)):
        cache, losses = model.new_cache(), []
        for a, b in zip(xs.to(device).split(SEGMENT, 1), ys.to(device).split(SEGMENT, 1)):
            logits = model(a, b, cache=cache)[0].mT.float()  # (B, V, T)
            losses.append(F.cross_entropy(logits, b, ignore_index=-1, reduction="none").cpu())
        rows.append(torch.cat(losses, 1))
    return torch.cat(rows)


def window_losses(model, x, y, length, device):
    """As token_losses, when each token sees only a window of `length` tokens. Windows overlap by
    half, and of each the tokens count that the one before does not hold: they see half of it or
    more."""
    losses = token_losses(model, x[:, :length], y[:, :length], device)
    while losses.size(1) < x.size(1):
        done = losses.size(1)
        end = min(done + math.ceil(length / 2), x.size(1))
        window = slice(end - length, end)
        more = token_losses(model, x[:, window], y[:, window], device)
        losses = torch.cat((losses, more[:, done - end :]), 1)
    return losses


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, ImportError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
