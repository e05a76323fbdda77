"""
What one does with a trained model:

    python sample.py RUN ... [--key=value]            writes text; on a synthetic task, answers marked right or wrong
    python sample.py RUN ... --evaluate=val,sparse    loss and errors over whole splits
    python sample.py RUN ... --extrapolate=1,2,4,8    loss at these multiples of the trained length
    python sample.py RUN ... --figure=frequency       a picture of what the heads learned; or =positions, gates, distance
    python sample.py RUN ... --tasks=blimp,piqa       scores on tasks of the lm-evaluation-harness

RUN is a run directory, `out/quickstart_pope`. Options of the model can be changed at test time, per run:
`out/quickstart_rope@rope_scaling=yarn,rope_factor=8` or `out/quickstart_expe@expe_scale=0.5`. --help prints all keys.
"""
import csv
import math
import os
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import config
from data.shards import Split, locate, tokenizer
from model import GPT, GPTConfig, choose
from train import error_sums, load_weights, model_config, pick_device, read_checkpoint, scores

BATCH = 8192  # tokens per forward pass
SEGMENT = 1024  # of them from one sequence; a longer one goes on from the cache, so that memory stays bounded
TEXTS = 8  # stretches of text that a figure takes the mean over


@dataclass
class SampleConfig:
    """Keys of sample.py, after the run directories."""

    prompt: str = ""  # text to go on from; empty: a new document
    num_samples: int = 2  # texts or rows per run
    max_new_tokens: int = 300  # length of each
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 0  # choose among the k likeliest tokens; 0: among all
    seed: int = 1337  # of the choice
    evaluate: str = ""  # splits of the data set, joined by commas: evaluate all of each instead of writing text
    extrapolate: str = ""  # multiples of the trained length, "0.5,1,2,4": evaluate there instead of writing text
    tasks: str = ""  # lm-evaluation-harness tasks, by name or yaml file, "blimp,cbt": score the model on them
    task_limit: int = 0  # tasks: only that many first questions of each; 0: all
    fewshot: int = 0  # tasks: solved examples before each question; 0: as many as the task's own file says
    eval_tokens: int = 131072  # extrapolate: tokens to evaluate on, the same ones at every length
    split: str = "val"  # of the data set: where to extrapolate, or from which to show rows
    data: str = ""  # a data set or folder of shards to evaluate on; empty: the one that the run was trained on
    figure: str = ""  # frequency | positions | gates | distance: draw what the heads learned instead of writing text
    text: str = ""  # figure: a text file to draw it on; empty: the split
    out: str = ""  # writes <out>.csv, <out>.png; empty: out/extrapolation or out/evaluation; figures go beside them
    device: str = "auto"  # auto | cpu | cuda | mps


def main(argv):
    runs = [word for word in argv if not word.startswith("--")]
    cfg = config.load(SampleConfig, [word for word in argv if word.startswith("--")])
    if not runs:
        raise ValueError("no run directory given; e.g. python sample.py out/quickstart_pope")
    if cfg.temperature < 0:
        raise ValueError(f"temperature={cfg.temperature} is negative; use 0 or more")
    device = pick_device(cfg.device)
    models = {run: load(run, device) for run in runs}  # all of them, before the first is evaluated
    if cfg.extrapolate:
        extrapolate(cfg, models, device)
    elif cfg.tasks:
        from config.tasks import harness

        harness.score_tasks(models, cfg.tasks.split(","), cfg.task_limit, cfg.fewshot)
    elif cfg.figure:
        picture(cfg, models, device)
    elif cfg.evaluate:
        evaluate(cfg, models, device)
    else:
        for run, (model, checkpoint) in models.items():
            write = write_rows if checkpoint["meta"]["loss"] == "mask" else write_text
            write(cfg, run, model, checkpoint, device)


def load(run, device):
    """(model, checkpoint without its tensors) of "directory" or "directory@key=value,key=value"."""
    directory, _, options = run.partition("@")
    changes = {}
    for option in filter(None, options.split(",")):
        key, _, text = option.partition("=")
        changes[key] = config.typed(GPTConfig, key, text, run)
    checkpoint = read_checkpoint(directory, device)
    model = GPT(model_config(checkpoint, **changes)).to(device).eval()
    load_weights(model, checkpoint, directory)
    return model, {key: checkpoint[key] for key in ("config", "meta")}


# ---------------------------------------------------------------------------------------------------
# text, answers, pictures


def write_text(cfg, run, model, checkpoint, device):
    text = tokenizer(checkpoint["meta"])
    start = text.encode(cfg.prompt) or [checkpoint["meta"]["separator"] or 0]
    for i in range(cfg.num_samples):
        torch.manual_seed(cfg.seed + i)
        idx = torch.tensor([start], device=device)
        idx = model.generate(idx, cfg.max_new_tokens, cfg.temperature, cfg.top_k or None)[0].tolist()
        print(f"--- {run}, sample {i + 1}\n{text.decode(idx if cfg.prompt else idx[1:])}")


def write_rows(cfg, run, model, checkpoint, device):
    """Rows of a task in which only some tokens carry loss, with the model's answer in the place of each of them."""
    split, symbol = open_split(cfg, checkpoint, cfg.split), tokenizer(checkpoint["meta"]).decode
    length = split.row_length - 1
    x, y = (torch.from_numpy(a) for a in split.read(split.windows(length, cfg.num_samples), length))
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


def picture(cfg, models, device):
    """Draw <run>_<figure>.png of each run on the first tokens of a text, or of several stretches of the split: 256 tokens,
    or the trained length where that is less; distance: four times the trained length."""
    from assets import figures

    title = choose("figure", cfg.figure, figures.FIGURES)
    for run, (model, checkpoint) in models.items():
        code, trained = tokenizer(checkpoint["meta"]), model.cfg.block_size
        length = min(4 * trained, limit(model)) if cfg.figure == "distance" else min(256, trained)
        if cfg.text:
            try:
                with open(cfg.text, encoding="utf-8") as file:
                    idx = torch.tensor([code.encode(file.read())[:length]])
            except (OSError, UnicodeDecodeError):
                raise ValueError(f"text={cfg.text!r} is no file of UTF-8 text; name one") from None
            if not idx.numel():
                raise ValueError(f"text={cfg.text!r} is empty; name a file that holds some text")
        else:
            split = open_split(cfg, checkpoint, cfg.split)
            window = max(length, split.row_length - 1)
            idx = torch.from_numpy(split.read(split.windows(window, TEXTS), window)[0])[:, :length]
        words = [code.decode([i]) for i in idx[0].tolist()]
        figure = figures.draw(cfg.figure, model, idx.to(device), words)
        name = os.path.basename(os.path.normpath(run.partition("@")[0])) + run[len(run.partition("@")[0]) :]
        figure.suptitle(f"{name}: {title}")
        figures.save(figure, os.path.join(os.path.dirname(output(cfg, "")), f"{name}_{cfg.figure}.png"))


# ---------------------------------------------------------------------------------------------------
# evaluation


def open_split(cfg, checkpoint, name):
    split = Split(locate(cfg.data or checkpoint["config"]["data"]), name)
    theirs, ours = split.meta["tokenizer"], checkpoint["meta"]["tokenizer"]
    if theirs != ours:
        raise ValueError(f"{split.folder} holds tokens of {theirs!r}, the run was trained on {ours!r}; "
                         "write it with the run's")
    return split


def limit(model):
    """The number of tokens past which the model is not defined."""
    return min((pe.limit for pe in model.firsts.values() if pe.limit), default=math.inf)


def output(cfg, name):
    """The path, without an ending, of what is written; its folder is there."""
    path = cfg.out or os.path.join("out", name)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    return path


def write_csv(path, table):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, {key: None for row in table for key in row}, restval="")
        writer.writeheader()
        writer.writerows(table)
    print(f"wrote {path}")


def evaluate(cfg, models, device):
    """A table of whole splits, runs by splits, as CSV and, where the splits differ in length, as a picture. In it loss and
    perplexity or, where only some targets carry loss, the percentages of wrong targets and of rows with one."""
    names, table, trained = cfg.evaluate.split(","), [], {}
    splits = {run: [open_split(cfg, checkpoint, name) for name in names] for run, (_, checkpoint) in models.items()}
    masked = any(split.meta["loss"] == "mask" for row in splits.values() for split in row)
    path, width = output(cfg, "evaluation"), max(map(len, models))
    print("wrong targets, rows with a wrong target" if masked else "loss in nats (perplexity)")
    print(" " * width + "".join(f"{name:>18}" for name in names))
    for run, (model, checkpoint) in models.items():
        cells = []
        for split in splits[run]:
            trained[run] = split.meta["row_length"].get("train", checkpoint["config"]["block_size"] + 1) - 1
            length = split.row_length - 1 if split.rows else checkpoint["config"]["block_size"]
            starts, n = split.windows(length), max(1, BATCH // length)
            table.append(dict(run=run, split=split.split, length=length, windows=len(starts)))
            if length > limit(model):
                cells.append(f"ends at {limit(model)}")
                continue
            parts = (split.read(starts[i : i + n], length) for i in range(0, len(starts), n))
            sums = error_sums(model, ([torch.from_numpy(a).to(device) for a in part] for part in parts))
            found = scores(sums, split.meta["loss"] == "mask")
            table[-1] |= found
            if "token_error" in found:
                cells.append(f"{found['token_error']:.2f}% {found['sequence_error']:.2f}%")
            else:
                cells.append(f"{found['loss']:.4f} ({found['ppl']:.2f})")
        print(f"{run:{width}}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    write_csv(path + ".csv", table)
    if len({row["length"] for row in table}) == 1:
        return
    from assets import figures

    pes = {run: model.cfg.pe for run, (model, _) in models.items()}
    try:
        figures.save(figures.draw_errors(table, pes, trained), path + ".png")
        if all(split.folder.name.partition("@")[0] == "recall" for row in splits.values() for split in row):
            errors = {run: figures.recall_errors(models[run][0], splits[run], device) for run in models}
            figures.save(figures.draw_recall(errors, pes), path + "_distance.png")
    except ImportError as error:
        print(error)


# ---------------------------------------------------------------------------------------------------
# extrapolation: trained short, tested long


def extrapolate(cfg, models, device):
    """A table of losses, runs by lengths, as CSV and as a picture. The second row of each run is the loss when each token
    sees no more than the last trained length of tokens: below it, a method gains from those that are farther back."""
    multiples = read_multiples(cfg, models)
    texts = []
    for _, checkpoint in models.values():
        texts.append(spans(cfg, checkpoint, round(multiples[-1] * checkpoint["config"]["block_size"])))
    path, width = output(cfg, "extrapolation"), max(24, *map(len, models))
    print(f"loss in nats (perplexity) at multiples of the trained length, {cfg.split} split: the same "
          f"{texts[0][0].numel():,} tokens at every length, others than those of train.py's evaluation\n{'':{width}}"
          + "".join(f"{f'{m:g}x':>17}" for m in multiples))
    table, by_position = [], {}
    for (run, (model, checkpoint)), (x, y) in zip(models.items(), texts):
        trained = checkpoint["config"]["block_size"]
        cells, window_cells = [], []
        for m in multiples:
            length = round(m * trained)
            n = x.size(1) // length  # windows of this length tile each span
            xs, ys = (a[:, : n * length].reshape(-1, length) for a in (x, y))
            last = window_losses(model, xs, ys, trained, device)
            row = dict(run=run, multiple=f"{m:g}", length=length, loss="", ppl="", window_loss=last.mean().item())
            window_cells.append(f"{row['window_loss']:.4f} ({perplexity(row['window_loss']):.2f})")
            if length > limit(model):
                cells.append(f"ends at {limit(model)}")
            else:
                losses = last if length <= trained else token_losses(model, xs, ys, device)
                row["loss"] = losses.mean().item()
                row["ppl"] = perplexity(row["loss"])
                cells.append(f"{row['loss']:.4f} ({row['ppl']:.2f})")
                by_position[run] = losses.mean(0)  # of the longest length that it can
            table.append(row)
        print(f"{run:{width}}" + "".join(f"{cell:>17}" for cell in cells))
        print(f"{f'  seeing the last {trained}':{width}}" + "".join(f"{cell:>17}" for cell in window_cells), flush=True)
    write_csv(path + ".csv", table)
    from assets import figures

    pes = {run: model.cfg.pe for run, (model, _) in models.items()}
    trained = {run: checkpoint["config"]["block_size"] for run, (_, checkpoint) in models.items()}
    try:
        figures.save(figures.draw_extrapolation(table, pes, trained, cfg.split, by_position), path + ".png")
    except ImportError as error:
        print(error)


def read_multiples(cfg, models):
    """The numbers of --extrapolate, in order."""
    try:
        multiples = sorted({float(word) for word in cfg.extrapolate.split(",")})
    except ValueError:
        multiples = [math.nan]
    shortest = min(checkpoint["config"]["block_size"] for _, checkpoint in models.values())
    if not all(1 <= m * shortest < math.inf for m in multiples):
        raise ValueError(f"extrapolate={cfg.extrapolate!r} is no list of multiples; write e.g. --extrapolate=1,2,4,8")
    return multiples


def perplexity(loss):
    return math.exp(min(loss, 700))


def spans(cfg, checkpoint, length):
    """(x, y), each (n, length): stretches of the split, which windows of every length tile, but for a rest where a length
    does not divide the longest."""
    split = open_split(cfg, checkpoint, cfg.split)
    if split.rows:
        raise ValueError(f"{split.folder} holds rows of {split.row_length} tokens; extrapolation needs a stream of text")
    starts = split.windows(length, max(1, cfg.eval_tokens // length))
    return [torch.from_numpy(a) for a in split.read(starts, length)]


@torch.no_grad()
def token_losses(model, x, y, device):
    """Loss in nats of every token of the (B, T) targets, on the CPU."""
    rows, n = [], max(1, BATCH // min(x.size(1), SEGMENT))
    for xs, ys in zip(x.split(n), y.split(n)):
        cache, losses = model.new_cache(), []
        for a, b in zip(xs.to(device).split(SEGMENT, 1), ys.to(device).split(SEGMENT, 1)):
            logits = model(a, b, cache=cache)[0]
            losses.append(F.cross_entropy(logits.mT.float(), b, ignore_index=-1, reduction="none").cpu())
        rows.append(torch.cat(losses, 1))
    return torch.cat(rows)


def window_losses(model, x, y, length, device):
    """As token_losses, when each token sees only a window of `length` tokens. Windows overlap by half, and of each the
    tokens count that the one before it does not hold, so that they see half of the length to all of it."""
    losses = token_losses(model, x[:, :length], y[:, :length], device)
    while losses.size(1) < x.size(1):
        done = losses.size(1)
        end = min(done + math.ceil(length / 2), x.size(1))
        window = slice(end - length, end)
        losses = torch.cat((losses, token_losses(model, x[:, window], y[:, window], device)[:, done - end :]), 1)
    return losses


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, FileNotFoundError, ImportError, ConnectionError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
