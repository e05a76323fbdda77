"""
Train a GPT on one device, or on many under torchrun:

    python train.py config/quickstart.py [--key=value ...]         --help prints every key
    torchrun --standalone --nproc_per_node=8 train.py config/...   the same batches, shared out

The tokens of a step depend on (seed, step) alone: a resumed run, or one on another number of
processes, is the same run. SIGTERM, Ctrl-C or a closed terminal ends a run with a checkpoint, a
second Ctrl-C ends it at once; --resume=True goes on from the last checkpoint.
"""
import contextlib
import dataclasses
import fcntl
import glob
import json
import math
import os
import re
import signal
import sys
import time
import zipfile
from dataclasses import dataclass

import numpy as np
import torch

torch.set_flush_denormal(True)  # FoX trains 1.7 times as fast; only before threads start, they inherit it

import torch.distributed as dist

import config
from data.shards import Split, locate, prepare
from model import GPT, GPTConfig, choose

# dense bf16, from the data sheets
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "RTX 4090": 165e12}


@dataclass
class TrainConfig(GPTConfig):
    """Keys of train.py: those of the model (GPTConfig), then those of the run."""

    vocab_size: int = 0  # number of token ids; 0: the data set's own
    config: str = ""  # path of the config file (set by naming one)
    data: str = "stdlib"  # a data set prepared by data/NAME.py, or the path of a folder of shards
    out_dir: str = ""  # run directory; empty: out/<config>_<pe>, with _seed<n> for another seed
    resume: bool = False  # go on from the run directory's checkpoint, if there is one
    init_from: str = ""  # fine-tuning: run directory of the weights and the model's options
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
    eval_splits: str = "val"  # splits to evaluate, joined by commas; the first decides which was best
    checkpoint_interval: int = 0  # steps between checkpoints; 0: eval_interval
    log_interval: int = 10  # steps between log lines
    device: str = "auto"  # auto | cpu | cuda | mps
    dtype: str = "auto"  # auto: bfloat16 autocast where the GPU has it | float32 | bfloat16
    compile: bool = False  # torch.compile: slow to start, fast steps
    kernels: str = "auto"  # auto: Triton kernels in the layers that have one | off: PyTorch alone
    wandb_project: str = ""  # also log to this Weights & Biases project


def main(argv):
    cfg = config.load(TrainConfig, argv)
    if cfg.init_from:  # the options of its model are this run's defaults
        origin = read_checkpoint(cfg.init_from)
        cfg = config.load(TrainConfig, argv, **dataclasses.asdict(model_config(origin)))
    check(cfg)
    rank, world, device = start_processes(cfg)
    path = os.path.join(cfg.out_dir, "ckpt.pt")
    if os.path.exists(path) and not cfg.resume:
        raise ValueError(f"{cfg.out_dir} already holds a run; go on with it by --resume=True, "
                         "or keep it and write elsewhere by --out_dir=...")

    # data
    if os.path.isfile(cfg.data):
        raise ValueError(f"data={cfg.data!r} is a file; make it a data set by "
                         f"`python -m data.text --source={cfg.data}`")
    folder = locate(cfg.data)
    if rank == 0:
        prepare(cfg.data, folder)
    if world > 1:
        dist.barrier()
    train = Split(folder, "train")
    evals = [Split(folder, name) for name in cfg.eval_splits.split(",")]
    for split in (train, *evals):
        split.windows(cfg.block_size, 1)  # refuses a block_size that does not fit
    cfg.vocab_size = cfg.vocab_size or train.vocab_size
    if cfg.vocab_size < train.vocab_size:
        raise ValueError(f"vocab_size={cfg.vocab_size} is smaller than that of {folder}, "
                         f"{train.vocab_size}; use vocab_size=0 for the data set's own")

    # model and optimizer
    torch.manual_seed(cfg.seed)
    exact = cfg.dtype == "float32"  # asked for, so no TF32 either
    torch.set_float32_matmul_precision("highest" if exact else "high")
    options = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(GPTConfig)}
    raw = GPT(GPTConfig(**options)).to(device)
    betas = cfg.beta1, cfg.beta2
    optimizer = raw.configure_optimizers(cfg.weight_decay, cfg.learning_rate, betas, device.type)
    if cfg.init_from:
        load_weights(raw, origin, cfg.init_from)
    log = Log(cfg, device) if rank == 0 else None
    step, saved, checkpoint = 0, None, None
    if os.path.exists(path):
        checkpoint = read_checkpoint(cfg.out_dir, device)
        resume(checkpoint, cfg, raw, optimizer, train.meta)
        step = saved = checkpoint["step"]
    if world > 1:
        steps = [None] * world
        dist.all_gather_object(steps, step)
        if len(set(steps)) > 1:
            raise ValueError(f"the processes found checkpoints of steps {sorted(set(steps))}; "
                             f"put out_dir={cfg.out_dir!r} on storage that all machines share")
    dtype = torch.bfloat16 if bf16(cfg, device) else torch.float32
    attention = raw.use_kernels(dtype) if cfg.kernels == "auto" else "attention: pytorch (kernels=off)"
    net = torch.compile(raw) if cfg.compile else raw
    model = torch.nn.parallel.DistributedDataParallel(net) if world > 1 else net
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
    if log:
        log.start(checkpoint, f"{raw.get_num_params() / 1e6:.2f}M parameters, pe={cfg.pe}, "
                  f"{world} x {device.type}, {str(dtype)[6:]}, {cfg.out_dir}, from step {step}")
        log.say(attention)

    # training
    stop = Stop(device)
    micro_batches = read_batch(train, step, cfg, rank, world, device)
    began = time.perf_counter()
    while True:
        torch.manual_seed(cfg.seed + step * world + rank)  # of dropout: resuming is exact
        loss = backward(model, micro_batches, world, autocast)
        # read while the device computes
        micro_batches = read_batch(train, step + 1, cfg, rank, world, device)
        loss = loss.item()
        refuse_nan(loss, "loss", step, path, saved)

        # these weights give a finite loss, so they are worth keeping; and an evaluation may be long
        paused = time.perf_counter()
        last = step == cfg.max_iters
        due = last or step > 0 and step % (cfg.checkpoint_interval or cfg.eval_interval) == 0
        if due and step != saved:
            save(path, raw, optimizer, step, cfg, train.meta, log)
            saved = step
        if last or step % cfg.eval_interval == 0:
            for split in evals:
                result = evaluate(net, split, cfg, rank, world, device, autocast, stop, log)
                if result:
                    refuse_nan(result["loss"], f"{split.split} loss", step, path, saved)
                if result and log:
                    log.evaluation(step, split.split, result)
        if last or stop.asked():
            break
        began += time.perf_counter() - paused  # the speed is that of training alone

        lr = learning_rate(step, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if cfg.grad_clip:
            torch.nn.utils.clip_grad_norm_(raw.parameters(), cfg.grad_clip)
        optimizer.step()
        raw.clamp_parameters()
        optimizer.zero_grad()
        step += 1
        if step % cfg.log_interval == 0:
            if log:
                length = (train.row_length or cfg.block_size + 1) - 1
                log.progress(step, loss, lr, time.perf_counter() - began, raw, world, length)
            began = time.perf_counter()

    if step != saved:
        save(path, raw, optimizer, step, cfg, train.meta, log)
    if log:
        log.end(step, path, stop.number, "" if train.row_length else " --extrapolate=1,2,4,8")
    if world > 1:
        time.sleep(0.5)  # gloo's threads could abort if Python ended at once (torch 2.13)
        dist.destroy_process_group()
    if stop.number:
        stop.end()


# --------------------------------------------------------------------------------------------------
# one step


def read_batch(train, step, cfg, rank, world, device):
    """This process's share of the step's batch, as micro-batches of (x, y) on the device."""
    n = cfg.micro_batch or cfg.batch_size // world
    batch = train.batch(step, cfg.batch_size, cfg.block_size, cfg.seed, rank, world)
    x, y = (to(device, array) for array in batch)
    return list(zip(x.split(n), y.split(n)))


def backward(model, micro_batches, world, autocast):
    """Adds up the gradients of a step. Returns its loss, the mean over the targets of all processes."""
    # every target of the global batch weighs the same, whichever micro-batch and process holds it
    counts = [(y != -1).sum() for _, y in micro_batches]
    total = sum(counts)
    if world > 1:
        dist.all_reduce(total)
    loss = torch.zeros((), device=total.device)
    for i, ((x, y), count) in enumerate(zip(micro_batches, counts)):
        if world > 1:  # gradients travel once a step
            model.require_backward_grad_sync = i == len(counts) - 1
        with autocast:
            share = model(x, y)[1] * count / total.clamp(min=1)
        (share * world).backward()  # DistributedDataParallel averages over the processes
        loss += share.detach()
    if world > 1:
        dist.all_reduce(loss)
    return loss


def learning_rate(step, cfg):
    """Linear warm-up, then from learning_rate down to min_lr at max_iters."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    t = (step - cfg.warmup_iters) / max(1, cfg.max_iters - cfg.warmup_iters)
    shapes = {"cosine": 0.5 * (1 + math.cos(math.pi * t)), "linear": 1 - t, "constant": 1.0}
    return cfg.min_lr + shapes[cfg.schedule] * (cfg.learning_rate - cfg.min_lr)


def refuse_nan(loss, name, step, path, saved):
    """End a run that has diverged; its last good checkpoint stays."""
    if not math.isfinite(loss):
        kept = f"the last good checkpoint is {path}, step {saved}"
        if saved is None:
            kept = "no checkpoint yet"
        elif saved == step:  # the loss was finite, only the evaluation is not
            kept = f"{path} holds these very weights"
        raise ValueError(f"{name} is {loss} at step {step}; {kept}; try a lower learning_rate")


# --------------------------------------------------------------------------------------------------
# evaluation


def evaluate(net, split, cfg, rank, world, device, autocast, stop, log=None):
    """The scores of the same windows each time, see error_sums; None where a signal breaks it off.
    Processes share the windows, and none holds more at once than in training."""
    net.eval()
    began = shown = time.monotonic()
    starts = split.windows(cfg.block_size, cfg.eval_batches * cfg.batch_size or None)
    n = cfg.micro_batch or cfg.batch_size // world
    sums = torch.zeros(5, dtype=torch.float64)
    for i in range(0, len(starts), world * n):
        mine = starts[i + rank * n : i + (rank + 1) * n]
        if len(mine):
            batch = [to(device, a) for a in split.read(mine, cfg.block_size)]
            with autocast:
                sums += error_sums(net, [batch])
        if stop.asked():
            return None
        if log and time.monotonic() - shown > 10:
            shown = time.monotonic()
            log.say(f"evaluating {split.split}: window {i + len(mine):,} of {len(starts):,}")
    if world > 1:
        sums = sums.to(device, torch.float64 if device.type != "mps" else torch.float32)
        dist.all_reduce(sums)
    net.train()
    if log:
        log.eval_seconds[split.split] = time.monotonic() - began
    return scores(sums, split.meta["loss"] == "mask")


@torch.no_grad()
def error_sums(model, batches):
    """Over batches of (x, y), as forward takes them: float64 (5,), sums of loss in nats, targets,
    wrong argmaxes, rows with a wrong one, rows. Every target sees the right tokens before it, so
    greedy decoding writes just the rows without a wrong argmax: the share of the others is the
    whole-sequence error."""
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
    """error_sums as a dict: loss in nats per target, perplexity and, where only some targets carry
    loss, the percentage of wrong targets and that of rows with one."""
    loss, targets, wrong, wrong_rows, rows = sums.tolist()
    if not targets:
        raise ValueError("no target of the evaluation carries loss; evaluate more, or check the mask")
    result = dict(loss=loss / targets, ppl=math.exp(min(loss / targets, 700)))
    if masked:
        result |= dict(token_error=100 * wrong / targets, sequence_error=100 * wrong_rows / rows)
    return result


# --------------------------------------------------------------------------------------------------
# checkpoints


def save(path, model, optimizer, step, cfg, meta, log):
    """Write the checkpoint, in the process that has the log. A kill or a power cut leaves the old
    file or the new one."""
    if not log:
        return
    content = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step,
                   config=dataclasses.asdict(cfg), meta=meta, best=log.best,
                   wandb=log.wandb and log.wandb.id)
    part = f"{path}.{os.getpid()}.tmp"
    try:
        with open(part, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        os.fsync(folder)  # of the new name
        os.close(folder)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.remove(part)
        if isinstance(error, RuntimeError):  # torch's own, about the size, hides that the disk is full
            error = error.__context__ or error
        reason = str(error).partition("\n")[0]
        raise OSError(f"step {step} could not be written to {path} ({reason}); make room for it, then "
                      "go on from the checkpoint before it by --resume=True") from error


def resume(checkpoint, cfg, model, optimizer, meta):
    """Give model and optimizer the state of this run's checkpoint; ValueError if it is another's."""
    run, theirs, ours = cfg.out_dir, checkpoint["config"], dataclasses.asdict(model.cfg)
    for key, value in dataclasses.asdict(model_config(checkpoint)).items():
        if ours[key] != value:
            raise ValueError(f"{run} was trained with {key}={value!r}, this run has {ours[key]!r}; "
                             "resume with the same model, or write elsewhere by --out_dir=...")
    if checkpoint["step"] > cfg.max_iters:
        raise ValueError(f"{run} is at step {checkpoint['step']}, beyond "
                         f"max_iters={cfg.max_iters}; give more --max_iters")
    other = [key for key, value in checkpoint["meta"].items() if meta.get(key) != value]
    data = theirs.get("data", "")
    if other or os.path.basename(data) != os.path.basename(cfg.data):  # the folder may have moved
        raise ValueError(f"{run} was trained on data={data!r}, and this data={cfg.data!r} has another "
                         f"{', '.join(other) or 'name'}; fine-tune by --init_from={run}")
    load_weights(model, checkpoint, run)

    # the optimizer: its moments are the checkpoint's, its hyperparameters this run's
    groups, state = optimizer.state_dict()["param_groups"], checkpoint["optimizer"].get("state", {})
    there = [group["params"] for group in checkpoint["optimizer"].get("param_groups", [])]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    shapes = {i: dict(step=(), exp_avg=p.shape, exp_avg_sq=p.shape) for i, p in enumerate(params)}
    fits = there == [group["params"] for group in groups]
    for i, moments in state.items():
        fits = fits and {name: a.shape for name, a in moments.items()} == shapes.get(i)
    if not fits:
        raise ValueError(f"{run} holds the optimizer of other parameters; "
                         f"take its weights alone by --init_from={run}")
    optimizer.load_state_dict(dict(state=state, param_groups=groups))


def read_checkpoint(run, device="cpu"):
    """The checkpoint of a run directory: dict(model, optimizer, step, config, meta, best, wandb)."""
    path = os.path.join(run, "ckpt.pt")
    if os.path.isfile(run):
        folder = os.path.dirname(run) or "."
        raise ValueError(f"{run!r} is a file; give the run directory that holds it, {folder}")
    if not os.path.isfile(path):
        lacks = "has no ckpt.pt yet" if os.path.isdir(run) else "does not exist"
        raise FileNotFoundError(f"run directory {run!r} {lacks}; "
                                "train one with `python train.py config/quickstart.py`")
    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip():  # the file has a checksum of each tensor, which torch.load ignores
                raise zipfile.BadZipFile
        checkpoint = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint that can be read ({type(error).__name__}); "
                         "train it anew") from error
    parts = checkpoint if isinstance(checkpoint, dict) else {}
    for key, kind in dict(model=dict, optimizer=dict, step=int, config=dict, meta=dict).items():
        if not isinstance(parts.get(key), kind) or key == "step" and parts[key] < 0:
            raise ValueError(f"{path} is no checkpoint of train.py: {key!r} is missing or of another "
                             "kind; give the directory of a run of train.py")
    return checkpoint


def load_weights(model, checkpoint, run):
    """Give the model the weights of read_checkpoint(run); ValueError if they are another model's."""
    # older checkpoints hold a layer's rotation twice
    theirs = {name: x for name, x in checkpoint["model"].items() if ".rotation." not in name}
    ours = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        ours.setdefault(tensor, []).append(name)  # a tensor that layers share has several
    unknown = theirs.keys() - sum(ours.values(), [])
    differs = f"{min(unknown)} is there and not here" if unknown else None
    for tensor, names in ours.items():
        there = [name for name in names if name in theirs]
        if not there:
            differs = f"{names[0]} is here and not there"
        for name in there:
            shape = tuple(getattr(theirs[name], "shape", ()))
            if shape != tensor.shape:
                differs = f"{name} is {shape} there and {tuple(tensor.shape)} here"
        for name in there[1:]:
            if not differs and not torch.equal(theirs[name], theirs[there[0]]):
                differs = f"{there[0]} and {name} differ there and are one tensor here"
    if differs:
        raise ValueError(f"{run} holds another architecture: {differs}; "
                         "give the options it was trained with")
    model.load_state_dict(theirs, strict=False)


def model_config(checkpoint, **changes):
    """The GPTConfig of a checkpoint, with changes; an option younger than it takes its default."""
    options = {}
    for field in dataclasses.fields(GPTConfig):
        value = checkpoint["config"].get(field.name, field.default)
        options[field.name] = config.typed(GPTConfig, field.name, value, "the checkpoint")
    return GPTConfig(**options | changes)


# --------------------------------------------------------------------------------------------------
# the start, the log and the end of a run


def check(cfg):
    """Refuse values that make no sense; model and data refuse theirs. Names the run directory."""
    choose("schedule", cfg.schedule, ("cosine", "linear", "constant"))
    choose("dtype", cfg.dtype, ("auto", "float32", "bfloat16"))
    choose("kernels", cfg.kernels, ("auto", "off"))
    for key in ("block_size", "n_layer", "n_head", "n_embd", "batch_size", "eval_interval",
                "log_interval"):
        if getattr(cfg, key) < 1:
            raise ValueError(f"{key}={getattr(cfg, key)} is too small; use 1 or more")
    for key in ("learning_rate", "min_lr", "weight_decay", "grad_clip"):
        if getattr(cfg, key) < 0:
            raise ValueError(f"{key}={getattr(cfg, key)} is negative; use 0 or more")
    for key in ("dropout", "beta1", "beta2"):
        if not 0 <= getattr(cfg, key) < 1:
            raise ValueError(f"{key}={getattr(cfg, key)} is no probability below 1; use 0 to 0.999")
    if cfg.seed >= 2**62:
        raise ValueError(f"seed={cfg.seed} is too large; use less than 2**62")
    stem = os.path.splitext(os.path.basename(cfg.config))[0] or "train"
    seed = f"_seed{cfg.seed}" if cfg.seed != TrainConfig.seed else ""
    cfg.out_dir = cfg.out_dir or os.path.join("out", f"{stem}_{cfg.pe}{seed}")


def start_processes(cfg):
    """(rank, world, device) of this process among those that torchrun started, or of the only one."""
    defaults = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    words = [os.environ.get(name, default) for name, default in defaults.items()]
    if not all(word.isdecimal() for word in words) or int(words[0]) >= int(words[1]):
        raise ValueError(f"{', '.join(defaults)} = {', '.join(words)} in the environment make no sense; "
                         "unset them, or start by torchrun")
    rank, world, local = (int(word) for word in words)
    if cfg.batch_size % world:
        raise ValueError(f"batch_size={cfg.batch_size} does not divide by the {world} processes; "
                         "change one of them")
    device = pick_device(cfg.device, local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, world, device


def pick_device(kind, index=0):
    """The torch.device of "cpu", "cuda", "mps" or "auto", the fastest that is there."""
    choose("device", kind, ("auto", "cpu", "cuda", "mps"))
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if kind == "auto":
        kind = "cuda" if cuda else "mps" if mps else "cpu"
    if kind == "mps" and not mps:
        raise ValueError("device='mps' but PyTorch sees none; use --device=cpu")
    if kind == "cuda" and not cuda:
        raise ValueError("device='cuda' but PyTorch sees no GPU; use --device=cpu")
    return torch.device(kind, index) if kind == "cuda" else torch.device(kind)


def bf16(cfg, device):
    if cfg.dtype == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return cfg.dtype == "bfloat16"


def to(device, array):
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Log:
    """Lines on the screen, records in log.jsonl (steps that a kill undid are there twice), wandb if
    asked. It keeps a second run out of the run directory."""

    def __init__(self, cfg, device):
        if cfg.wandb_project:
            try:
                import wandb  # noqa: F401
            except ImportError as error:
                asked = f"wandb_project={cfg.wandb_project!r}"
                raise ValueError(f"{asked} needs wandb; pip install wandb") from error
        self.cfg, self.file = cfg, lock(cfg.out_dir)
        self.device = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in self.device), None)
        self.best = self.wandb = None
        self.steps, self.seconds = 0, 0.0  # of training so far
        self.eval_seconds = {}  # of each split's latest evaluation

    def start(self, checkpoint, line):
        """Begin, or go on from a checkpoint, and say which keys have changed since."""
        cfg, then = dataclasses.asdict(self.cfg), checkpoint or {}
        if self.cfg.wandb_project:
            import wandb

            name = os.path.basename(self.cfg.out_dir)
            self.wandb = wandb.init(project=self.cfg.wandb_project, name=name, config=cfg,
                                    id=then.get("wandb"), resume="allow")
        self.best = then.get("best")
        versions = dict(torch=torch.__version__, numpy=np.__version__)
        self.write(dict(config=cfg, device=self.device, **versions))
        self.say(line)
        if self.cfg.resume and not checkpoint:
            self.say(f"no checkpoint in {self.cfg.out_dir} yet: from the start")
        for key, value in then.get("config", {}).items():
            if key in cfg and cfg[key] != value and key != "resume":
                self.say(f"{key}={cfg[key]!r} from here on, before it was {value!r}")
        load, cores = os.getloadavg()[0], os.cpu_count()
        if self.device == "cpu" and "OMP_NUM_THREADS" not in os.environ and load > cores / 2:
            self.say(f"the {cores} cores are busy (load {load:.1f}): one thread may be ten times as "
                     "fast, by OMP_NUM_THREADS=1 before the command")

    def write(self, record):
        line = json.dumps(record).encode() + b"\n"
        while line:  # a full disk takes a part of it without a word, and raises the second time
            line = line[self.file.write(line) :]
        if self.wandb and "step" in record:
            prefix = record.get("split", "train")
            values = {f"{prefix}/{k}": v for k, v in record.items() if k not in ("step", "split")}
            self.wandb.log(values, record["step"])

    def say(self, line):
        try:
            print(line, flush=True)
        except OSError:  # `| head` has seen enough, or the terminal is gone
            sys.stdout = open(os.devnull, "w")

    def evaluation(self, step, split, result):
        self.write(dict(step=step, split=split, **result))
        self.say(f"step {step}: {split} " + ", ".join(f"{k} {v:.4f}" for k, v in result.items()))
        first = self.cfg.eval_splits.split(",")[0]
        if split == first and (not self.best or result["loss"] < self.best["loss"]):
            self.best = dict(step=step, split=split, loss=result["loss"])

    def progress(self, step, loss, lr, seconds, model, world, length):
        """A line, and a record, of the last log_interval steps on sequences of `length` tokens."""
        cfg, dt = self.cfg, seconds / self.cfg.log_interval
        speed = cfg.batch_size * length / dt
        record = dict(step=step, loss=loss, lr=lr, ms=1e3 * dt, tokens_per_s=speed)
        line = (f"step {step}/{cfg.max_iters} loss {loss:.4f} lr {lr:.2e} "
                f"{1e3 * dt:.0f} ms {speed:,.0f} tokens/s")
        if world > 1:
            line += f" ({speed / world:,.0f} a process)"
        if self.peak:
            record["mfu"] = model.estimate_mfu(cfg.batch_size / world, dt, self.peak, length)
            line += f" mfu {100 * record['mfu']:.0f}%"
        self.write(record)
        self.steps += cfg.log_interval
        self.seconds += seconds
        left = (cfg.max_iters - step) * self.seconds / self.steps
        evals = 1 + math.ceil(cfg.max_iters / cfg.eval_interval) - math.ceil(step / cfg.eval_interval)
        left = round(left + evals * sum(self.eval_seconds.values()))
        self.say(line + f" left {left // 3600}:{left // 60 % 60:02}:{left % 60:02}")

    def end(self, step, path, stopped, options):
        self.write(dict(ended=step, best=self.best))
        line = f"stopped by a signal at step {step}: {path}" if stopped else f"done: {path}"
        if self.best:
            line += ", best {split} loss {loss:.4f} at step {step}".format(**self.best)
        sample = f"python sample.py {self.cfg.out_dir}{options}"
        self.say(f"{line}\nnext: {'the same command with --resume=True' if stopped else sample}")
        if self.wandb:
            self.wandb.finish()


def lock(out_dir):
    """The run directory's log.jsonl, open to append and locked until this process ends."""
    try:
        os.makedirs(out_dir, exist_ok=True)
        file = open(os.path.join(out_dir, "log.jsonl"), "ab+", buffering=0)
    except OSError as error:
        reason = error.strerror
        raise ValueError(f"out_dir={out_dir!r} cannot be written ({reason}); take another") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(f"another process trains in {out_dir}; end it first (a killed torchrun leaves "
                         "its own running), or write elsewhere by --out_dir=...") from None
    except OSError:
        pass  # a file system without locks
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)  # without a line that a full disk cut short
    for part in glob.glob(os.path.join(glob.escape(out_dir), "ckpt.pt.*.tmp")):
        os.remove(part)  # a kill left it
    return file


class Stop:
    """Set by SIGTERM, Ctrl-C or a closed terminal; asked after each step and batch of an evaluation."""

    def __init__(self, device):
        self.number, self.device = 0, device
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self.heed)

    def heed(self, number, frame):
        if not self.number and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(2, b"\nstopping after this step or batch; Ctrl-C again ends it at once\n")
        self.number = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # not SIGTERM, which torchrun sends again

    def asked(self):
        """Whether any process got a signal; all of them have to ask together."""
        if dist.is_initialized():
            number = torch.tensor(self.number, device=self.device)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            self.number = int(number)
        return self.number > 0

    def end(self):
        """End as the signal would have: a shell then starts no next command and leaves its loop."""
        signal.signal(self.number, signal.SIG_DFL)
        os.kill(os.getpid(), self.number)


def last_words(error):
    """The error as one line for sys.exit; with its traceback where it is no fault of the input."""
    text = str(error).partition("\n")[0]
    no_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if no_memory or re.search("can't allocate memory|size calculation overflowed", text):
        text, no_memory = f"out of memory ({text}); try a smaller --micro_batch or model", True
    explained = no_memory or isinstance(error, (ValueError, OSError))
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")  # torchrun closes its own report with it
    if report and (os.environ["RANK"] != "0" or not explained):
        # one process speaks for all, the first that can explain it: then torchrun ends the others
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5 if explained else 10)
    if not explained:
        raise error
    line = f"{type(error).__name__}: {text}"
    if not report:
        return line
    with open(report, "w") as file:
        json.dump(dict(message=line), file)
    return 1


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        sys.exit(last_words(error))
