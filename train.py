"""
Trains a GPT on one device, or on many under torchrun:

    python train.py config/quickstart.py [--option=value ...]         --help shows all options
    torchrun --standalone --nproc_per_node=8 train.py config/...      the same batches, divided up

A run is defined by its options and writes ckpt.pt and log.jsonl into its directory, which is named
after the options. On SIGTERM, Ctrl-C or a closed terminal it saves a checkpoint and stops, and the
same command with --resume continues it. A second Ctrl-C ends it at once.

Batches depend only on the seed and the step. Dropout masks depend on the number of processes and on
micro_batch, too. A run that was stopped and resumed with the same two takes the same steps as an
uninterrupted one. On GPUs, or with three or more processes, rounding may differ, because the order
of additions is not fixed there.
"""
import json
import math
import os
import re
import signal
import time
import zlib
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

import config
from config import Mistake
from data import locate, write_if_missing
from data.shards import Split, whole_file
from model import GPT, GPTConfig, model_options, read_checkpoint, refuse_idle_options

try:
    import fcntl
except ImportError:  # Windows has no such module
    fcntl = None

# Denormal numbers (near 1e-40) are slow on CPUs. Without this, pe=fox takes 1.2 to 1.5 times as
# long. Threads inherit the setting, so it comes before the first computation
torch.set_flush_denormal(True)

@dataclass
class TrainConfig(GPTConfig):
    """The options of a run: those of its model (GPTConfig), and then these."""
    vocab_size: int = 0  # number of token ids; 0: as many as the data set has
    config: str = ""  # a file of options, named without a flag
    data: str = "stdlib"  # a data set prepared by data/NAME.py, or the path of a folder of shards
    out_dir: str = ""  # run directory; empty: out/<config>_<pe>, followed by the other flags
    resume: bool = False  # resume the run in the run directory, if there is one
    init_from: str = ""  # fine-tuning: a run directory, whose weights and model options it takes
    seed: int = 1337  # of weights, batches and dropout
    batch_size: int = 16  # sequences per step, over all processes and micro-batches
    micro_batch: int = 0  # sequences per forward pass; 0: all sequences of the process
    max_iters: int = 1000  # training steps
    learning_rate: float = 1e-3  # after warm-up
    pe_lr: float = 1.0  # the learning rate of a method's own parameters, in learning_rates
    min_lr: float = 0.0  # cosine and linear reach this at max_iters
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # constant ignores min_lr
    warmup_iters: int = 0  # steps of linear warm-up
    decay_iters: int = 0  # cosine and linear fall during the last so many steps; 0: from warm-up on
    weight_decay: float = 0.1  # on the weights of linear and embedding layers
    beta1: float = 0.9  # AdamW: decay rate of the running mean of the gradient
    beta2: float = 0.95  # AdamW: decay rate of the running mean of the squared gradient
    grad_clip: float = 1.0  # maximum norm of the gradient; 0: no clipping
    eval_interval: int = 500  # steps between evaluations
    eval_batches: int = 64  # batches of batch_size sequences per split; 0: the whole split
    eval_splits: str = "val"  # comma-separated; a run says when the loss of the first was lowest
    checkpoint_interval: int = 0  # steps between checkpoints; 0: only one before each evaluation
    log_interval: int = 10  # steps between log lines, which show the loss of one batch
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: the fastest available
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 if a CUDA GPU has it
    compile: bool = False  # torch.compile: a slow start, but faster steps
    kernels: Literal["auto", "off"] = "off"  # auto: Triton in each layer that the kernels support
    peak_tflops: float = 0.0  # of a GPU (A100: 312, H100: 989), to log the fraction used (mfu)
    wandb_project: str = ""  # also log to this Weights & Biases project

# A resumed run may change these, because they do not change what it learns, except for rounding
# and, with micro_batch, for the dropout masks. Its data may have moved if the contents are the same
MAY_CHANGE = {"config", "data", "out_dir", "resume", "micro_batch", "device", "compile",
              "eval_interval", "eval_batches", "eval_splits", "checkpoint_interval", "log_interval",
              "peak_tflops", "wandb_project"}

# It may change these if the learning rate of the steps that it has taken stays the same
SCHEDULE = {"learning_rate", "min_lr", "schedule", "max_iters", "warmup_iters", "decay_iters"}

def main(words):
    cfg, identity, saved, origin, lock = read_options(words)
    stop_signal = StopSignal()
    processes = Processes(cfg)
    rank, world, device = processes.rank, processes.world, processes.device
    set_threads(device, cfg.n_embd)
    train, evals = open_data(cfg, processes)
    cfg.vocab_size = cfg.vocab_size or train.vocab_size
    cfg.dtype = choose_dtype(cfg.dtype, device)
    refuse_what_does_not_fit(cfg, saved, origin, train)
    step = saved["step"] if saved else 0
    processes.must_agree_on(asdict(cfg), train.meta, step)
    raw_model, optimizer = set_up(cfg, saved, origin, device)
    x, y, n_targets = get_batch(train, step, cfg, processes)
    log = Log(cfg, identity, processes, saved, lock)
    if cfg.resume and not saved:
        log.say(f"--resume found no run in {cfg.out_dir}, so this starts one")
    log.say(f"{raw_model.get_num_params() / 1e6:.2f}M parameters, pe={cfg.pe}, data={cfg.data}, "
            f"{world} x {device.type}, {cfg.dtype}, {cfg.out_dir}, from step {step}")
    log.say(raw_model.use_kernels(getattr(torch, cfg.dtype), cfg.kernels))
    if device.type == "cpu" and torch.get_num_threads() > 1:
        log.say(f"{torch.get_num_threads()} threads; if the machine has other work, fewer are much "
                "faster (OMP_NUM_THREADS=1)")
    if cfg.compile:
        log.say("compile: the first evaluation and the first step may take minutes each")
    saved_step = step if saved else None  # the step of ckpt.pt
    del saved, origin  # their tensors would stay in memory
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16")
    local_model = raw_model
    if cfg.compile:
        # Once it has seen batches of two sizes, torch.compile would otherwise make the training
        # step dynamic, which is slower
        local_model = torch.compile(raw_model, dynamic=False)
    model = local_model
    if world > 1:  # the gradients are views of what DDP sends, so there is no copy of them
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    loss = norm = torch.zeros(())  # of the last step; zeros before the first one
    clock, clock_step = time.perf_counter(), step  # for the time per step
    while True:
        # Save the weights after `step` steps, and then evaluate them, which can take long
        last = step >= cfg.max_iters
        stop = processes.max(stop_signal.number)
        must_evaluate = (last or step % cfg.eval_interval == 0) and not stop
        is_due = step > 0 and cfg.checkpoint_interval and step % cfg.checkpoint_interval == 0
        must_save = stop or is_due or must_evaluate and (step > 0 or last)
        if must_save and step != saved_step:
            refuse_nan(step, loss=processes.sum(loss), gradient=norm,
                       weights=torch.nn.utils.get_total_norm(raw_model.parameters()))
            if rank == 0:
                save_checkpoint(cfg.out_dir, dict(
                    model=raw_model.state_dict(), optimizer=optimizer.state_dict(), step=step,
                    config=asdict(cfg), meta=train.meta, wandb=log.wandb_id, **identity))
            saved_step = step
        if must_evaluate:
            # without DDP, in which all processes must make the same number of forward passes
            with stop_signal.at_once(), autocast:
                log.record(step, evaluate(local_model, evals, cfg, processes))
        if must_save or must_evaluate:
            clock, clock_step = time.perf_counter(), step
        if last or stop:
            break

        # Only dropout and random_positions draw random numbers here. The seed depends on the step,
        # so that a resumed run draws the same numbers, and on the rank, so that processes draw
        # different ones
        if cfg.dropout or cfg.random_positions:
            torch.manual_seed(cfg.seed + step * world + rank)

        # The loss is the mean over all targets of the batch. Micro-batches and processes may hold
        # different numbers of targets, so each sum is divided by the number in the whole batch
        loss = torch.zeros((), device=device)
        n = cfg.micro_batch or len(x)
        for i in range(0, len(x), n):
            if world > 1:  # add up the gradients of all processes only once, after the last part
                model.require_backward_grad_sync = i + n >= len(x)
            with autocast:
                _, nats = model(x[i : i + n], y[i : i + n], return_logits=False, reduction="sum")
            part = nats / n_targets
            (part * world).backward()  # because DDP takes the mean over processes
            loss += part.detach()
        x, y, n_targets = get_batch(train, step + 1, cfg, processes)  # while the GPU computes

        lr = learning_rate(step, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)  # older checkpoints have none
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in raw_model.parameters() if p.grad is not None])
        if cfg.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(raw_model.parameters(), cfg.grad_clip, norm)
        optimizer.step()
        raw_model.clamp_parameters()  # pope's delta stays within its bounds
        optimizer.zero_grad()
        step += 1

        # Up to here, a step reads nothing back from the GPU, so the CPU does not wait for the GPU
        if step % cfg.log_interval == 0:
            mean_loss = processes.sum(loss)  # of this step's batch, before the update
            refuse_nan(step, loss=mean_loss, gradient=norm)
            values = dict(loss=mean_loss.item(), lr=lr)
            seconds = (time.perf_counter() - clock) / (step - clock_step)
            clock, clock_step = time.perf_counter(), step
            values.update(speed(raw_model, cfg, x.size(1), world, seconds))
            log.record(step, values, seconds_left=(cfg.max_iters - step) * seconds)

    log.say_the_end(f"{evals[0].split}/loss", stop)
    processes.end()
    if stop:
        end_by(stop)

# --- before the first step ------------------------------------------------------------------------

def read_options(words):
    """Returns the options of a command line, what identifies the run in tables (`identify`), the
    checkpoint to resume from, that of the run which init_from names, and the lock of the run
    directory. Each of the last three is None if there is none."""
    if not words:
        raise Mistake("nothing to train; try python train.py config/quickstart.py, or --help")
    from_file, from_flags = config.read(TrainConfig, words)
    default = TrainConfig(**from_file)
    cfg = replace(default, **from_flags)
    origin = None
    if cfg.init_from:
        cfg.init_from = from_flags["init_from"] = os.path.normpath(cfg.init_from)
        origin = read_checkpoint(cfg.init_from)
        of_origin = model_options(origin)
        for name in {"block_size", "dropout"} & from_file.keys():  # the weights fit any of these
            del of_origin[name]
        default = replace(default, **of_origin)
        cfg = replace(default, **from_flags)
    identity = identify(cfg, default, from_file, from_flags)
    cfg.out_dir = cfg.out_dir or directory(cfg, default, identity["flags"])
    refuse_nonsense(cfg, from_flags)
    saved, lock = open_run(cfg)
    return cfg, identity, saved, origin, lock

def identify(cfg, default, from_file, from_flags):
    """Returns what identifies a run in tables and pictures, besides its config file, pe and step,
    as a dict that is saved with it. `flags` are those that change what it learns, apart from pe and
    the seed. `settings` is a checksum of what the config file says, because somebody may edit it
    between two runs, and their mean would then mean nothing. default has the options of a run
    without flags."""
    unnamed = MAY_CHANGE - {"data"} | {"pe", "seed"}
    if cfg.schedule == "constant":  # a run may then become longer, and stay the same run
        unnamed = unnamed | {"max_iters"}
    flags = {name: value for name, value in from_flags.items()
             if name not in unnamed and value != getattr(default, name)}
    settings = sorted((name, value) for name, value in from_file.items() if name not in unnamed)
    return {"flags": flags, "settings": zlib.crc32(repr(settings).encode())}

def directory(cfg, default, flags):
    """Returns out/<config>_<pe>, followed by the flags and by the seed if it is not that of the
    config file, as in out/quickstart_rope_n_layer=6_seed7."""
    words = [os.path.splitext(os.path.basename(cfg.config))[0] or "train", cfg.pe]
    for name, value in flags.items():
        words.append(f"{name}={os.path.basename(str(value))}")  # data may be a path
    if cfg.seed != default.seed:
        words.append(f"seed{cfg.seed}")
    name = re.sub(r"[^\w.,=+-]", "_", "_".join(words))  # sample.py gives @ a special meaning
    if len(name) > 150:  # file systems have limits
        name = f"{name[:140]}_{zlib.crc32(name.encode()):08x}"
    return os.path.join("out", name)

def refuse_nonsense(cfg, from_flags):
    """Raises Mistake or AssertionError for options that make no sense."""
    refuse_idle_options(cfg.pe, from_flags)
    with torch.device("meta"):  # which takes no memory
        GPT(replace(cfg, vocab_size=cfg.vocab_size or 1))
    for name in ("batch_size", "eval_interval", "log_interval"):
        if getattr(cfg, name) < 1:
            raise Mistake(f"{name}={getattr(cfg, name)} must be at least 1")
    if cfg.min_lr > cfg.learning_rate and cfg.schedule != "constant":
        raise Mistake(f"min_lr={cfg.min_lr} is above learning_rate={cfg.learning_rate}, so the "
                      "learning rate would rise; lower --min_lr")
    if cfg.decay_iters and cfg.schedule == "constant":
        raise Mistake(f"decay_iters={cfg.decay_iters} does nothing with schedule=constant; decay "
                      "with --schedule=linear or cosine, which is constant before")

def open_run(cfg):
    """Returns the checkpoint in the run directory, or None, and the lock of the directory, or None
    if the run has no log yet."""
    def has(name):
        return os.path.exists(os.path.join(cfg.out_dir, name))

    if has("ckpt.pt") and not cfg.resume:
        raise Mistake(f"{cfg.out_dir} already holds a run; resume it with --resume, or write "
                      "elsewhere with --out_dir=...")
    if has("results.jsonl") and not has("ckpt.pt"):
        raise Mistake(f"{cfg.out_dir} holds the results of a run whose ckpt.pt is gone; delete the "
                      "directory, or write elsewhere with --out_dir=...")
    lock = None
    if has("log.jsonl") and os.environ.get("RANK", "0") == "0":
        lock = lock_run(cfg.out_dir)  # so that nobody saves a newer checkpoint meanwhile
    return read_checkpoint(cfg.out_dir) if has("ckpt.pt") else None, lock

def lock_run(run):
    """Locks run/log.jsonl until this process ends, because two processes in one directory would
    overwrite each other's checkpoints. Returns the open file, which holds the lock."""
    file = open(os.path.join(run, "log.jsonl"), "a")
    if fcntl:
        try:
            # not lockf, whose lock ends when this process closes any handle of the file
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Mistake(f"another process is training in {run}; end it first, or write "
                          "elsewhere with --out_dir=...") from None
        except OSError:
            pass  # this file system has no locks
    return file

def open_data(cfg, processes):
    """Returns the train split and the list of splits to evaluate. If the data set is missing and
    needs no download, one process of each machine writes it while the others wait."""
    folder = locate(cfg.data)
    if processes.local_rank == 0:
        write_if_missing(cfg.data, cfg.block_size)
    processes.max(0)  # all processes wait here for that one
    return Split(folder, "train"), [Split(folder, name) for name in cfg.eval_splits.split(",")]

def choose_dtype(dtype, device):
    """Returns the name of the dtype in which layers compute. Parameters are float32 either way."""
    if dtype != "auto":
        return dtype
    has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(
        including_emulation=False)  # emulation is slower than float32
    return "bfloat16" if has_bfloat16 else "float32"

def refuse_what_does_not_fit(cfg, saved, origin, train):
    """Raises Mistake if a resumed run has other options or data than before, if a fine-tuned model
    knows another tokenizer, or if a token of the data would have no embedding."""
    if saved:
        before, now = differences(cfg, saved)
        if not train.is_same_set(saved["meta"]):
            before.append("other data")
            now.append(str(train.folder))
        if before:
            raise Mistake(f"{cfg.out_dir} was trained with {' '.join(before)}, not "
                          f"{' '.join(now)}; resume it with the former, or start another run from "
                          f"its weights with --init_from={cfg.out_dir} --out_dir=...")
    if origin and origin["meta"]["tokenizer"] != train.meta["tokenizer"]:
        raise Mistake(f"{train.folder} was tokenized with {tokenizer_name(train.meta)}, but "
                      f"{cfg.init_from} was trained with {tokenizer_name(origin['meta'])}; prepare "
                      "the data with the tokenizer of the run")
    if cfg.vocab_size < train.vocab_size:
        raise Mistake(f"vocab_size={cfg.vocab_size} is less than the {train.vocab_size} of "
                      f"{train.folder}; use --vocab_size=0")

def differences(cfg, saved):
    """Returns the options that a resumed run has changed although it must not, as two lists of
    flags: one with the values of its checkpoint, and one with the new values."""
    old = replace(cfg, **{name: value for name, value in saved["config"].items()
                          if hasattr(cfg, name)})  # a newer version may have other options
    changed = {name for name, value in asdict(old).items() if value != getattr(cfg, name)}
    changed -= MAY_CHANGE
    other_rate = None  # the first step that was taken with another learning rate
    if changed & SCHEDULE:
        other_rate = next((step for step in range(saved["step"])
                           if learning_rate(step, old) != learning_rate(step, cfg)), None)
        if other_rate is None:
            changed -= SCHEDULE
    names = [name for name in asdict(cfg) if name in changed]  # in the order of --help
    before = [f"--{name}={getattr(old, name)}" for name in names]
    now = [f"--{name}={getattr(cfg, name)}" for name in names]
    if other_rate is not None:
        now.append(f"(which changes the learning rate from step {other_rate} on)")
    return before, now

def tokenizer_name(meta):
    """Returns the name of a data set's tokenizer, or the number of its symbols."""
    tokenizer = meta["tokenizer"]
    if isinstance(tokenizer, dict):  # of a task
        return f"{len(tokenizer['symbols'])} symbols of its own"
    return repr(tokenizer)

def set_up(cfg, saved, origin, device):
    """Returns the model and its optimizer, either new or as they were saved."""
    torch.manual_seed(cfg.seed)
    model = GPT(cfg).to(device)  # a TrainConfig is also a GPTConfig
    optimizer = model.configure_optimizers(
        cfg.weight_decay, cfg.learning_rate, (cfg.beta1, cfg.beta2), device.type, cfg.pe_lr)
    if saved:
        model.load_weights(saved["model"], cfg.out_dir)
        optimizer.load_state_dict(saved["optimizer"])
    elif origin:
        model.load_weights(origin["model"], cfg.init_from)
    return model, optimizer

# --- processes, devices and signals ---------------------------------------------------------------

class Processes:
    """The processes that torchrun started for this run, or only this process if there is no
    torchrun. Each has a device and an equal part of every batch. `sum` and `max` wait for all
    processes, so all must call them at the same point of the program. For a tensor on the CPU they
    do not wait for the GPU, because gloo sends it, rather than NCCL."""

    def __init__(self, cfg):
        self.rank = int(os.environ.get("RANK", 0))  # set by torchrun
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        if cfg.batch_size % self.world:
            raise Mistake(f"batch_size={cfg.batch_size} is not divisible by the {self.world} "
                          "processes; change one of them")
        self.device = pick_device(cfg.device)
        backend = "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
        if self.world > 1:  # rank 0 may take long to prepare data or to save a checkpoint
            dist.init_process_group(backend, timeout=timedelta(minutes=30))

    def reduce(self, tensor, op):
        if self.world == 1:
            return tensor
        tensor = tensor.clone()
        dist.all_reduce(tensor, op)
        return tensor

    def sum(self, tensor):
        return self.reduce(tensor, dist.ReduceOp.SUM)

    def max(self, number):
        return self.reduce(torch.tensor(number), dist.ReduceOp.MAX).item()

    def must_agree_on(self, *values):
        """Raises Mistake if the values differ between processes. Those on other machines may read
        other files, and would then wait for each other forever, or train on different data."""
        checksum = zlib.crc32(repr(values).encode())
        if self.max(checksum) != -self.max(-checksum):  # the largest is not the smallest
            raise Mistake("the processes have different options, data or checkpoints; give all "
                          "machines the same command and data, and an out_dir that they share")

    def end(self):
        if self.world > 1:
            time.sleep(0.5)  # gloo's threads could abort if Python ended at once (torch 2.13)
            dist.destroy_process_group()

def pick_device(name):
    """Returns the torch.device "cpu", "cuda", "mps" or, for "auto", the fastest that is available.
    If there are several GPUs, each process that torchrun starts gets its own."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind in available if available[kind])
    if not available[name]:
        raise Mistake(f"device={name!r}, but PyTorch sees none; use --device=cpu")
    if name == "cuda":
        return torch.device(name, int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device(name)

def set_threads(device, n_embd):
    """Gives a small model on a CPU one thread, unless OMP_NUM_THREADS says how many. On two cores
    without other work, a second thread saves two fifths of the time. But beside one busy process,
    the threads wait for each other, and the quickstart took 14 times as long with two as with
    one."""
    if device.type == "cpu" and n_embd <= 256 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)

def to_device(device, *arrays):
    """Returns the numpy arrays as tensors on the device."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cuda":  # pinned memory is copied while the GPU computes
        return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    return [tensor.to(device) for tensor in tensors]

class StopSignal:
    """`number` is 0 until a signal asks the run to stop: SIGTERM, Ctrl-C, or SIGHUP, which a closed
    terminal sends. The run reads it between steps, when no weight is half updated."""

    def __init__(self):
        self.number = 0
        self.ends_the_run = False  # at once, because there is nothing to save
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.hear)

    def hear(self, number, frame):
        if self.ends_the_run:
            self.say(b"stopped by a signal; the same command with --resume continues")
            end_by(number)
        self.say(b"stopping after this step. Another Ctrl-C ends the run without saving")
        self.number = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the run at once

    def say(self, words):
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):  # the terminal may be closed
                os.write(2, b"\n" + words + b"\n")  # because print may be interrupted

    @contextmanager
    def at_once(self):
        """Within this context, a signal ends the process at once."""
        self.ends_the_run = True
        if self.number:  # it came just before
            self.hear(self.number, None)
        yield
        self.ends_the_run = False

def end_by(number):
    """Ends this process as a signal does that nobody handles, so that a shell loop ends too."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)

# --- during the run -------------------------------------------------------------------------------

def get_batch(split, step, cfg, processes):
    """Returns x and y, which are the part of a step's batch that belongs to this process, on its
    device, and the number of targets in the whole batch."""
    x, y = split.batch(
        step, cfg.batch_size, cfg.block_size, cfg.seed, processes.rank, processes.world)
    n_targets = cfg.batch_size * y.shape[1]
    if split.masks:
        n_targets = processes.sum(torch.tensor((y != -1).sum())).item()  # on the CPU
    x, y = to_device(processes.device, x, y)
    return x, y, max(n_targets, 1)

def refuse_nan(step, **tensors):
    """Raises Mistake if one of these numbers is not finite. Reading them waits for the GPU."""
    for name, tensor in tensors.items():
        if not tensor.isfinite():
            raise Mistake(f"the {name} became {tensor.item()} before step {step}, so these weights "
                          "are not saved; train again with a lower --learning_rate")

def save_checkpoint(run, checkpoint):
    """Writes run/ckpt.pt. A kill or a full disk leaves the previous one."""
    try:
        with whole_file(os.path.join(run, "ckpt.pt")) as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch.save hides that the disk is full
            raise error.__context__ from None
        raise

def learning_rate(step, cfg):
    """Returns the learning rate of a step, which follows a linear warm-up and then the schedule.
    cosine and linear fall from learning_rate to min_lr, which they would reach at max_iters. With
    decay_iters, they begin to fall only that many steps before max_iters."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    begin = cfg.warmup_iters
    if cfg.decay_iters:
        begin = max(begin, cfg.max_iters - cfg.decay_iters)
    t = max(0, step - begin) / max(1, cfg.max_iters - begin)  # from 0 to 1
    if cfg.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * t))
    elif cfg.schedule == "linear":
        height = 1 - t
    else:
        height = 1.0
    return cfg.min_lr + height * (cfg.learning_rate - cfg.min_lr)

def speed(model, cfg, length, world, seconds):
    """Returns the milliseconds and tokens per second of steps that take this many seconds, and mfu,
    the fraction of the peak FLOP/s, if peak_tflops is given."""
    values = dict(ms=1e3 * seconds, tokens_per_s=cfg.batch_size * length / seconds)
    if cfg.peak_tflops:
        sequences = cfg.batch_size / world
        values["mfu"] = model.estimate_mfu(sequences, seconds, 1e12 * cfg.peak_tflops, length)
    return values

# --- scores ---------------------------------------------------------------------------------------

def evaluate(model, splits, cfg, processes):
    """Returns the scores of all splits, such as {"val/loss": 1.5}. The windows are the same in
    every evaluation, and the processes divide them among themselves."""
    model.eval()
    results = {}
    count = cfg.eval_batches * cfg.batch_size or None  # None: all windows of the split
    n = cfg.micro_batch or cfg.batch_size // processes.world
    for split in splits:
        starts = split.windows(cfg.block_size, count)[processes.rank :: processes.world]
        sums = processes.sum(score_sums(model, split, starts, cfg.block_size, n))
        for name, value in scores(sums).items():
            results[f"{split.split}/{name}"] = value
    model.train()
    return results

@torch.no_grad()
def score_sums(model, split, starts, length, n):
    """Returns the sums from which `scores` computes the scores of a model on windows of a split.
    The windows begin at `starts` and have `length` targets, and the model reads n at a time. The
    sums are the loss in nats and the number of targets. In a masked set, they are followed by the
    numbers of wrong targets, of rows with a wrong target, and of rows with any target. They are
    float64 on the CPU, and those of several processes can be added up."""
    device = next(model.parameters()).device
    masked = bool(split.masks)
    sums = torch.zeros(5 if masked else 2, dtype=torch.float64)
    n = max(1, min(n, len(starts)))
    parts = []  # the sums of each batch, which are read back from the device only at the end
    for i in range(0, len(starts), n):
        # All batches have the same size, because torch.compile would compile another one anew. If
        # there are too few windows for the last one, it repeats them, and these do not count
        part = starts[i : i + n]
        x, y = split.read(np.resize(part, n), length)
        y[len(part) :] = -1
        x, y = to_device(device, x, y)
        logits, nats = model(x, y, return_logits=masked, reduction="sum")
        is_target = y != -1
        numbers = [nats, is_target.sum()]
        if masked:
            is_wrong = (logits.argmax(-1) != y) & is_target
            numbers += [is_wrong.sum(), is_wrong.any(1).sum(), is_target.any(1).sum()]
        parts.append(torch.stack(numbers))
    if parts:
        sums += torch.stack(parts).cpu().double().sum(0)
    return sums

def scores(sums):
    """Returns {name: value} of the scores in these sums, which score_sums describes: the loss in
    nats per target and, for a masked set, the percentages of wrong targets and of rows with a wrong
    target. A target is wrong if another token is more probable, so greedy decoding reproduces the
    rows without a wrong one. Raises Mistake if there was no target."""
    nats, targets, *errors = sums.tolist()
    if not targets:
        raise Mistake("there is no target to evaluate; evaluate more, or check the mask")
    if not math.isfinite(nats):
        raise Mistake(f"the loss of an evaluation is {nats}; if it was finite before, train again "
                      "with a lower --learning_rate")
    found = {"loss": nats / targets}
    if errors:
        wrong, wrong_rows, rows = errors
        found["token_error"] = 100 * wrong / targets
        found["sequence_error"] = 100 * wrong_rows / rows
    return found

# --- the log --------------------------------------------------------------------------------------

class Log:
    """The reports of the process with rank 0. Each record is a line in the terminal and a line of
    log.jsonl, and goes to Weights & Biases if wandb_project is set. Steps that were taken after the
    last checkpoint appear again once the run is resumed, and what was logged before a run starts
    anew stays. Other processes report nothing."""

    def __init__(self, cfg, identity, processes, saved, lock):
        self.cfg = cfg
        self.is_mine = processes.rank == 0
        self.wandb_run = None
        self.wandb_id = saved.get("wandb") if saved else None
        if not self.is_mine:
            return
        self.path = os.path.join(cfg.out_dir, "log.jsonl")
        if not lock:
            os.makedirs(cfg.out_dir, exist_ok=True)
            lock = lock_run(cfg.out_dir)
        if not saved and os.path.exists(os.path.join(cfg.out_dir, "ckpt.pt")):
            raise Mistake(f"another process has just trained in {cfg.out_dir}")
        self.lock = lock  # held until this process ends
        append_records(self.path, dict(
            config=asdict(cfg), **identity, from_step=saved["step"] if saved else 0,
            device=processes.device.type, torch=torch.__version__))
        if cfg.wandb_project:
            self.wandb_run = config.optional("wandb").init(
                project=cfg.wandb_project, name=os.path.basename(cfg.out_dir), config=asdict(cfg),
                id=self.wandb_id, resume="allow")  # a resumed run continues its curves
            # a resumed run goes back to its last checkpoint, but wandb's own count of steps cannot,
            # so our steps are an axis of their own
            self.wandb_run.define_metric("*", step_metric="step")
            self.wandb_id = self.wandb_run.id

    def record(self, step, values, seconds_left=None):
        """Reports the values of a step, which are a dict of numbers."""
        if not self.is_mine:
            return
        append_records(self.path, dict(step=step, **values))
        words = [f"step {step}/{self.cfg.max_iters}"]
        for name, value in values.items():
            if name == "loss":
                name = "loss of one batch"
            words.append(f"{name} {value:.5g}")
        if seconds_left is not None:
            words.append(f"left {timedelta(seconds=round(seconds_left))}")
        self.say("  ".join(words))
        if self.wandb_run:
            self.wandb_run.log(dict(step=step, **values))

    def say(self, line):
        if self.is_mine:
            with suppress(OSError):  # a closed terminal must not keep the run from saving
                print(line, flush=True)

    def say_the_end(self, key, stop):
        """Says how the run ended, and at which step the value named `key` was lowest."""
        if not self.is_mine:
            return
        path = os.path.join(self.cfg.out_dir, "ckpt.pt")
        self.say(f"stopped by a signal; {path} is saved" if stop else f"done: {path}")
        records = [record for record in read_log(self.path) if key in record]
        if records:
            best = min(records, key=lambda record: record[key])
            self.say(f"the lowest {key} was {best[key]:.4f}, at step {best['step']}")
        if self.wandb_run:
            self.wandb_run.finish()

def append_records(path, *records):
    """Appends dicts to a file of JSON lines, such as log.jsonl. A line begins with the line break
    that ends the one before, which a kill or a full disk may have cut short."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(f"\n{json.dumps(record)}" for record in records)

def read_log(path):
    """Returns the records of log.jsonl, from the last start of the run at step 0."""
    records = read_records(path)
    starts = [n for n, record in enumerate(records) if record.get("from_step") == 0]
    return records[starts[-1] if starts else 0 :]

def read_records(path):
    """Returns the dicts in a file of JSON lines. A line that is not complete is skipped."""
    records = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
    return records

if __name__ == "__main__":
    config.run(main)
