"""
What one does with a trained model:

    python sample.py RUN ... [--key=value]            writes text; on a synthetic task, answers marked right or wrong
    python sample.py RUN ... --evaluate=val,sparse    loss and errors over whole splits
    python sample.py RUN ... --extrapolate=1,2,4,8    loss at these multiples of the trained length
    python sample.py RUN ... --figure=frequency       a picture of what the heads learned; or =positions, =gates
    python sample.py RUN ... --tasks=blimp,piqa       scores on tasks of the lm-evaluation-harness

RUN is a run directory, `out/quickstart_pope`. Options of the model can be changed at test time, per run:
`out/quickstart_rope@rope_scaling=yarn,rope_factor=8` or `out/quickstart_expe@expe_scale=0.5`. --help prints all keys.
"""
import csv
import difflib
import json
import math
import os
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.rnn import pad_sequence

import config
from data.shards import Split, locate, tokenizer
from model import GPT, PE, CoPE, GPTConfig, choose, heads
from train import error_sums, load_weights, model_config, pick_device, read_checkpoint, scores

BATCH = 8192  # tokens per forward pass
SEGMENT = 1024  # of them from one sequence; a longer one goes on from the cache, so that memory stays bounded


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
    extrapolate: str = ""  # multiples of the trained length, "1,2,4,8": evaluate there instead of writing text
    tasks: str = ""  # names or yaml files of lm-evaluation-harness tasks, "lambada_openai,blimp,cbt": score the model on them
    task_limit: int = 0  # tasks: only that many first questions of each; 0: all
    fewshot: int = 0  # tasks: solved examples before each question; 0: as many as the task's own file says
    eval_tokens: int = 131072  # extrapolate: tokens to evaluate on, the same ones at every length
    split: str = "val"  # of the data set: where to extrapolate, or from which to show rows
    data: str = ""  # a data set or folder of shards to evaluate on; empty: the one that the run was trained on
    figure: str = ""  # frequency | positions | gates: draw what the heads learned instead of writing text
    text: str = ""  # figure: a text file to draw it on; empty: the start of the split
    out: str = os.path.join("out", "extrapolation")  # writes <out>.csv, <out>.png; figure: <run>_<figure>.png beside them
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
        return extrapolate(cfg, models, device)
    if cfg.tasks:
        return score_tasks(cfg, models)
    for run, (model, checkpoint) in models.items():
        if cfg.figure:
            picture(cfg, run, model, checkpoint, device)
        elif cfg.evaluate:
            evaluate(cfg, run, model, checkpoint, device)
        elif checkpoint["meta"]["loss"] == "mask":
            write_rows(cfg, run, model, checkpoint, device)
        else:
            write_text(cfg, run, model, checkpoint["meta"], device)


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


def write_text(cfg, run, model, meta, device):
    text = tokenizer(meta)
    start = text.encode(cfg.prompt) or [meta["separator"] or 0]
    for i in range(cfg.num_samples):
        torch.manual_seed(cfg.seed + i)
        idx = torch.tensor([start], device=device)
        idx = model.generate(idx, cfg.max_new_tokens, cfg.temperature, cfg.top_k or None)[0].tolist()
        print(f"--- {run}, sample {i + 1}\n{text.decode(idx if cfg.prompt else idx[1:])}")


def write_rows(cfg, run, model, checkpoint, device):
    """Rows of a task in which only some tokens carry loss, with the model's answer in the place of each of them."""
    split, symbol = open_split(cfg, checkpoint, cfg.split), tokenizer(checkpoint["meta"]).decode
    x, y = (torch.from_numpy(a) for a in split.read(split.windows(split.row_length - 1, cfg.num_samples), split.row_length - 1))
    with torch.no_grad():
        answers = model(x.to(device), y.to(device))[0].argmax(-1).cpu()
    print(f"{run}, {cfg.split} split; the model's answers are [right] or [wrong, not right]")
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
        between = " " if isinstance(checkpoint["meta"]["tokenizer"], dict) else ""
        print(f"--- row {i + 1}, {right} of {total} right\n{between.join(words)}")


# ---------------------------------------------------------------------------------------------------
# whole splits


def open_split(cfg, checkpoint, name):
    split = Split(locate(cfg.data or checkpoint["config"]["data"]), name)
    theirs, ours = split.meta["tokenizer"], checkpoint["meta"]["tokenizer"]
    if theirs != ours:
        raise ValueError(f"{split.folder} holds tokens of {theirs!r}, the run was trained on {ours!r}; write it with the run's")
    return split


def evaluate(cfg, run, model, checkpoint, device):
    """A line per split: loss and perplexity and, where only some targets carry loss, their error and that of whole rows."""
    for split in [open_split(cfg, checkpoint, name) for name in cfg.evaluate.split(",")]:
        length = split.row_length - 1 if split.rows else checkpoint["config"]["block_size"]
        starts, n = split.windows(length), max(1, BATCH // length)
        parts = (split.read(starts[i : i + n], length) for i in range(0, len(starts), n))
        sums = error_sums(model, ([torch.from_numpy(a).to(device) for a in part] for part in parts))
        found = ", ".join(f"{k} {v:.4f}" for k, v in scores(sums, split.meta["loss"] == "mask").items())
        print(f"{run} {split.split}, {len(starts):,} windows of {length} tokens: {found}", flush=True)


# ---------------------------------------------------------------------------------------------------
# downstream tasks, by EleutherAI's lm-evaluation-harness


def score_tasks(cfg, models):
    """The harness's table of scores per run; the same goes to RUN/tasks.jsonl, a line of JSON each time."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError:
        raise ImportError("downstream tasks need one more package: pip install lm-eval") from None
    names = cfg.tasks.split(",")
    manager = TaskManager(include_path=os.path.join(os.path.dirname(os.path.abspath(config.__file__)), "tasks"))
    for name in names:
        if name not in manager.all_tasks and not os.path.isfile(name):
            near = difflib.get_close_matches(name, manager.all_tasks, 1)
            raise ValueError(f"tasks={name!r} is neither a task of the harness nor a yaml file; "
                             + (f"did you mean {near[0]!r}?" if near else "`lm-eval ls tasks` lists them"))
    for run, (model, checkpoint) in models.items():
        found = lm_eval.simple_evaluate(for_harness(model, checkpoint["meta"]), tasks=names, num_fewshot=cfg.fewshot or None,
                                        limit=cfg.task_limit or None, task_manager=manager, log_samples=False)
        print(f"{run}\n{make_table(found)}", flush=True)
        line = dict(run=run, task_limit=cfg.task_limit) | {key: found[key] for key in ("results", "versions", "n-shot")}
        with open(os.path.join(run.partition("@")[0], "tasks.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Score(tuple):
    """(log-likelihood, whether greedy decoding writes just that) of a continuation, and how many tokens it has: the pair
    is what the harness wants, `tokens` what config/tasks/cbt.py takes the mean by."""

    def __new__(cls, logp, greedy, tokens):
        score = super().__new__(cls, (logp, greedy))
        score.tokens = tokens
        return score


def for_harness(model, meta):
    """The model as an lm_eval.api.model.TemplateLM, which cuts texts into tokens and asks for their log-likelihoods.

    No more than block_size tokens are read at once (RUN@block_size=n: more than in training): of a longer context the
    last ones, as the harness's own adapters do it; a longer continuation is scored block_size targets at a time. Where
    there is no context, the separator is. Answers are greedy. Raises ValueError where the model's data set is no text.
    """
    from lm_eval.api.model import TemplateLM
    from tqdm import tqdm

    text, separator, longest, device = tokenizer(meta), meta["separator"], model.cfg.block_size, model.wte.weight.device
    if separator is None:
        raise ValueError("downstream tasks need a model of text, this one's data set has no separator between documents")

    class Model(TemplateLM):
        eot_token_id = separator

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            return text.encode(string)

        @torch.no_grad()
        def _loglikelihood_tokens(self, requests, disable_tqdm=False):
            windows, logps, greedy = [], [0.0] * len(requests), [True] * len(requests)
            for i, (_, context, targets) in enumerate(requests):
                tokens = (context or [separator]) + targets
                for begin in range(len(tokens) - len(targets), len(tokens), longest):
                    end = min(begin + longest, len(tokens))
                    windows.append((i, torch.tensor(tokens[max(0, end - longest - 1) : end]), end - begin))
            windows.sort(key=lambda window: -len(window[1]))  # so that little of a batch is padding
            bar = tqdm(total=len(windows), desc="log-likelihoods", disable=disable_tqdm)
            while windows:
                rows = max(1, BATCH // len(windows[0][1]))
                batch, windows = windows[:rows], windows[rows:]
                # padding goes to the right, where no token sees it, and -1 is no target
                x = pad_sequence([w[:-1] for _, w, _ in batch], True, 0).to(device)
                y = pad_sequence([F.pad(w[-n:], (len(w) - 1 - n, 0), value=-1) for _, w, n in batch], True, -1).to(device)
                logits = model(x, y)[0]
                losses = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=-1, reduction="none")
                losses, wrong = losses.view_as(y).cpu().double().sum(1), ((logits.argmax(-1) != y) & (y != -1)).any(1)
                for (i, _, _), loss, miss in zip(batch, losses.tolist(), wrong.tolist()):
                    logps[i] -= loss
                    greedy[i] &= not miss
                bar.update(len(batch))
            bar.close()
            return [Score(logp, all_right, len(r[2])) for logp, all_right, r in zip(logps, greedy, requests)]

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            texts = [(None, [separator], text.encode(request.args[0])) for request in requests]
            return [score[0] for score in self._loglikelihood_tokens(texts, disable_tqdm)]

        def generate_until(self, requests, disable_tqdm=False):
            answers = []
            for request in tqdm(requests, desc="answers", disable=disable_tqdm):
                prompt, options = request.args
                new, stops = options.get("max_gen_toks", 256), options.get("until") or []
                if new >= longest:
                    raise ValueError(f"max_gen_toks={new} leaves no room for a prompt within block_size={longest}; "
                                     "set fewer in the task's generation_kwargs")
                if options.get("do_sample"):
                    raise ValueError("do_sample=True in the task's generation_kwargs; only greedy answers are scored here")
                idx = (text.encode(prompt) or [separator])[new - longest :]
                tokens = model.generate(torch.tensor([idx], device=device), new, temperature=0)[0, len(idx) :].tolist()
                answer = text.decode(tokens[: tokens.index(separator)] if separator in tokens else tokens)
                for stop in [stops] if isinstance(stops, str) else stops:
                    answer = answer.partition(stop)[0]
                answers.append(answer)
            return answers

    return Model()


# ---------------------------------------------------------------------------------------------------
# extrapolation: trained short, tested long


def extrapolate(cfg, models, device):
    """A table of losses, runs by lengths, as CSV and as a picture."""
    words = cfg.extrapolate.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ValueError(f"extrapolate={cfg.extrapolate!r} is no list of multiples; write e.g. --extrapolate=1,2,4,8")
    multiples = sorted({int(word) for word in words})
    table, curves = [], {}
    width = max(map(len, models))
    texts = [spans(cfg, checkpoint, multiples[-1] * checkpoint["config"]["block_size"]) for _, checkpoint in models.values()]
    print(f"loss in nats (perplexity) at multiples of the trained length, {cfg.split} split\n{'':{width}}"
          + "".join(f"{f'{m}x':>17}" for m in multiples))
    for (run, (model, checkpoint)), (x, y) in zip(models.items(), texts):
        trained, cells = checkpoint["config"]["block_size"], []
        limit = min((pe.limit for pe in model.firsts.values() if pe.limit), default=math.inf)
        for m in multiples:
            length = m * trained
            table.append(dict(run=run, multiple=m, length=length, loss="", ppl=""))
            if length > limit:
                cells.append(f"ends at {limit}")
                continue
            whole = x.size(1) // length * length  # windows of this length tile each span
            losses = token_losses(model, x[:, :whole].reshape(-1, length), y[:, :whole].reshape(-1, length), device)
            loss = losses.mean().item()
            ppl = math.exp(min(loss, 700))
            cells.append(f"{loss:.4f} ({ppl:.2f})")
            table[-1] |= dict(loss=round(loss, 5), ppl=round(ppl, 4))
            curves[run] = losses.mean(0)  # by position, of the longest length that it can
        print(f"{run:{width}}" + "".join(f"{cell:>17}" for cell in cells), flush=True)
    os.makedirs(os.path.dirname(cfg.out) or ".", exist_ok=True)
    with open(cfg.out + ".csv", "w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    print(f"wrote {cfg.out}.csv")
    draw(cfg, table, curves)


def spans(cfg, checkpoint, length):
    """(x, y), each (n, length): stretches of the split, which windows of every length tile, but for a rest where a length
    does not divide the longest."""
    split = open_split(cfg, checkpoint, cfg.split)
    if split.rows:
        raise ValueError(f"{split.folder} holds rows of {split.row_length} tokens; extrapolation needs a stream of text")
    return [torch.from_numpy(a) for a in split.read(split.windows(length, max(1, cfg.eval_tokens // length)), length)]


@torch.no_grad()
def token_losses(model, x, y, device):
    """Loss in nats of every token of the (B, T) targets, on the CPU."""
    rows, n = [], max(1, BATCH // min(x.size(1), SEGMENT))
    for xs, ys in zip(x.split(n), y.split(n)):
        cache, losses = model.new_cache(), []
        for a, b in zip(xs.to(device).split(SEGMENT, 1), ys.to(device).split(SEGMENT, 1)):
            logits = model(a, b, cache=cache)[0]
            losses.append(F.cross_entropy(logits.transpose(1, 2).float(), b, ignore_index=-1, reduction="none").cpu())
        rows.append(torch.cat(losses, 1))
    return torch.cat(rows)


def draw(cfg, table, curves):
    """Loss against length, and against position within the longest length."""
    try:
        plt = pyplot()
    except ImportError as error:
        return print(error)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.5), sharey=True, layout="constrained")
    rows = {run: [row for row in table if row["run"] == run and row["loss"] != ""] for run in curves}
    for i, run in enumerate(sorted(curves, key=lambda run: -rows[run][-1]["loss"])):
        style = dict(color=f"C{i % 10}", linestyle=("-", "--", ":")[i // 10 % 3], linewidth=1.6)
        left.plot([row["length"] for row in rows[run]], [row["loss"] for row in rows[run]],
                  marker="o", markersize=4, label=label(run), **style)
        bin = max(1, rows[run][0]["length"] // 4)  # a mean over a quarter of the trained length, against the noise
        y = curves[run][: len(curves[run]) // bin * bin].view(-1, bin).mean(1)
        right.plot((torch.arange(len(y)) + 0.5) * bin, y, **style)
    lowest, highest = min(left.dataLim.ymin, right.dataLim.ymin), left.dataLim.ymax
    left.set_ylim(lowest - 0.05, min(highest, 1.7 * lowest) + 0.05)  # what explodes leaves the picture
    lengths = sorted({row["length"] for row in table})
    left.set_xscale("log", base=2)
    left.set_xticks(lengths, lengths)
    left.set(xlabel="tokens in the sequence (first: as trained)", ylabel=f"{cfg.split} loss, nats per token")
    right.set(xlabel="position in the longest sequence")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, title="worst to best")
    figure.savefig(cfg.out + ".png", dpi=120)
    print(f"wrote {cfg.out}.png")


def label(run):
    directory, at, options = run.partition("@")
    return os.path.basename(os.path.normpath(directory)) + at + options


def pyplot():
    """matplotlib.pyplot that draws into files. Raises ImportError without the library."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError("no picture without one more package: pip install matplotlib") from None
    plt.switch_backend("Agg")
    return plt


# ---------------------------------------------------------------------------------------------------
# pictures of what the heads learned

FIGURES = dict(frequency="magnitude of q and k at each frequency, mean over the text",
               positions="attention from position alone, the largest weight of each query set to 1",
               gates="gates, how much of each key a query counts")


def picture(cfg, run, model, checkpoint, device):
    """Draw <run>_<figure>.png on the first tokens of a text: 256, or what the model was trained on where that is less."""
    title = choose("figure", cfg.figure, FIGURES)
    code, n = tokenizer(checkpoint["meta"]), min(256, model.cfg.block_size)
    if cfg.text:
        try:
            with open(cfg.text, encoding="utf-8") as file:
                ids = code.encode(file.read())[:n]
        except (OSError, UnicodeDecodeError):
            raise ValueError(f"text={cfg.text!r} is no file of UTF-8 text; name one") from None
    else:
        split = open_split(cfg, checkpoint, cfg.split)
        ids = split.read([0], max(n, split.row_length - 1))[0][0, :n].tolist()
    if not ids:
        raise ValueError(f"text={cfg.text!r} is empty; name a file that holds some text")
    idx = torch.tensor([ids], device=device)
    if cfg.figure == "frequency":
        found = norms(model, idx)
        figure = draw_norms(pyplot(), found, model.cfg.base)
    else:
        found = maps(model, idx, cfg.figure)
        figure = draw_maps(pyplot(), found, lines([code.decode([i]) for i in ids]))
    figure.suptitle(f"{label(run)}: {title}")
    path = os.path.join(os.path.dirname(cfg.out), f"{label(run)}_{cfg.figure}.png")
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot().close(figure)
    print(f"wrote {path}")


def inside(model, idx):
    """Of each layer in a pass over idx (1, T): its PEs, their x (1, T, C), and q, k, v (1, H, T, d) before rotation."""
    found = {}
    with register_module_forward_hook(lambda module, args, out: found.update({module: out})):
        model(idx)
    for block in model.h:
        q, k, v = (heads(y, block.attn.H) for y in (*found[block.attn.c_qk].chunk(2, -1), found[block.attn.c_v]))
        yield block.attn.pes, found[block.ln_1], q, k, v


@torch.no_grad()
def norms(model, idx):
    """{layer: (2, H, n)}: for q and k, the 2-norm of the pair of numbers that turns at frequency c, mean over the tokens
    (PoPE Figures 3 to 6, whose mean is over the heads too). In PoPE that is the magnitude mu of component c."""
    found, pos = {}, torch.arange(idx.size(1), device=idx.device)
    for i, (pes, x, q, k, v) in enumerate(inside(model, idx)):
        for pe in pes:
            if type(pe).rotate is not PE.rotate:
                pairs = torch.stack(pe.rotate(q, k, x, pos, None)).unflatten(-1, (2, -1))  # (2, 1, H, T, 2, n)
                found[i] = pairs.norm(dim=-2).mean((1, 3)).cpu()
    if len({a.size(-1) for a in found.values()}) != 1:
        raise ValueError(f"figure='frequency' shows rope, carope or pope, but the run has pe={model.cfg.pe!r}")
    return found


@torch.no_grad()
def maps(model, idx, figure):
    """{layer: (H, T, T)}, zero in the future: CoPE's gates g_ij (CoPE Figure 7) or, from positions p_ij alone, the
    attention exp(z_i[p_ij]) over the largest in its row, as if q.k were the same for all keys (Figure 4)."""
    found = {}
    for i, (pes, x, q, k, v) in enumerate(inside(model, idx)):
        for pe in pes:
            if isinstance(pe, CoPE):
                keys = pe.gate_keys(x, v)
                g = ((q @ (k if keys is None else keys).mT).float() * pe.d**-0.5).sigmoid().tril()  # (1, H, T, T)
                z = pe.lookup(q)(g.flip(-1).cumsum(-1).flip(-1), slice(None))
                z = z.masked_fill(torch.ones_like(z).triu(1) > 0, -math.inf)
                found[i] = (g if figure == "gates" else (z - z.amax(-1, keepdim=True)).exp())[0].cpu()
    if not found:
        raise ValueError(f"figure={figure!r} shows cope, cope_mlp or cope_alibi, but the run has pe={model.cfg.pe!r}")
    return found


def lines(words):
    """[(first token, last token, text)] of each line of a text, which is given token by token."""
    found, first = [], 0
    for t, word in enumerate(words):
        if "\n" in word or t == len(words) - 1:
            found.append((first, t, "".join(words[first : t + 1])))
            first = t + 1
    return found


def draw_norms(plt, norms, base):
    """A heat map for q and one for k: a row per frequency, named by its period in training (CARoPE: at the start), a column
    per head."""
    L, (_, H, n) = len(norms), next(iter(norms.values())).shape
    figure, axes = plt.subplots(1, 2, figsize=(max(10, L * H / 12), 4.5), sharey=True, layout="constrained")
    for ax, name, columns in zip(axes, ("queries", "keys"), torch.cat(list(norms.values()), 1)):
        image = ax.imshow(columns.T.numpy(), cmap="viridis", vmin=0, aspect="auto", interpolation="nearest")
        figure.colorbar(image, ax=ax)
        ax.vlines([i * H - 0.5 for i in range(1, L)], -0.5, n - 0.5, color="white", linewidth=1)
        ax.set_xticks([(i + 0.5) * H - 0.5 for i in range(L)], [i + 1 for i in norms])
        ax.set(title=name, xlabel="layer, with a column per head")
    ticks = range(0, n, max(1, n // 8))
    axes[0].set_yticks(ticks, [f"{2 * math.pi * base ** (c / n):,.0f}" for c in ticks])
    axes[0].set_ylabel(f"period of frequency c, 2\u03c0 {base:g}$^{{c/{n}}}$ tokens")
    return figure


def draw_maps(plt, maps, lines):
    """A map of queries by keys for each layer and head."""
    L, (H, T, _) = len(maps), next(iter(maps.values())).shape
    side = max(1.3, min(2.4, 16 / H))  # inches
    figure, axes = plt.subplots(L, H, figsize=(side * H + 2, side * L + 1), squeeze=False, layout="constrained")
    colors = plt.get_cmap("Blues").resampled(16).with_extremes(bad="0.9")  # few, so that a value can be read off
    future = torch.ones(T, T).triu(1) > 0
    ends = [t for _, t, text in lines if "\n" in text]
    sizes = [20 if text.strip() and text.count("\n") == 1 else 80 for _, _, text in lines if "\n" in text]
    starts = {first: text.strip()[:14] for first, last, text in lines if text.strip() and last - first > T // 20}  # else no room
    for row, (i, layer) in zip(axes, maps.items()):
        for h, ax in enumerate(row):
            weights = layer[h].masked_fill(future, math.nan).numpy()
            image = ax.imshow(weights, colors, vmin=0, vmax=1, interpolation="nearest")
            ax.scatter(ends, ends, sizes, "crimson", marker="+", linewidths=1)
            ax.set_title(f"layer {i + 1}, head {h + 1}", fontsize=8)
            ax.set(xticks=[], yticks=[])
        row[0].set_yticks(list(starts), starts.values(), fontsize=7, parse_math=False)
    figure.supxlabel("key, from the first token to the last; + ends a line, a large + a blank line", fontsize=10)
    figure.supylabel("query, from the first token to the last; the letters begin a line", fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.5)
    return figure


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, FileNotFoundError, ImportError, ConnectionError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
