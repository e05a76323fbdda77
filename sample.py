"""
Sample from, evaluate and inspect trained models:

    python sample.py RUN ... [--key=value]          text; on a task, answers marked right or wrong
    python sample.py RUN ... --evaluate=val,sparse  loss and errors over whole splits
    python sample.py RUN ... --extrapolate=1,2,4,8  loss at these multiples of the trained length
    python sample.py RUN ... --figure=frequency     pictures of attention, training or long contexts
    python sample.py RUN ... --tasks=blimp,piqa     scores on tasks of the lm-evaluation-harness
    python sample.py RUN ... --report=out/report    tables of all these numbers, over seeds

RUN is a run directory, such as out/quickstart_pope. RUN@key=value,key=value changes model options,
as in out/quickstart_rope@rope_scaling=yarn,rope_factor=8. Losses, errors and scores are also
appended to RUN/results.jsonl, from which --report makes its tables, a CSV file and a picture.
Runs that differ only in their seed share a row and a curve, if their names differ only in _seedN
at the end. Models always compute in float32.
"""
import os
import re
import sys
import time
from collections import namedtuple
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal

import torch

import checkpoint
import config
from data import locate
from data.shards import Split
from data.tokenizer import identity, tokenizer
from eval import figures, losses, results
from model import GPT, PES, GPTConfig, check_choices, choose

torch.set_flush_denormal(True)  # numbers near 1e-40 slow CPUs down; threads inherit this setting

@dataclass
class SampleConfig:
    """Keys of sample.py, after the run directories."""
    prompt: str = ""  # text to continue; empty: a new document
    num_samples: int = 2  # texts or rows per run
    max_new_tokens: int = 300  # length of each text
    temperature: config.AtLeast0 = 0.8  # 0: always the most probable token
    top_k: int = 0  # sample from the k most probable tokens only; 0: from all
    seed: int = 1337  # of the samples
    evaluate: str = ""  # comma-separated splits of the data set; each is evaluated as a whole
    extrapolate: str = ""  # lengths to evaluate at, as multiples of the trained one: "0.5,1,2,4"
    tasks: str = ""  # comma-separated lm-evaluation-harness tasks to score: names or yaml files
    fewshot: int = 0  # tasks: solved examples before each question; 0: as the task's own file says
    eval_tokens: config.AtLeast1 = losses.TOKENS  # extrapolate, loss_by_position: tokens to read
    split: str = ""  # the split to read; empty: val, but for answers the first of eval_splits
    data: str = ""  # a data set or folder of shards to evaluate on; empty: the run's own
    figure: str = ""  # frequency | rotation | gates | positions | loss_by_position | curves
    text: str = ""  # figures of attention: comma-separated text files to show; empty: the split
    heads: str = ""  # gates, positions: heads to show, "4.3,1.2" (layer 4, head 3, ...); empty: all
    report: str = ""  # write <report>.csv, and <report>.png of the curves over length
    out: str = ""  # figure: write <out>.png; empty: in the run's folder, or out/ if runs share it
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: the fastest available

def main(argv):
    flags = [word for word in argv if word.startswith("--") or word == "-h"]
    cfg = config.load(SampleConfig, flags)
    check_choices(cfg)
    given = {flag[2:].partition("=")[0] for flag in flags}
    names = run_names(word for word in argv if word not in flags)
    action = chosen_action(cfg, given)
    if action not in ("report", "curves", "tasks", *figures.FIGURES):
        for name in names:
            if "block_size=" in results.split_options(name)[1]:
                raise ValueError(f"block_size in {name} acts only on --tasks and figures of "
                                 "attention; leave it out, and for longer texts use --extrapolate")
    if action in ("report", "curves"):  # these read what was saved in the run directories
        runs = list(dict.fromkeys(results.split_options(name)[0] for name in names))
    else:
        runs = [Run(name, cfg.data, cfg.device) for name in names]  # all of them, before any work
    if not action:
        actions = {"answers" if run.meta["loss"] == "mask" else "text" for run in runs}
        if len(actions) > 1:
            raise ValueError("some of these runs are of text and some of tasks; name one kind only")
        action, = actions
    for key in sorted(given - set(ACTIONS[action].keys)):
        raise ValueError(f"--{key} does nothing for {action}; leave it out")
    if cfg.text and given & {"split", "data"}:
        raise ValueError(f"text={cfg.text!r} takes the place of --split and --data; leave them out")
    ACTIONS[action].function(cfg, runs)

# --- the actions: each is a function of the config and the runs, or their folders -----------------

def write_text(cfg, runs):
    for run in runs:
        codec = tokenizer(run.meta)
        start = codec.encode(cfg.prompt) or [run.meta["separator"] or 0]
        fit = run.model.limit + 1 - len(start)  # the model never reads the last new token
        new = min(cfg.max_new_tokens, max(1, fit))
        end = f", which ends at {run.model.limit} tokens" if new < cfg.max_new_tokens else ""
        for i in range(cfg.num_samples):
            torch.manual_seed(cfg.seed + i)
            idx = torch.tensor([start], device=run.device)
            tokens = run.model.generate(idx, new, cfg.temperature, cfg.top_k)[0].tolist()
            if not cfg.prompt:
                tokens = tokens[1:]  # the separator is not part of the text
            print(f"--- {run.name}, sample {i + 1}{end}")
            print(codec.decode(tokens))

@torch.no_grad()
def write_answers(cfg, runs):
    for run in runs:
        split = run.split(cfg.split or run.config["eval_splits"].partition(",")[0])
        length = run.length(split)
        decode = tokenizer(run.meta).decode
        between = " " if isinstance(run.meta["tokenizer"], dict) else ""
        x, y = run.read(split, split.windows(length, cfg.num_samples), length)
        predicted = run.model(x, y)[0].argmax(-1)
        print(f"{run.name}, {split.split} split; the model's answers are [right] or "
              "[wrong, not right]")
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

def evaluate(cfg, runs):
    show_and_save(runs, losses.evaluate(runs, cfg.evaluate.split(",")))

def extrapolate(cfg, runs):
    number = r"\d*\.?\d+"
    if not re.fullmatch(f"{number}(,{number})*", cfg.extrapolate):
        raise ValueError(f"extrapolate={cfg.extrapolate!r} is not a list of positive numbers; give "
                         "multiples of the trained length, as in --extrapolate=1,2,4,8")
    multiples = sorted({float(word) for word in cfg.extrapolate.split(",")})
    show_and_save(runs, losses.extrapolate(runs, multiples, cfg.split or "val", cfg.eval_tokens))

def show_and_save(runs, measured):
    """Saves each row as soon as it is measured. Prints the rows of a run together, since they share
    a line, even if they could not be saved."""
    width = max(24, max(len(run.name) for run in runs))
    head = []
    for run, pairs in groupby(measured, itemgetter(0)):
        rows = []
        try:
            for _, row in pairs:
                rows.append(row)
                results.append(run, row)
        finally:
            head = losses.print_rows(run, rows, width, head)

def score_tasks(cfg, runs):
    from eval import harness  # needs lm-eval, which the other actions do without

    harness.score_tasks(runs, cfg.tasks.split(","), cfg.fewshot)

def report(cfg, folders):
    path = writable(cfg.report)
    lines = results.latest(folders)
    results.print_tables(lines)
    results.write_csv(path, lines)
    figures.draw_by_length(lines, path)

def draw_training(cfg, folders):
    rows = results.training(folders)
    figures.draw_training(rows, writable(cfg.out or os.path.join("out", "curves")))

def draw_loss_by_position(cfg, runs):
    path = writable(cfg.out or os.path.join("out", "loss_by_position"))
    rows = losses.by_position(runs, cfg.split or "val", cfg.eval_tokens)
    results.write_csv(path, rows)
    figures.draw_by_position(rows, path)

def draw_attention(cfg, runs):
    if cfg.out and len(runs) > 1:
        raise ValueError(f"out={cfg.out!r} names one picture, and there are {len(runs)} runs")
    for run in runs:
        options = run.name.removeprefix(run.folder)  # such as "@block_size=48"
        path = writable(cfg.out or os.path.join(run.folder, cfg.figure + options))
        idx = figures.tokens_to_show(run, cfg.figure, cfg.text, cfg.split or "val")
        layers = figures.measure(run.model, idx, cfg.figure)
        figures.draw_attention(run, cfg.figure, layers, idx[0], cfg.heads, path)

Action = namedtuple("Action", "function keys")  # all keys that are not listed are refused
SAMPLING = ("prompt", "num_samples", "max_new_tokens", "temperature", "top_k", "seed", "device")
ATTENTION = ("figure", "text", "split", "data", "out", "device")
ACTIONS = {
    # without a flag that names an action, the kind of the run decides
    "text": Action(write_text, SAMPLING),
    "answers": Action(write_answers, ("num_samples", "split", "data", "device")),
    # chosen by the flag of this name
    "evaluate": Action(evaluate, ("evaluate", "data", "device")),
    "extrapolate": Action(extrapolate, ("extrapolate", "eval_tokens", "split", "data", "device")),
    "tasks": Action(score_tasks, ("tasks", "fewshot", "device")),
    "report": Action(report, ("report",)),
    # chosen by --figure
    "frequency": Action(draw_attention, ATTENTION),
    "rotation": Action(draw_attention, ATTENTION),
    "gates": Action(draw_attention, (*ATTENTION, "heads")),
    "positions": Action(draw_attention, (*ATTENTION, "heads")),
    "loss_by_position": Action(
        draw_loss_by_position, ("figure", "eval_tokens", "split", "data", "out", "device")),
    "curves": Action(draw_training, ("figure", "out")),
}
FLAGS = ("evaluate", "extrapolate", "figure", "tasks", "report")  # at most one at a time

# --- the command line -----------------------------------------------------------------------------

def chosen_action(cfg, given):
    """Returns the name of the action that a flag asks for, or "" if there is no such flag."""
    asked = [flag for flag in FLAGS if flag in given]
    if not asked:
        return ""
    flag, *others = asked
    if others:
        raise ValueError(f"--{flag} and --{others[0]} exclude each other; keep one")
    if not getattr(cfg, flag):
        raise ValueError(f"--{flag}= is empty; see --help for what it takes")
    if flag == "figure":
        names = [name for name in ACTIONS if "figure" in ACTIONS[name].keys]
        return choose("figure", cfg.figure, names)
    return flag

def run_names(words):
    """Returns the names of the runs, each only once, even if several paths lead to it. Files are
    left out, and a line on stderr says so, because a pattern such as out/* also finds tables and
    pictures. Raises ValueError if no run is left."""
    names = {}  # (where it really is, options) -> the name to show
    for word in words:
        folder, options = results.split_options(word)
        folder = os.path.normpath(folder)
        if os.path.isfile(folder):
            print(f"left out {folder}, which is not a run directory", file=sys.stderr)
        else:
            name = f"{folder}@{options}" if options else folder
            names.setdefault((os.path.realpath(folder), options), name)
    if not names:
        raise ValueError("no run directory given; e.g. python sample.py out/quickstart_pope")
    return list(names.values())

def writable(path):
    """Returns the path without .png or .csv, which will be added, after making its folder. This
    comes before any work that could otherwise be lost."""
    path = path.removesuffix(".png").removesuffix(".csv")
    if not os.path.basename(path):
        raise ValueError(f"{path!r} is a folder; name a file in it, as in {path}report")
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    return path

# --- trained models -------------------------------------------------------------------------------

class Run:
    """A trained model and the data set to evaluate it on, which is the run's own by default. name
    is a run directory, or "directory@key=value,...", which changes options of the model."""
    def __init__(self, name, data="", device="auto"):
        self.name = name
        self.folder, self.options = results.split_options(name)
        self.device = checkpoint.pick_device(device)
        saved = checkpoint.read(self.folder)
        self.config = saved["config"]
        self.meta = saved["meta"]
        self.step = saved["step"]
        self.weights = saved["checksum"]
        self.folder_stat = os.stat(self.folder)
        self.read_at = time.time()
        self.data = data or self.config["data"]
        self.reads_its_own = locate(self.data).resolve() == locate(self.config["data"]).resolve()
        self.experiment = checkpoint.experiment(saved["history"], saved["step"])
        self.trained = checkpoint.trained_length(saved)
        self.model = load_model(saved, self.folder, self.options).to(self.device).eval()

    def split(self, name):
        """Opens a split of the data set. Raises ValueError if its tokenizer is not the run's, or if
        the run's own data set has changed, because val may now hold what the run trained on."""
        split = Split(locate(self.data), name)
        if identity(split.meta["tokenizer"]) != identity(self.meta["tokenizer"]):
            raise ValueError(f"{split.folder} was tokenized with {split.meta['tokenizer']!r}, but "
                             f"the run was trained with {self.meta['tokenizer']!r}; prepare the "
                             "data again with the run's tokenizer")
        changed = split.changes(self.meta)
        if changed and self.reads_its_own:
            raise ValueError(f"{split.folder} has changed since {self.name} was trained on it, in "
                             f"{', '.join(changed)}; to evaluate on it, rename it and use --data")
        return split

    def length(self, split):
        """Returns the number of tokens per sequence of the split, which is the same as in training
        unless the split has rows of its own length."""
        return split.row_length - 1 if split.rows else self.trained

    def read(self, split, starts, length):
        """Returns x and y, each (n, length), on the model's device."""
        return [torch.from_numpy(part).to(self.device) for part in split.read(starts, length)]

def load_model(saved, folder, options):
    """Returns the model of the checkpoint that was read from the folder, with the options
    "key=value,key=value". Raises ValueError for options that the weights do not allow, or that
    belong to methods that the run lacks. Sampling and evaluation never use the Triton kernels. CoPE
    is therefore evaluated with exact gates, even if it was trained with the kernel, which rounds
    them to multiples of 1/2048."""
    given = {}
    for option in filter(None, options.split(",")):
        key, _, text = option.partition("=")
        given[key] = config.typed(GPTConfig, key, text, option)
    cfg = checkpoint.model_config(saved, **given)
    checkpoint.keep_trained_length(cfg, saved)
    model = GPT(cfg)
    for key in given:
        method = key.partition("_")[0]  # options begin with the name of the method that reads them
        if method in PES and not any(isinstance(part, PES[method]) for part in model.modules()):
            raise ValueError(f"{key} in {folder}@{options} does nothing, because "
                             f"pe={model.cfg.pe!r} has no {method}; leave it out")
    checkpoint.load_weights(model, saved, folder)
    return model

if __name__ == "__main__":
    if sys.stdout:  # it may be closed, and Windows may not be able to print every character
        sys.stdout.reconfigure(errors="replace")
    try:
        main(sys.argv[1:])
    except (ValueError, ImportError, OSError, MemoryError, RuntimeError) as error:
        sys.exit(config.last_line(error))
    except KeyboardInterrupt:
        config.end_by_ctrl_c("stopped; what was measured before is saved")
