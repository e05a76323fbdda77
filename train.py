"""
Trains a GPT on one device, or on many under torchrun:

    python train.py config/quickstart.py [--key=value ...]         --help prints every key
    torchrun --standalone --nproc_per_node=8 train.py config/...   the same batches, divided up

A step's batch depends only on (seed, step), so a run that was stopped and resumed takes the same
steps as an uninterrupted one. On GPUs, or with three or more processes, rounding may differ, and if
the number of processes changes, so do rounding and dropout. On SIGTERM, Ctrl-C or a closed
terminal, a run saves a checkpoint and stops, and the same command with --resume=True resumes it. A
second Ctrl-C ends it at once, without saving (under torchrun it has 30 seconds to save).

main() is the whole training run, from top to bottom. The functions that it calls follow it: the
command line, processes and signals, data and the run directory, evaluation, and what is printed.
"""
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import checkpoint
import config
from checkpoint import load_weights, model_config, open_log, pick_device
from config import AtLeast0, AtLeast1, Below1
from data import locate, prepare_if_missing
from data.shards import Split
from data.tokenizer import identity
from eval.losses import error_sums, scores
from model import GPT, GPTConfig, check

# Denormal numbers (near 1e-40) are slow on CPUs. Without this, pe=fox takes 1.2 to 1.5 times as
# long. Threads inherit the setting, so it comes before the first computation
torch.set_flush_denormal(True)

# The peak of bfloat16 matrix products, by the whole name of a GPU, because an H200 NVL, a laptop's
# RTX 4090 and a slice of an A100 are slower than the GPU that they are named after
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12, "NVIDIA GeForce RTX 4090": 165e12,
}

@dataclass
class TrainConfig(GPTConfig):
    """Keys of train.py: first the model's (GPTConfig), then the run's."""
    vocab_size: int = 0  # number of token ids; 0: the data set's own
    config: str = ""  # the config file, set by naming it on the command line
    data: str = "stdlib"  # a data set prepared by data/NAME.py, or the path of a folder of shards
    out_dir: str = ""  # run directory; empty: out/<config>_<pe>, with data and seed if not default
    resume: bool = False  # resume from the run directory's checkpoint, if there is one
    init_from: str = ""  # fine-tuning: run directory with weights and model options; needs out_dir
    seed: int = 1337  # of weights, batches and dropout
    batch_size: AtLeast1 = 16  # sequences per step, over all processes and micro-batches
    micro_batch: int = 0  # sequences per forward pass; 0: all sequences of the process
    max_iters: int = 1000  # training steps
    learning_rate: AtLeast0 = 1e-3  # after warm-up
    min_lr: AtLeast0 = 0.0  # cosine and linear reach this at max_iters
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # constant ignores min_lr
    warmup_iters: int = 0  # steps of linear warm-up
    weight_decay: AtLeast0 = 0.1  # on the weights of linear and embedding layers
    beta1: Below1 = 0.9  # AdamW: decay rate of the running mean of the gradient
    beta2: Below1 = 0.95  # AdamW: decay rate of the running mean of the squared gradient
    grad_clip: AtLeast0 = 1.0  # maximum norm of the gradient; 0: no clipping
    eval_interval: AtLeast1 = 500  # steps between evaluations
    eval_batches: int = 64  # batches of batch_size sequences per split; 0: the whole split
    eval_splits: str = "val"  # comma-separated splits to evaluate; the first decides "best"
    checkpoint_interval: int = 0  # steps between checkpoints; 0: eval_interval
    log_interval: AtLeast1 = 10  # steps between log lines
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: the fastest available
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 if a CUDA GPU has it
    compile: bool = False  # torch.compile: a slow start, but faster steps
    kernels: Literal["auto", "off"] = "off"  # auto: Triton in each layer that the kernels support
    wandb_project: str = ""  # also log to this Weights & Biases project

def main(argv):
    cfg = read_config(argv)
    processes = Processes(cfg)
    device = processes.device

    # data
    train, evals = open_data(cfg, processes)
    cfg.vocab_size = cfg.vocab_size or train.vocab_size

    def get_batch(step):  # this process's part of a step's batch
        return to_device(device, train.batch(step, cfg.batch_size, cfg.block_size, cfg.seed,
                                             processes.rank, processes.world))

    # model and optimizer
    torch.manual_seed(cfg.seed)
    raw_model = GPT(cfg).to(device)  # a TrainConfig is also a GPTConfig
    origin = []  # in fine-tuning, the history of the run that the weights come from
    if cfg.init_from and not checkpoint.exists(cfg.out_dir):
        origin = load_origin(raw_model, cfg, train, processes)
    dtype = choose_dtype(cfg, device)
    attention = "attention: pytorch (kernels=off)"
    if cfg.kernels == "auto":
        attention = raw_model.use_kernels(dtype)
    optimizer = raw_model.configure_optimizers(
        cfg.weight_decay, cfg.learning_rate, (cfg.beta1, cfg.beta2), device.type)

    # run directory
    log = Log(cfg, processes)  # locks the run directory
    state = load_run(cfg, raw_model, optimizer, train, processes)
    step = state["step"]
    best = state["best"]
    # which options the weights were trained with, so that reports average only equal runs
    history = checkpoint.history(
        state["history"] or origin, step, asdict(cfg), dtype=str(dtype), data=train.fingerprint,
        kernels=[block.attn.use_triton for block in raw_model.h])
    x, y = get_batch(step)
    length = x.size(1)  # block_size in a stream of text; the rows of a task have their own length
    log.start(cfg, state["wandb"], from_step=step, length=length, history=history)

    def save():
        if processes.rank == 0:
            checkpoint.write(cfg.out_dir, dict(
                model=raw_model.state_dict(), optimizer=optimizer.state_dict(), step=step,
                config=asdict(cfg), meta=train.meta, history=history, best=best,
                wandb=log.wandb_id), log.file)

    # the model that runs
    say_what_runs(cfg, raw_model, dtype, state, processes)
    processes.say(attention)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
    model = torch.compile(raw_model) if cfg.compile else raw_model
    ddp = processes.world > 1
    ddp_model = model
    if ddp:  # the gradients are views of the buffers that DDP sends, so there is no second copy
        ddp_model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    # training
    stop_signal = StopSignal(processes)
    logged_at = None  # when the last log line was printed
    pause_seconds = 0.0  # spent since then on saving and evaluating
    eval_seconds = 0.0  # how long the last evaluation took, including the save before it
    while True:
        # Each round computes the loss of the current weights and its gradient, saves and evaluates
        # these weights if that is due, and only then updates them. The last round updates nothing

        # Only dropout draws random numbers here. Its seed depends on the step, so that a resumed
        # run draws the same numbers, and on the rank, so that processes draw different ones
        torch.manual_seed(cfg.seed + step * processes.world + processes.rank)

        # The loss is the mean over all targets of the batch, and -1 marks tokens that are not
        # targets. Micro-batches and processes may hold different numbers of targets, so the mean of
        # each part (0 if it has none) is weighted by its fraction of the targets
        n_targets = processes.sum((y != -1).sum()).clamp(min=1)
        loss = torch.zeros((), device=device)
        n = cfg.micro_batch or len(x)
        for i in range(0, len(x), n):
            x_part, y_part = x[i : i + n], y[i : i + n]
            if ddp:  # add up the gradients of all processes only once, after the last part
                ddp_model.require_backward_grad_sync = i + n >= len(x)
            with autocast:
                mean = ddp_model(x_part, y_part, return_logits=False)[1]
                part = mean * (y_part != -1).sum() / n_targets
            (part * processes.world).backward()  # because DDP takes the mean over processes
            loss += part.detach()
        next_batch = get_batch(step + 1)  # while the GPU is computing
        loss = processes.sum(loss).item()
        refuse_nan("loss", loss, step, cfg)

        # The loss is finite, so these weights may be saved. They are saved before an evaluation,
        # because it can take a long time, and at the end once more after it, as `best` may be new
        pause_start = time.perf_counter()
        last = step >= cfg.max_iters
        stop = stop_signal.heard()
        is_due = step > 0 and step % (cfg.checkpoint_interval or cfg.eval_interval) == 0
        if last or stop or is_due:
            save()
        if not stop and (last or step % cfg.eval_interval == 0):
            model.eval()
            with autocast:
                results = evaluate(model, evals, cfg, processes, stop_signal)
            model.train()
            stop = stop_signal.heard()
            if results:  # an evaluation that a signal has interrupted returns None
                best = record_results(results, best, step, cfg, log, processes)
            if last or stop:
                save()
            if logged_at or not cfg.compile:  # before the first log line, it may include compiling
                eval_seconds = time.perf_counter() - pause_start
        if last or stop:
            break
        pause_seconds += time.perf_counter() - pause_start

        lr = learning_rate(step, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if cfg.grad_clip:
            torch.nn.utils.clip_grad_norm_(raw_model.parameters(), cfg.grad_clip)
        optimizer.step()
        raw_model.clamp_parameters()  # pope's delta stays within its bounds
        optimizer.zero_grad()
        x, y = next_batch
        step += 1

        if step % cfg.log_interval == 0:
            values = dict(step=step, loss=loss, lr=lr)  # the loss is from before the update
            now = time.perf_counter()
            if logged_at:  # the first line has no speed, because the first step compiles the model
                seconds = (now - logged_at - pause_seconds) / cfg.log_interval
                values.update(speed(raw_model, cfg, processes, length, seconds))
            logged_at = now
            pause_seconds = 0.0
            log.record(**values)
            processes.say(log_line(values, cfg, eval_seconds))

    log.record(ended=step, best=best)
    processes.say(closing_lines(cfg, step, best, stop))
    log.finish()
    processes.end()
    if stop:
        stop_signal.end_process(stop)

# --- the command line -----------------------------------------------------------------------------

def read_config(argv):
    """Returns the TrainConfig of a command line. Raises ValueError for a mistake in it."""
    if not argv:
        raise ValueError("nothing to train; try python train.py config/quickstart.py, or --help")
    cfg = config.load(TrainConfig, argv)
    if cfg.init_from:  # parsed again, with the model options of that run as defaults
        if not cfg.out_dir:
            raise ValueError(f"init_from={cfg.init_from!r} needs a directory for the new run; name "
                             "it with --out_dir=...")
        run = cfg.init_from
        if checkpoint.exists(cfg.out_dir):
            run = cfg.out_dir  # which has the same options, and the origin may be gone by now
        origin = checkpoint.read(run)
        cfg = config.load(TrainConfig, argv, **asdict(model_config(origin)))
        cfg.init_from = os.path.normpath(cfg.init_from)  # resuming compares it
        checkpoint.keep_trained_length(cfg, origin)
    check(cfg)
    if cfg.min_lr > cfg.learning_rate and cfg.schedule != "constant":
        raise ValueError(f"min_lr={cfg.min_lr} is above learning_rate={cfg.learning_rate}, so the "
                         "learning rate would rise; lower --min_lr")
    cfg.out_dir = cfg.out_dir or default_directory(cfg)
    return cfg

def default_directory(cfg):
    """Returns out/<config>_<pe>, such as out/quickstart_pope. The data and the seed are added if
    they are not those of the config file, as in out/quickstart_input_pope_seed7."""
    default = config.load(TrainConfig, [cfg.config] if cfg.config else [])
    name = os.path.splitext(os.path.basename(cfg.config))[0] or "train"
    if cfg.data != default.data:
        folder = os.path.basename(os.path.normpath(cfg.data))
        name += "_" + re.sub(r"[^\w.,=+-]", "_", folder)  # sample.py gives @ a special meaning
    name += "_" + cfg.pe
    if cfg.seed != default.seed:
        name += f"_seed{cfg.seed}"
    return os.path.join("out", name)

# --- processes, signals and devices ---------------------------------------------------------------

class Processes:
    """The processes that torchrun started for this run, or only this one. Each has a device and a
    part of every batch. sum and max wait for all processes, so all must call them at the same point
    in the program."""

    def __init__(self, cfg):
        self.rank = int(os.environ.get("RANK", 0))  # set by torchrun
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        if cfg.batch_size % self.world:
            raise ValueError(f"batch_size={cfg.batch_size} is not divisible by the {self.world} "
                             "processes; change one of them")
        self.device = pick_device(cfg.device, int(os.environ.get("LOCAL_RANK", 0)))
        self.device_name = self.device.type
        backend = "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self.device_name = torch.cuda.get_device_name(self.device)
            backend = "nccl"
        if self.world > 1:  # the others wait while rank 0 prepares data or saves a checkpoint
            dist.init_process_group(backend, timeout=timedelta(minutes=30))

    def reduce(self, tensor, op):
        if self.world > 1:
            tensor = tensor.to(self.device)
            dist.all_reduce(tensor, op)
        return tensor

    def sum(self, tensor):
        return self.reduce(tensor, dist.ReduceOp.SUM)

    def max(self, number):
        return self.reduce(torch.tensor(number), dist.ReduceOp.MAX).item()

    def say(self, line):
        """Prints a line in one process only, and nothing once the terminal or a pipe is closed."""
        if self.rank == 0:
            try:
                print(line, flush=True)
            except OSError:
                sys.stdout = open(os.devnull, "w")

    def end(self):
        if self.world > 1:
            time.sleep(0.5)  # gloo's threads could abort if Python ended at once (torch 2.13)
            dist.destroy_process_group()

class StopSignal:
    """Remembers a signal that asks the run to stop: SIGTERM, Ctrl-C, or SIGHUP, which a closed
    terminal sends. The run checks for it between steps and after each batch of an evaluation, and
    never while the weights are half updated."""

    def __init__(self, processes):
        self.processes = processes
        self.number = 0
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.hear)

    def hear(self, number, frame):
        if self.number == 0 and self.processes.rank == 0 and sys.stderr:  # it may be closed
            try:
                os.write(2, b"\nthe run is stopping after this step or batch; "
                            b"without torchrun, Ctrl-C ends it at once, unsaved\n")
            except OSError:
                pass  # the terminal is closed
        self.number = max(self.number, number)
        # From now on, Ctrl-C ends the run at once, without saving. A second SIGTERM does not,
        # because it may be the first one again: torchrun forwards it, and a scheduler may also send
        # it to all processes
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def heard(self):
        """Returns the signal that any process has received, or 0. All processes get the same
        answer and stop at the same step, since any that carried on would wait forever."""
        return self.processes.max(self.number)

    def end_process(self, number):
        """Ends this process as the signal would have done, so that a shell script stops too."""
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

def choose_dtype(cfg, device):
    """Returns the dtype in which layers compute. The parameters are float32 either way."""
    has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(
        including_emulation=False)  # emulation is slower than float32
    if cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and has_bfloat16):
        return torch.bfloat16
    return torch.float32

def to_device(device, arrays):
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cuda":  # pinned memory is copied while the GPU computes
        return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    return [tensor.to(device) for tensor in tensors]

# --- data and run directory -----------------------------------------------------------------------

def open_data(cfg, processes):
    """Returns the train split and the list of splits to evaluate. If the data set is missing and
    needs no download, one process writes it while the others wait."""
    folder = locate(cfg.data)
    if processes.rank == 0:
        prepare_if_missing(cfg.data, folder)
    processes.max(0)  # all processes wait here for that one
    train = Split(folder, "train")
    evals = [Split(folder, name) for name in cfg.eval_splits.split(",")]
    for split in (train, *evals):
        split.windows(cfg.block_size, 1)  # raises ValueError if block_size does not fit
    if 0 < cfg.vocab_size < train.vocab_size:
        raise ValueError(f"vocab_size={cfg.vocab_size} is less than the {train.vocab_size} of "
                         f"{folder}; use vocab_size=0, or data with the tokenizer of init_from")
    return train, evals

def load_origin(model, cfg, train, processes):
    """Loads the weights of the run init_from, and prints which of its options change. Returns the
    history of the new run up to now. Raises ValueError if that run had another tokenizer."""
    origin = checkpoint.read(cfg.init_from)
    theirs = origin["meta"]["tokenizer"]
    if identity(theirs) != identity(train.meta["tokenizer"]):
        raise ValueError(f"{cfg.init_from} was trained with the tokenizer {theirs!r}, but "
                         f"{cfg.data!r} has {train.meta['tokenizer']!r}; prepare the data with "
                         "the tokenizer of that run")
    load_weights(model, origin, cfg.init_from)
    say_changes(cfg, asdict(model_config(origin)), processes)
    experiment = checkpoint.experiment(origin["history"], origin["step"])
    return [[-1, [experiment, origin["step"]]]]  # see checkpoint.history

def load_run(cfg, model, optimizer, train, processes):
    """Loads the run's checkpoint, if there is one, into the model and the optimizer. Returns step,
    best, config, history and wandb from it, or their initial values for a new run."""
    state = dict(step=0, best=None, config={}, history=[], wandb=None)
    if checkpoint.exists(cfg.out_dir):
        if not cfg.resume:
            raise ValueError(f"{cfg.out_dir} already holds a run; resume it with --resume=True, or "
                             "write elsewhere with --out_dir=...")
        saved = checkpoint.read(cfg.out_dir, processes.device)
        check_same_run(cfg, saved, train)
        load_weights(model, saved, cfg.out_dir)
        # Only Adam's state comes from the checkpoint. Settings such as weight_decay are those of
        # this command
        restored = optimizer.state_dict()
        restored["state"] = saved["optimizer"]["state"]
        optimizer.load_state_dict(restored)
        # The tensors are not returned, because main would hold a second copy of them
        state = {key: saved.get(key) for key in state}
        before = state["config"]
        same_split = before["eval_splits"].split(",")[0] == cfg.eval_splits.split(",")[0]
        if not same_split or before["eval_batches"] != cfg.eval_batches:
            state["best"] = None  # losses of different evaluations are not comparable
    check_agreement(cfg, train, state["step"], processes)
    return state

def check_same_run(cfg, saved, train):
    """Raises ValueError if the checkpoint has another origin, model or data set, or other batches.
    The folder of the data may have been moved or renamed."""
    fixed = {key: saved["config"][key] for key in ("init_from", "batch_size", "seed")}
    fixed.update(asdict(model_config(saved)))
    for key, saved_value in fixed.items():
        value = getattr(cfg, key)
        if value != saved_value:
            raise ValueError(f"{cfg.out_dir} was trained with {key}={saved_value!r}, not "
                             f"{value!r}; keep it as it was, or write elsewhere with "
                             "--out_dir=...")
    data = saved["config"]["data"]
    differ = train.changes(saved["meta"])
    if differ:
        raise ValueError(f"{cfg.out_dir} was trained on data={data!r}, but {cfg.data!r} differs in "
                         f"{', '.join(differ)}; to fine-tune on it, use "
                         f"--init_from={shlex.quote(cfg.out_dir)} and another --out_dir")

def check_agreement(cfg, train, step, processes):
    """Raises ValueError if the processes, which may run on several machines, differ in their
    settings, data or checkpoint. Otherwise they would wait for each other forever, or mix runs."""
    checksum = zlib.crc32(repr((asdict(cfg), train.meta, step)).encode())
    if processes.max(checksum) != -processes.max(-checksum):  # the largest is not the smallest
        raise ValueError(f"the processes have different settings, copies of {train.folder} or "
                         f"checkpoints in {cfg.out_dir}; start all with the same command and the "
                         "same data, and put out_dir on storage that all machines share")

class Log:
    """A run's records: the lines of log.jsonl, which also go to Weights & Biases if wandb_project
    is set. Steps that were taken after the last checkpoint appear again if the run is resumed, and
    all steps do if it starts over. Only one process writes. In the others, record does nothing."""

    def __init__(self, cfg, processes):
        self.writes = processes.rank == 0
        self.device_name = processes.device_name
        self.file = open_log(cfg.out_dir) if self.writes else None
        self.wandb_run = None
        self.wandb_id = None

    def start(self, cfg, wandb_id, **values):
        """Records the options and what else a report needs to know of the run, and opens a W&B run,
        or resumes the one with this id."""
        self.record(config=asdict(cfg), **values, device=self.device_name, torch=torch.__version__)
        if self.writes and cfg.wandb_project:
            import wandb
            self.wandb_run = wandb.init(
                project=cfg.wandb_project, name=os.path.basename(cfg.out_dir), config=asdict(cfg),
                id=wandb_id, resume="allow")
            self.wandb_id = self.wandb_run.id

    def record(self, **values):
        if self.writes:
            try:
                self.file.write(json.dumps(values).encode() + b"\n")
                self.file.flush()
            except OSError as error:
                raise OSError(f"{self.file.name} could not be written ({error}); once it can be, "
                              "resume with --resume=True") from error
        if self.wandb_run and "step" in values:
            step = values.pop("step")
            split = values.pop("split", "step")  # the prefix of training losses at W&B
            self.wandb_run.log({f"{split}/{key}": value for key, value in values.items()}, step)

    def finish(self):
        if self.wandb_run:
            self.wandb_run.finish()

# --- training and evaluation ----------------------------------------------------------------------

def learning_rate(step, cfg):
    """Returns the learning rate of a step, which follows a linear warm-up and then the schedule.
    cosine and linear fall from learning_rate to min_lr, which they would reach at max_iters."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    t = (step - cfg.warmup_iters) / max(1, cfg.max_iters - cfg.warmup_iters)  # from 0 to 1
    if cfg.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * t))
    elif cfg.schedule == "linear":
        height = 1 - t
    else:
        height = 1.0
    return cfg.min_lr + height * (cfg.learning_rate - cfg.min_lr)

def refuse_nan(name, loss, step, cfg):
    """Raises ValueError if a loss is not finite."""
    if not math.isfinite(loss):
        kept = "there is no checkpoint yet"
        if checkpoint.exists(cfg.out_dir):
            kept = f"{os.path.join(cfg.out_dir, 'ckpt.pt')} is the last checkpoint"
        raise ValueError(f"{name} is {loss} at step {step}; try a lower learning_rate; {kept}")

def evaluate(model, splits, cfg, processes, stop_signal):
    """Returns {split: its scores}, or None if a signal interrupts it. The windows are the same in
    every evaluation, and the processes divide them among themselves."""
    results = {}
    count = cfg.eval_batches * cfg.batch_size or None  # None: all windows of the split
    n = cfg.micro_batch or cfg.batch_size // processes.world
    for split in splits:
        starts = split.windows(cfg.block_size, count)
        sums = torch.zeros(5, dtype=torch.float64)  # see error_sums
        for i in range(0, len(starts), processes.world * n):
            first = i + processes.rank * n
            mine = starts[first : first + n]
            if len(mine):
                x, y = to_device(processes.device, split.read(mine, cfg.block_size))
                sums += error_sums(model, x, y)
            if stop_signal.heard():  # all processes hear it after the same batch
                return None
        results[split.split] = scores(processes.sum(sums), masked=split.meta["loss"] == "mask")
    return results

def record_results(results, best, step, cfg, log, processes):
    """Logs and prints the scores of an evaluation. Returns the best one so far, which is decided by
    the first split."""
    for split, result in results.items():
        refuse_nan(f"{split} loss", result["loss"], step, cfg)
        log.record(step=step, split=split, **result)
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in result.items())
        processes.say(f"step {step}: {split} {numbers}")
    first = cfg.eval_splits.split(",")[0]
    loss = results[first]["loss"]
    if best is None or loss < best["loss"]:
        best = dict(step=step, split=first, loss=loss)
    return best

# --- what is printed ------------------------------------------------------------------------------

def say_what_runs(cfg, model, dtype, state, processes):
    """Prints the model's size, data, device and directory, and what has changed on resuming."""
    processes.say(f"{model.get_num_params() / 1e6:.2f}M parameters, pe={cfg.pe}, "
                  f"data={cfg.data}, {processes.world} x {processes.device.type}, "
                  f"{str(dtype).split('.')[1]}, {cfg.out_dir}, from step {state['step']}")
    say_changes(cfg, state["config"], processes)
    if state["config"] and state["step"] >= cfg.max_iters:
        processes.say(f"nothing is left to train, because max_iters={cfg.max_iters}; raise it, or "
                      "write another run elsewhere with --out_dir=...")

def say_changes(cfg, before, processes):
    for key, value in before.items():
        if key != "resume" and getattr(cfg, key, value) != value:
            processes.say(f"{key}={getattr(cfg, key)!r} from here on; it was {value!r}")

def speed(model, cfg, processes, length, seconds):
    """Returns ms and tokens_per_s of a step that takes this many seconds, and mfu, the fraction of
    the peak FLOP/s, if PEAK_FLOPS lists the GPU."""
    values = dict(ms=1e3 * seconds, tokens_per_s=cfg.batch_size * length / seconds)
    peak = PEAK_FLOPS.get(processes.device_name)
    if peak:
        sequences = cfg.batch_size / processes.world
        values["mfu"] = model.estimate_mfu(sequences, seconds, peak, length)
    return values

def log_line(values, cfg, eval_seconds):
    """Returns a line such as `step 20/1600 loss 3.1416 lr 1.00e-03 52 ms 19,692 tokens/s left
    0:01:22`. The first line of a command has no speed. eval_seconds is how long the last evaluation
    took."""
    step = values["step"]
    line = f"step {step}/{cfg.max_iters} loss {values['loss']:.4f} lr {values['lr']:.2e}"
    if "ms" not in values:
        return line
    line += f" {values['ms']:.0f} ms {values['tokens_per_s']:,.0f} tokens/s"
    if "mfu" in values:
        line += f" mfu {100 * values['mfu']:.0f}%"
    steps = cfg.max_iters - step
    seconds = steps * values["ms"] / 1e3 + math.ceil(steps / cfg.eval_interval) * eval_seconds
    return f"{line} left {timedelta(seconds=round(seconds))}"

def closing_lines(cfg, step, best, stop):
    """Returns two lines that say how the run ended, its best evaluation and the next command."""
    path = os.path.join(cfg.out_dir, "ckpt.pt")
    line = f"done: {path}"
    then = f"python sample.py {shlex.quote(cfg.out_dir)}"
    if stop:
        line = f"stopped by a signal at step {step}: {path}"
        then = "the same command with --resume=True"
    if best:
        line += f", best {best['split']} loss {best['loss']:.4f} was at step {best['step']}"
        if best["step"] != step:
            line += " (those weights are not kept)"
    return f"{line}\nnext: {then}"

if __name__ == "__main__":
    try:
        record(main)(sys.argv[1:])  # under torchrun, the first process that fails says why
    except (ValueError, OSError, ImportError, MemoryError, RuntimeError) as error:
        line = config.last_line(error)  # raises the error again if it is a bug
        if config.ran_out_of_memory(error):
            line = f"out of memory ({line}); try a smaller --micro_batch or model"
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun prints this, and no traceback of it
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as report:
                json.dump(dict(message=line, timestamp=int(time.time())), report)
        sys.exit(line)
    except KeyboardInterrupt:
        config.end_by_ctrl_c("stopped before training; give the same command again")
