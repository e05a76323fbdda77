"""
Train a GPT on one device, or on many under torchrun:

    python train.py config/quickstart.py [--key=value ...]         --help prints every key
    torchrun --standalone --nproc_per_node=8 train.py config/...   the same batches, shared out

What a step sees is a function of (seed, step) alone: a resumed run, or one on another number of processes, trains
on the same tokens. SIGTERM or Ctrl-C writes a checkpoint and ends, a second Ctrl-C only ends; --resume=True goes on
from the last checkpoint.
"""
import dataclasses
import importlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

import config
from data.shards import Split, command_for, locate, options
from model import GPT, GPTConfig, choose

HERE = os.path.dirname(os.path.abspath(__file__))
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "RTX 4090": 165e12}  # dense bf16, data sheets


@dataclass
class TrainConfig(GPTConfig):
    """Keys of train.py: those of the model (GPTConfig), then those of the run."""

    vocab_size: int = 0  # number of token ids; 0: the data set's own
    config: str = ""  # path of the config file (set by naming one)
    data: str = "stdlib"  # a data set prepared by data/NAME.py, or the path of a folder of shards
    out_dir: str = ""  # run directory; empty: out/<config>_<pe>, with _seed<n> for another seed
    resume: bool = False  # go on from the run directory's checkpoint, if there is one
    init_from: str = ""  # fine-tuning: run directory that gives weights and, where not set here, the model's options
    seed: int = 1337  # of weights, batches and dropout
    batch_size: int = 16  # sequences per step, over all processes and micro-batches
    micro_batch: int = 0  # sequences per forward pass; 0: all of a process's share at once
    max_iters: int = 1000  # training steps
    learning_rate: float = 1e-3  # after warm-up
    min_lr: float = 0.0  # at the last step
    schedule: str = "cosine"  # cosine | linear | constant, from learning_rate to min_lr
    warmup_iters: int = 0  # steps of linear warm-up
    weight_decay: float = 0.1  # on the weights of linear and embedding layers
    beta1: float = 0.9  # AdamW: decay of the mean gradient
    beta2: float = 0.95  # AdamW: decay of the mean squared gradient
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    eval_interval: int = 500  # steps between evaluations
    eval_batches: int = 64  # batches of batch_size sequences per split; 0: the whole split
    eval_splits: str = "val"  # splits to evaluate, joined by commas
    checkpoint_interval: int = 0  # steps between checkpoints; 0: eval_interval
    log_interval: int = 10  # steps between log lines
    device: str = "auto"  # auto | cpu | cuda | mps
    dtype: str = "auto"  # auto: bfloat16 autocast where the GPU has it | float32 | bfloat16
    compile: bool = False  # torch.compile: slow to start, fast steps
    wandb_project: str = ""  # also log to this Weights & Biases project


def main(argv):
    cfg = config.load(TrainConfig, argv)
    if cfg.init_from:
        origin = read_checkpoint(cfg.init_from)
        cfg = config.load(TrainConfig, argv, **dataclasses.asdict(model_config(origin)))
    choose("schedule", cfg.schedule, ("cosine", "linear", "constant"))
    choose("dtype", cfg.dtype, ("auto", "float32", "bfloat16"))
    for key in ("block_size", "n_layer", "n_head", "n_embd", "batch_size", "eval_interval", "log_interval"):
        if getattr(cfg, key) < 1:
            raise ValueError(f"{key}={getattr(cfg, key)} is too small; use 1 or more")
    for key in ("learning_rate", "min_lr", "weight_decay", "grad_clip"):
        if getattr(cfg, key) < 0:
            raise ValueError(f"{key}={getattr(cfg, key)} is negative; use 0 or more")
    if not 0 <= cfg.dropout < 1:
        raise ValueError(f"dropout={cfg.dropout} is no probability below 1; use 0 to 0.9")
    rank, world, device = start_processes(cfg)
    stem = os.path.splitext(os.path.basename(cfg.config))[0] or "train"
    seed = f"_seed{cfg.seed}" if cfg.seed != TrainConfig.seed else ""
    cfg.out_dir = cfg.out_dir or os.path.join("out", f"{stem}_{cfg.pe}{seed}")
    path = os.path.join(cfg.out_dir, "ckpt.pt")
    if os.path.exists(path) and not cfg.resume:
        raise ValueError(f"{cfg.out_dir} already holds a run; go on with it by --resume=True, or keep it and write "
                         "elsewhere by --out_dir=...")

    # data
    folder = locate(cfg.data)
    if rank == 0:
        prepare(cfg.data, folder)
    if world > 1:
        dist.barrier()
    train = Split(folder, "train")
    evals = {name: Split(folder, name) for name in cfg.eval_splits.split(",")}
    cfg.vocab_size = cfg.vocab_size or train.vocab_size
    if cfg.vocab_size < train.vocab_size:
        raise ValueError(f"vocab_size={cfg.vocab_size} is smaller than that of {folder}, {train.vocab_size}; "
                         "use vocab_size=0 for the data set's own")

    # model and optimizer
    torch.manual_seed(cfg.seed)
    torch.set_float32_matmul_precision("high")
    raw = GPT(GPTConfig(**{f.name: getattr(cfg, f.name) for f in dataclasses.fields(GPTConfig)})).to(device)
    optimizer = raw.configure_optimizers(cfg.weight_decay, cfg.learning_rate, (cfg.beta1, cfg.beta2), device.type)
    step = saved = 0
    if cfg.resume and os.path.exists(path):
        checkpoint = read_checkpoint(cfg.out_dir, device)
        theirs, ours = dataclasses.asdict(model_config(checkpoint)), dataclasses.asdict(raw.cfg)
        for key in ours:
            if ours[key] != theirs[key]:
                raise ValueError(f"{path} was trained with {key}={theirs[key]!r}, this run has {ours[key]!r}; "
                                 "resume with the same model, or write elsewhere by --out_dir=...")
        load_weights(raw, checkpoint, cfg.out_dir)
        optimizer.load_state_dict(checkpoint["optimizer"])
        step = saved = checkpoint["step"]
        if step > cfg.max_iters:
            raise ValueError(f"{path} is at step {step}, beyond max_iters={cfg.max_iters}; give more --max_iters")
    elif cfg.init_from:
        load_weights(raw, origin, cfg.init_from)
    if world > 1:
        steps = [None] * world
        dist.all_gather_object(steps, step)
        if len(set(steps)) > 1:
            raise ValueError(f"the processes found checkpoints of steps {sorted(set(steps))}; "
                             f"put out_dir={cfg.out_dir!r} on storage that all machines share")
    dtype = torch.bfloat16 if bf16(cfg, device) else torch.float32
    attention = raw.use_kernels(dtype)
    net = torch.compile(raw) if cfg.compile else raw
    model = torch.nn.parallel.DistributedDataParallel(net) if world > 1 else net
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)

    log = Log(cfg, device) if rank == 0 else None
    if log:
        log.say(f"{raw.get_num_params() / 1e6:.2f}M parameters, pe={cfg.pe}, {world} x {device.type}, "
                f"{str(dtype)[6:]}, {cfg.out_dir}" + (f", from step {step}" if step else "") + f"\n{attention}")
        if cfg.resume and not step:
            log.say(f"no checkpoint in {cfg.out_dir} yet: from the start")

    def save():
        if log:
            content = dict(model=raw.state_dict(), optimizer=optimizer.state_dict(), step=step,
                           config=dataclasses.asdict(cfg), meta={k: v for k, v in train.meta.items() if k != "shards"})
            torch.save(content, path + ".tmp")
            os.replace(path + ".tmp", path)  # a kill at any moment leaves the old file or the new one

    def batch(step):
        """This process's share of the step's batch, in micro-batches of (x, y), on the device."""
        n = cfg.micro_batch or cfg.batch_size // world
        x, y = (to(device, a) for a in train.batch(step, cfg.batch_size, cfg.block_size, cfg.seed, rank, world))
        return list(zip(x.split(n), y.split(n)))

    stop = [False]  # set by a signal, heeded after the step

    def heed(*_):
        stop[0] = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # SIGTERM may come twice at once, from a scheduler and from torchrun

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, heed)
    stopping, micro_batches, began, result = False, batch(step), time.perf_counter(), {}
    while True:
        if step % cfg.eval_interval == 0 or step == cfg.max_iters:
            for name, split in evals.items():
                result[name] = evaluate(net, split, cfg, rank, world, device, autocast)
                if log:
                    log.write(dict(step=step, split=name, **result[name]))
                    log.say(f"step {step}: {name} " + ", ".join(f"{k} {v:.4f}" for k, v in result[name].items()))
            began = time.perf_counter()
        last = stopping or step == cfg.max_iters
        if last or step > saved and step % (cfg.checkpoint_interval or cfg.eval_interval) == 0:
            save()
            saved = step
        if last:
            break

        lr = learning_rate(step, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr
        torch.manual_seed(cfg.seed + step * world + rank)  # dropout: a function of the step, so that resuming is exact
        # every target of the global batch weighs the same, however many each micro-batch and process holds
        counts = [(y != -1).sum() for _, y in micro_batches]
        total = torch.stack([sum(counts), torch.tensor(stop[0], device=device)])
        if world > 1:
            dist.all_reduce(total)
        loss = torch.zeros((), device=device)
        for i, ((x, y), count) in enumerate(zip(micro_batches, counts)):
            if world > 1:  # gradients travel once a step
                model.require_backward_grad_sync = i == len(counts) - 1
            with autocast:
                share = model(x, y)[1] * count / total[0]
            (share * world).backward()  # DistributedDataParallel averages over the processes
            loss += share.detach()
        micro_batches = batch(step + 1)  # read while the device computes
        if world > 1:
            dist.all_reduce(loss)
        if not math.isfinite(loss.item()):
            raise ValueError(f"loss is {loss.item()} at step {step}; "
                             + (f"the last good checkpoint is {path}, step {saved}" if saved else "no checkpoint yet")
                             + "; try a lower learning_rate")
        if cfg.grad_clip:
            torch.nn.utils.clip_grad_norm_(raw.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        stopping = bool(total[1])
        if log and step % cfg.log_interval == 0:
            log.progress(step, loss.item(), lr, time.perf_counter() - began, raw, world, (train.row_length or cfg.block_size + 1) - 1)
        if step % cfg.log_interval == 0:
            began = time.perf_counter()

    if log and step == cfg.max_iters:
        log.say(f"done: {path}\nnext: python sample.py {cfg.out_dir}" + ("" if train.row_length else " --extrapolate=1,2,4,8"))
    elif log:
        log.say(f"stopped by a signal at step {step}: {path}\nnext: the same command with --resume=True")
    if world > 1:
        time.sleep(0.5)  # gloo's threads let go of their last tensors; while Python shuts down they could only abort (torch 2.13)
        dist.destroy_process_group()


def learning_rate(step, cfg):
    """Linear warm-up, then from learning_rate down to min_lr at max_iters."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    t = (step - cfg.warmup_iters) / max(1, cfg.max_iters - cfg.warmup_iters)
    shape = {"cosine": 0.5 * (1 + math.cos(math.pi * t)), "linear": 1 - t, "constant": 1.0}[cfg.schedule]
    return cfg.min_lr + shape * (cfg.learning_rate - cfg.min_lr)


def evaluate(net, split, cfg, rank, world, device, autocast):
    """The scores of the same windows each time, see error_sums. The processes share the work."""
    net.eval()
    starts = split.windows(cfg.block_size, cfg.eval_batches * cfg.batch_size or None)
    n = cfg.micro_batch or cfg.batch_size // world  # no more at once than in training
    parts = [starts[i : i + n] for i in range(rank * n, len(starts), world * n)]
    with autocast:
        sums = error_sums(net, ([to(device, a) for a in split.read(part, cfg.block_size)] for part in parts))
    if world > 1:
        sums = sums.to(device, torch.float64 if device.type != "mps" else torch.float32)
        dist.all_reduce(sums)
    net.train()
    return scores(sums, split.meta["loss"] == "mask")


class Log:
    """What a run tells: lines on the screen, records in log.jsonl (steps that a kill undid are there twice), wandb if asked."""

    def __init__(self, cfg, device):
        os.makedirs(cfg.out_dir, exist_ok=True)
        self.cfg, self.file = cfg, open(os.path.join(cfg.out_dir, "log.jsonl"), "a")
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)
        self.wandb = None
        if cfg.wandb_project:
            try:
                import wandb
            except ImportError as error:
                raise ValueError(f"wandb_project={cfg.wandb_project!r} needs wandb; pip install wandb") from error
            self.wandb = wandb.init(project=cfg.wandb_project, name=os.path.basename(cfg.out_dir), config=vars(cfg))
        self.write(dict(config=dataclasses.asdict(cfg), device=name, torch=torch.__version__, numpy=np.__version__))

    def write(self, record):
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.wandb and "step" in record:
            prefix = record.get("split", "train")
            self.wandb.log({f"{prefix}/{k}": v for k, v in record.items() if k not in ("step", "split")}, record["step"])

    def say(self, line):
        print(line, flush=True)

    def progress(self, step, loss, lr, seconds, model, world, length):
        """A line, and a record, of the last log_interval steps on sequences of `length` tokens."""
        cfg, dt = self.cfg, seconds / self.cfg.log_interval
        record = dict(step=step, loss=loss, lr=lr, ms=1e3 * dt, tokens_per_s=cfg.batch_size * length / dt)
        line = (f"step {step}/{cfg.max_iters} loss {loss:.4f} lr {lr:.2e} "
                f"{record['ms']:.0f} ms {record['tokens_per_s']:,.0f} tokens/s")
        if world > 1:
            line += f" ({record['tokens_per_s'] / world:,.0f} a process)"
        if self.peak:
            record["mfu"] = model.estimate_mfu(cfg.batch_size / world, dt, self.peak, length)
            line += f" mfu {100 * record['mfu']:.0f}%"
        left = int(dt * (cfg.max_iters - step))
        self.write(record)
        self.say(line + f" left {left // 3600}:{left // 60 % 60:02}:{left % 60:02}")


def start_processes(cfg):
    """(rank, world, device): of this process among those that torchrun started, or of the only one."""
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if cfg.batch_size % world:
        raise ValueError(f"batch_size={cfg.batch_size} does not divide by the {world} processes; change one of them")
    device = pick_device(cfg.device, local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, world, device


def prepare(data, folder):
    """Make the data set if it is missing and needs no download."""
    name, _, text = data.partition("@")
    script = os.path.join(HERE, "data", name + ".py")
    if os.path.exists(os.path.join(folder, "meta.json")) or not os.path.exists(script):
        return  # Split says what is wrong, if anything
    module = importlib.import_module("data." + name)
    arguments = options(module.prepare, text)
    if module.DOWNLOAD:
        raise FileNotFoundError(f"data set {data!r} is not prepared and needs a download; run {command_for(folder)}")
    module.prepare(folder, **arguments)


def bf16(cfg, device):
    if cfg.dtype == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return cfg.dtype == "bfloat16"


def to(device, array):
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@torch.no_grad()
def error_sums(model, batches):
    """Over batches of (x, y), what forward takes: float64 (5,) of sums: loss in nats, targets, wrong argmaxes, rows
    with a wrong one, rows. Every target sees the right tokens before it, so a row without a wrong argmax is what greedy
    decoding writes, and the share of rows with one is its whole-sequence error."""
    sums = torch.zeros(5, dtype=torch.float64)
    for x, y in batches:
        logits, loss = model(x, y)
        targets, wrong = y != -1, (logits.argmax(-1) != y) & (y != -1)
        n = targets.sum()
        loss = torch.where(n > 0, loss * n, 0.0)  # a batch without targets has no mean
        part = torch.stack([loss, n, wrong.sum(), wrong.any(1).sum()])
        sums += torch.cat((part.cpu(), torch.tensor([len(x)])))
    return sums


def scores(sums, masked):
    """error_sums as a dict: loss in nats per target, perplexity and, where only some targets carry loss, the percentage
    of wrong targets and that of rows with one."""
    loss, targets, wrong, wrong_rows, rows = sums.tolist()
    result = dict(loss=loss / targets, ppl=math.exp(min(loss / targets, 700)))
    return result | (dict(token_error=100 * wrong / targets, sequence_error=100 * wrong_rows / rows) if masked else {})


def read_checkpoint(run, device="cpu"):
    """The checkpoint of a run directory: dict(model, optimizer, step, config, meta), tensors and plain values."""
    path = os.path.join(run, "ckpt.pt")
    if os.path.isfile(run):
        raise ValueError(f"{run!r} is a file; give the run directory that holds it, {os.path.dirname(run) or '.'}")
    if not os.path.isfile(path):
        what = "has no ckpt.pt yet" if os.path.isdir(run) else "does not exist"
        raise FileNotFoundError(f"run directory {run!r} {what}; train one with `python train.py config/quickstart.py`")
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint that can be read ({type(error).__name__}); train it anew") from error


def load_weights(model, checkpoint, run):
    """Give the model the weights of read_checkpoint(run); ValueError if they are not this model's."""
    theirs, ours = checkpoint["model"], model.state_dict()
    for name in sorted(theirs.keys() | ours.keys()):
        a, b = (tuple(side[name].shape) if name in side else "absent" for side in (theirs, ours))
        if a != b:
            raise ValueError(f"{run} holds another architecture: {name} is {a} there and {b} here; "
                             "give the options it was trained with")
    model.load_state_dict(theirs)


def model_config(checkpoint, **changes):
    """The GPTConfig of a checkpoint, with test-time options changed; an option that is younger than the checkpoint is off."""
    return GPTConfig(**{f.name: checkpoint["config"].get(f.name, f.default) for f in dataclasses.fields(GPTConfig)} | changes)


def pick_device(kind, index=0):
    """The torch.device of "cpu", "cuda", "mps" or "auto", the fastest that is there."""
    choose("device", kind, ("auto", "cpu", "cuda", "mps"))
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device='mps' but PyTorch sees none; use --device=cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' but PyTorch sees no GPU; use --device=cpu")
    return torch.device(kind, index) if kind == "cuda" else torch.device(kind)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
