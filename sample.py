"""
Sample from, evaluate and inspect trained models:

    python sample.py RUN ... [--key=value]          text; on a task, answers marked right or wrong
    python sample.py RUN ... --evaluate=val,sparse  loss and errors over whole splits
    python sample.py RUN ... --extrapolate=1,2,4,8  loss at these multiples of the trained length
    python sample.py RUN ... --figure=frequency     learned attention patterns, training curves
    python sample.py RUN ... --tasks=blimp,piqa     scores on tasks of the lm-evaluation-harness
    python sample.py RUN ... --report=out/report    a table of all these numbers, over seeds

RUN is a run directory, such as out/quickstart_pope. RUN@key=value,key=value changes model options,
as in out/quickstart_rope@rope_scaling=yarn,rope_factor=8. Numbers are also appended to
RUN/results.jsonl. In Python: `model, checkpoint = sample.load("out/quickstart_pope")`.
"""
import difflib
import glob
import os
import re
import sys
from dataclasses import dataclass

import torch

import checkpoint
import config
from checkpoint import load_weights, model_config, pick_device
from data.shards import Split, locate
from data.text import tokenizer
from eval import figures, losses, results
from model import GPT, PES, GPTConfig, choose, refuse

torch.set_flush_denormal(True)  # numbers near 1e-40 slow CPUs down; threads inherit this setting

READS = {  # the keys that each action reads, besides its own and `device`
    "text": "prompt num_samples max_new_tokens temperature top_k seed",
    "answers": "num_samples split data",
    "evaluate": "data out",
    "extrapolate": "eval_tokens split data out",
    "tasks": "task_limit fewshot",
    "report": "",
    "frequency": "figure text split data out",
    "distance": "figure text split data out",
    "gates": "figure text split data out heads",
    "positions": "figure text split data out heads",
    "curves": "figure keys against out",
}
PATHS = dict(evaluate="out/evaluation", extrapolate="out/extrapolation", curves="out/curves")
ACTIONS = "evaluate", "extrapolate", "figure", "tasks", "report"  # one at a time
SHAPES = "vocab_size n_layer n_head n_embd bias norm mlp mlp_width tie"  # fixed by the weights

@dataclass
class SampleConfig:
    """Keys of sample.py, after the run directories."""
    prompt: str = ""  # text to continue; empty: a new document
    num_samples: int = 2  # texts or rows per run
    max_new_tokens: int = 300  # length of each
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 0  # sample from the k likeliest tokens; 0: from all
    seed: int = 1337  # of the samples
    evaluate: str = ""  # comma-separated splits of the data set: evaluate each in full
    extrapolate: str = ""  # multiples of the trained length, "0.5,1,2,4": evaluate there
    tasks: str = ""  # score the model on these lm-evaluation-harness tasks: names or yaml files
    task_limit: int = 0  # tasks: how many questions of each; 0: all
    fewshot: int = 0  # tasks: solved examples before each question; 0: as the task's own file says
    eval_tokens: int = losses.TOKENS  # extrapolate: tokens to read, the same at every multiple
    split: str = "val"  # the split to extrapolate on, draw figures on, or show rows of
    data: str = ""  # a data set or folder of shards to evaluate on; empty: the run's own
    figure: str = ""  # frequency | positions | gates | distance | curves: draw it
    text: str = ""  # figure: comma-separated text files to draw it on; empty: the split
    heads: str = ""  # positions, gates: only these, "4.3,1.2": layer 4, head 3, ...; empty: all
    keys: str = "loss,val/loss"  # curves: keys of log.jsonl; those of a split are SPLIT/KEY
    against: str = "step"  # curves: step | tokens
    report: str = ""  # write <report>.csv, and <report>.png of the curves over length
    out: str = ""  # write <out>.csv, <out>.png; empty: out/evaluation, out/extrapolation, ...
    device: str = "auto"  # auto | cpu | cuda | mps

def main(argv):
    names = [os.path.normpath(word) for word in argv if not word.startswith("--")]
    flags = [word for word in argv if word.startswith("--")]
    keys = {word[2:].partition("=")[0] for word in flags}
    cfg = config.load(SampleConfig, flags)
    refuse(not names, "no run directory given; e.g. python sample.py out/quickstart_pope")
    refuse(cfg.temperature < 0, f"temperature={cfg.temperature} is negative; use 0 or more")
    choose("against", cfg.against, ("step", "tokens"))
    asked = [action for action in ACTIONS if action in keys]
    refuse(asked[1:], f"{' and '.join(f'--{key}' for key in asked)} exclude each other; keep one")
    action = asked[0] if asked else ""
    if action == "figure":
        action = choose("figure", cfg.figure, (*figures.FIGURES, "curves"))
    if action:
        refuse_unread(keys, [action])
    refuse(cfg.text and keys & {"split", "data"},
           f"text={cfg.text!r} takes the place of --split and --data; leave them out")
    for name in names:
        check_exists(name.partition("@")[0])
    path = re.sub(r"\.(csv|png)$", "", cfg.report or cfg.out or PATHS.get(action, "out/figure"))
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    if action == "report":
        return figures.draw_by_length(results.report(names, path), path)
    if action == "curves":
        rows = results.training(names)
        return figures.draw_training(rows, cfg.keys.split(","), cfg.against, path)
    runs = [Run(name, cfg) for name in dict.fromkeys(names)]  # load them all before any work
    if action == "evaluate":
        losses.write(runs, losses.evaluate(runs, cfg.evaluate.split(",")), path)
    elif action == "extrapolate":
        rows = losses.extrapolate(runs, cfg.extrapolate, cfg.split, cfg.eval_tokens)
        losses.write(runs, rows, path)
    elif action == "tasks":
        from eval import harness

        harness.score_tasks(runs, cfg.tasks.split(","), cfg.task_limit, cfg.fewshot)
    elif action:
        refuse(cfg.out and runs[1:],
               f"out={cfg.out!r} names one picture, and there are {len(runs)} runs")
        for run in runs:
            name = f"{os.path.basename(run.name)}_{cfg.figure}"
            figures.draw_heads(run, cfg, path if cfg.out else os.path.join("out", name))
    else:
        kinds = ["answers" if run.meta["loss"] == "mask" else "text" for run in runs]
        refuse_unread(keys, kinds)
        for run, kind in zip(runs, kinds):
            write_rows(cfg, run) if kind == "answers" else write_text(cfg, run)

def refuse_unread(keys, actions):
    """Raises ValueError for a key that none of the actions reads."""
    read = {"device", *actions}.union(*(READS[action].split() for action in actions))
    for key in sorted(keys - read):
        raise ValueError(f"--{key} does nothing for {' and '.join(actions)}; leave it out")

def check_exists(folder):
    """Raises ValueError if a run directory is missing. Names the existing ones, nearest first."""
    beside = glob.escape(os.path.dirname(folder) or "out")
    runs = [os.path.dirname(path) for path in glob.glob(os.path.join(beside, "*", "ckpt.pt"))]
    near = ", ".join(difflib.get_close_matches(folder, runs, 5, 0)) or "none"
    refuse(not os.path.exists(folder), f"run directory {folder!r} does not exist; the nearest: "
           f"{near}; train one with `python train.py config/quickstart.py`")

def load(run, device="auto"):
    """(model, checkpoint) of a run directory, or of "directory@key=value,key=value". The checkpoint
    is a dict of config, meta (the data set's) and step."""
    (folder, _, options), device = run.partition("@"), pick_device(device)
    saved, changes = checkpoint.read(folder, device), {}
    for option in filter(None, options.split(",")):
        key, _, text = option.partition("=")
        changes[key] = config.typed(GPTConfig, key, text, run)
        refuse(key in SHAPES.split(), f"{key} in {run} is fixed by the weights; leave it out")
    for name in changes.get("pe", "").split("+"):
        if name and name not in PES:
            near = difflib.get_close_matches(name, PES, 1, 0)[0]
            raise ValueError(f"pe={name!r} in {run} is unknown; did you mean {near!r}?")
    model = GPT(model_config(saved, **changes)).to(device).eval()
    load_weights(model, saved, folder)
    return model, {key: saved[key] for key in ("config", "meta", "step")}

class Run:
    """A trained model, and what it is evaluated on."""
    def __init__(self, name, cfg):
        self.name, self.folder = name, name.partition("@")[0]
        self.model, checkpoint = load(name, cfg.device)
        self.config, self.meta, self.step = checkpoint.values()
        self.pe, self.limit = self.model.cfg.pe, self.model.limit
        self.data, self.device = cfg.data or self.config["data"], self.model.wte.weight.device
        row = self.meta["row_length"].get("train")
        self.trained = row - 1 if row else self.config["block_size"]  # tokens per sequence

    def split(self, name):
        split = Split(locate(self.data), name)
        theirs, ours = split.meta["tokenizer"], self.meta["tokenizer"]
        refuse(theirs != ours, f"{split.folder} holds tokens of {theirs!r}, the run was trained on "
               f"{ours!r}; write it with the run's")
        return split

    def length(self, split):
        """Tokens per sequence of the split: a row's, or in a stream as many as in training."""
        return split.row_length - 1 if split.rows else self.trained

    def read(self, split, starts, length):
        """x and y, each (n, T)."""
        return [torch.from_numpy(part).to(self.device) for part in split.read(starts, length)]

def write_text(cfg, run):
    text = tokenizer(run.meta)
    start = text.encode(cfg.prompt) or [run.meta["separator"] or 0]
    fit = max(1, run.limit + 1 - len(start))  # the last new token is never fed back
    end = f", which ends at {run.limit} tokens" if fit < cfg.max_new_tokens else ""
    for i in range(cfg.num_samples):
        torch.manual_seed(cfg.seed + i)
        idx = torch.tensor([start], device=run.device)
        new = min(cfg.max_new_tokens, fit)
        tokens = run.model.generate(idx, new, cfg.temperature, cfg.top_k or None)[0].tolist()
        print(f"--- {run.name}, sample {i + 1}{end}")
        print(text.decode(tokens if cfg.prompt else tokens[1:]))

@torch.no_grad()
def write_rows(cfg, run):
    """Prints rows of a masked task, with the model's answers where tokens carry loss."""
    split, symbol = run.split(cfg.split), tokenizer(run.meta).decode
    length = run.length(split)
    x, y = run.read(split, split.windows(length, cfg.num_samples), length)
    answers = run.model(x, y)[0].argmax(-1)
    print(f"{run.name}, {split.split} split; the model's answers are [right] or [wrong, not right]")
    between = " " if isinstance(run.meta["tokenizer"], dict) else ""
    for i, (tokens, targets, said) in enumerate(zip(x.tolist(), y.tolist(), answers.tolist())):
        asked = [t for t in range(length) if targets[t] != -1]
        words = [symbol([token]) for token in tokens + targets[-1:] if token != -1]
        for t in asked:
            right, answer = words[t + 1], symbol([said[t]])
            words[t + 1] = f"[{answer}]" if said[t] == targets[t] else f"[{answer}, not {right}]"
        end = max(asked, default=length) + 2  # what follows is padding
        score = sum(said[t] == targets[t] for t in asked)
        print(f"--- row {i + 1}, {score} of {len(asked)} right\n{between.join(words[:end])}")

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("\nstopped; results.jsonl has what was measured so far")
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        if type(error) is RuntimeError and "memory" not in str(error):
            raise  # a bug
        install = f"; pip install {error.name}" if isinstance(error, ImportError) else ""
        sys.exit(f"{type(error).__name__}: {error}".partition("\n")[0] + install)
