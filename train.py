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
import math
import os
import signal
import threading
import time
import zlib
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import config
from config import Count, Fraction, Mistake, NotNegative, devices, require, runs
from data import locate, write_if_missing
from data.shards import Split
from model import GPT, GPTConfig, refuse_idle_options


@dataclass
class TrainConfig(GPTConfig):
    """The options of a run: those of its model (GPTConfig), and then these."""
    vocab_size: int = 0  # number of token ids; 0: as many as the data set has
    config: str = ""  # a file of options, named without a flag
    title: str = ""  # of the experiment, in pictures; a config file sets it
    data: str = "stdlib"  # a data set prepared by data/NAME.py, or the path of a folder of shards
    out_dir: str = ""  # run directory; empty: out/<config>_<pe>, followed by the other flags
    resume: bool = False  # resume the run in the run directory, if there is one
    init_from: str = ""  # fine-tuning: a run directory, whose weights and model options it takes
    seed: int = 1337  # of weights, batches and dropout
    batch_size: Count = 16  # sequences per step, over all processes and micro-batches
    micro_batch: int = 0  # sequences per forward pass; 0: all sequences of the process
    max_iters: int = 1000  # training steps
    learning_rate: NotNegative = 1e-3  # after warm-up
    pe_lr: NotNegative = 1.0  # rate of a method's own parameters / learning_rate; t5: 10 is better
    min_lr: NotNegative = 0.0  # cosine and linear reach this at max_iters
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # constant ignores min_lr
    warmup_iters: int = 0  # steps of linear warm-up
    decay_iters: int = 0  # cosine and linear fall during the last so many steps; 0: from warm-up on
    weight_decay: NotNegative = 0.1  # on the weights of linear and embedding layers
    beta1: Fraction = 0.9  # AdamW: decay rate of the running mean of the gradient
    beta2: Fraction = 0.95  # AdamW: decay rate of the running mean of the squared gradient
    grad_clip: NotNegative = 1.0  # maximum norm of the gradient; 0: no clipping
    eval_interval: Count = 500  # steps between evaluations
    eval_batches: int = 64  # batches of batch_size sequences per split; 0: the whole split
    eval_splits: str = "val"  # comma-separated; a run says when the loss of the first was lowest
    checkpoint_interval: int = 0  # steps between checkpoints; 0: only one before each evaluation
    log_interval: Count = 10  # steps between log lines, which show the loss of one batch
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: the fastest available
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 if a CUDA GPU has it
    compile: bool = False  # torch.compile: a slow start, but faster steps
    kernels: Literal["auto", "off"] = "off"  # auto: Triton in each layer that the kernels support
    peak_tflops: NotNegative = 0.0  # of a GPU (A100: 312, H100: 989), to log the fraction used
    wandb_project: str = ""  # also log to this Weights & Biases project

def main(words):
    cfg, identity, origin = read_options(words)
    saved, log_file = runs.open_run(cfg.out_dir, cfg.resume)
    processes = Processes(cfg)
    train, evals = open_data(cfg, processes)
    fill_in(cfg, train, processes.device)
    refuse_what_does_not_fit(cfg, saved, origin, train)
    step = saved["step"] if saved else 0
    processes.must_agree_on(asdict(cfg), train.meta, step)
    model, optimizer = set_up(cfg, saved, origin, processes.device)
    # a step for batches of any size would be slower
    compiled = torch.compile(model, dynamic=False) if cfg.compile else model
    parallel = processes.wrap(compiled)
    batch = get_batch(train, step, cfg, processes)
    log = Log(cfg, identity, processes, saved, log_file)
    log.introduce(model, step)
    saved_step = step if saved else None  # the step of ckpt.pt
    del saved, origin  # their tensors would stay in memory
    loss = norm = torch.zeros(())  # of the last step

    with closing(log), StopSignal() as stop_signal:
        while True:
            stop = processes.max(stop_signal.number)
            last = step >= cfg.max_iters
            evaluates = not stop and (last or step % cfg.eval_interval == 0)
            is_due = cfg.checkpoint_interval and step % cfg.checkpoint_interval == 0

            # The weights are saved before they are evaluated, because that can take long. A new run
            # has nothing to lose yet
            if (stop or last or step > 0 and (evaluates or is_due)) and step != saved_step:
                refuse_nan(step, loss=processes.sum(loss), gradient=norm,
                           weights=get_total_norm(model.parameters()))
                if processes.rank == 0:
                    runs.save_checkpoint(cfg.out_dir, dict(
                        model=model.state_dict(), optimizer=optimizer.state_dict(), step=step,
                        config=asdict(cfg), meta=train.meta, wandb=log.wandb_id, **identity))
                saved_step = step
                log.start_clock(step)
            if evaluates:
                with stop_signal.at_once():
                    log.record(step, evaluate(compiled, evals, cfg, processes))
                log.start_clock(step)
            if stop or last:
                break

            # Up to the log line, a step reads nothing back from the GPU, so the CPU does not wait
            loss = backward(parallel, batch, step, cfg, processes)
            batch = get_batch(train, step + 1, cfg, processes)  # while the GPU computes
            lr = learning_rate(step, cfg)
            norm = update(model, optimizer, lr, cfg.grad_clip)
            step += 1
            if step % cfg.log_interval == 0:
                mean_loss = processes.sum(loss)  # of this step's batch, before the update
                refuse_nan(step, loss=mean_loss, gradient=norm)
                log.record(step, dict(loss=mean_loss.item(), lr=lr,
                                      **log.speed(step, model, batch)))

    log.say_the_end(f"{evals[0].split}/loss", stop)
    processes.end()
    if stop:
        signal.raise_signal(stop)  # which now does what it did before the run

# --- a step ---------------------------------------------------------------------------------------

def get_batch(split, step, cfg, processes):
    """Returns x and y, which are the part of a step's batch that belongs to this process, on its
    device, and the number of targets in the whole batch."""
    x, y = split.batch(
        step, cfg.batch_size, cfg.block_size, cfg.seed, processes.rank, processes.world)
    n_targets = cfg.batch_size * y.shape[1]
    if split.masks:
        n_targets = processes.sum(torch.tensor((y != -1).sum())).item()  # on the CPU
    x, y = devices.to_device(processes.device, x, y)
    return x, y, max(n_targets, 1)

def backward(model, batch, step, cfg, processes):
    """Computes the gradients of a batch, one micro-batch after the other. Returns this process's
    part of the loss, which is the mean over all targets of the batch."""
    if cfg.dropout or cfg.random_positions:  # nothing else draws random numbers
        torch.manual_seed(random_seed(cfg.seed, step, processes.rank))
    x, y, n_targets = batch
    loss = torch.zeros((), device=processes.device)
    n = cfg.micro_batch or len(x)
    for i in range(0, len(x), n):
        if processes.world > 1:  # add up the gradients of all processes only after the last part
            model.require_backward_grad_sync = i + n >= len(x)
        with autocast(cfg, processes.device):
            _, nats = model(x[i : i + n], y[i : i + n], return_logits=False, reduction="sum")
        # Micro-batches and processes may hold different numbers of targets, so each sum is divided
        # by the number in the whole batch
        part = nats / n_targets
        (part * processes.world).backward()  # because DDP takes the mean over processes
        loss += part.detach()
    return loss

def update(model, optimizer, lr, grad_clip):
    """Takes a step of AdamW. Returns the norm of the gradient before it is clipped."""
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if grad_clip:
        clip_grads_with_norm_(model.parameters(), grad_clip, norm)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)  # checkpoints of older versions have none
    optimizer.step()
    model.clamp_parameters()  # pope's delta stays within its bounds
    optimizer.zero_grad()
    return norm

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

def random_seed(seed, step, rank):
    """Returns the seed of dropout and of random positions in a step. It depends on the step, so
    that a resumed run draws the same numbers, and on the rank, so that processes draw different
    ones. No two runs share the numbers of their steps, as they would if these were added up."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])

def autocast(cfg, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16")

def refuse_nan(step, **tensors):
    """Raises Mistake if one of these numbers is not finite. Reading them waits for the GPU."""
    for name, tensor in tensors.items():
        require(tensor.isfinite(), f"the {name} became {tensor.item()} before step {step}, so "
                "these weights are not saved; train again with a lower --learning_rate")

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
        with autocast(cfg, processes.device):
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
        x, y = devices.to_device(device, x, y)
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

# --- before the first step ------------------------------------------------------------------------

def read_options(words):
    """Returns the options of a command line, what identifies the run in tables (runs.identify), and
    the checkpoint of the run that init_from names, or None."""
    require(words, "nothing to train; try python train.py config/quickstart.py, or --help")
    from_file, from_flags = config.read(TrainConfig, words)
    default = TrainConfig(**from_file)
    cfg = replace(default, **from_flags)
    origin = resumed = None
    of_model = [field.name for field in fields(GPTConfig)]
    if cfg.init_from:
        cfg.init_from = from_flags["init_from"] = os.path.normpath(cfg.init_from)
        if cfg.resume and cfg.out_dir and os.path.exists(os.path.join(cfg.out_dir, "ckpt.pt")):
            # the run that it started from may be gone, but its own checkpoint has the same options
            resumed = runs.read_checkpoint(cfg.out_dir)
            of_origin = {name: resumed["config"][name] for name in of_model
                         if name in resumed["config"]}
        else:
            origin = runs.read_checkpoint(cfg.init_from)
            of_origin = runs.model_options(origin)
        for name in {"block_size", "dropout"} & from_file.keys():  # the weights fit any of these
            of_origin.pop(name, None)
        default = replace(default, **of_origin)
        cfg = replace(default, **from_flags)
    identity = runs.identify(cfg, default, from_file, from_flags)
    if resumed:  # its options hide which flags of the model it was started with
        named = identity["flags"].keys() | (resumed.get("flags", {}).keys() & set(of_model))
        identity["flags"] = {name: value for name, value in from_flags.items() if name in named}
    cfg.out_dir = os.path.normpath(
        cfg.out_dir or runs.directory(cfg, default, identity["flags"]))
    refuse_nonsense(cfg, from_flags)
    return cfg, identity, origin

def refuse_nonsense(cfg, from_flags):
    """Raises Mistake for options that make no sense together."""
    refuse_idle_options(cfg.pe, from_flags)
    with torch.device("meta"):  # which takes no memory
        GPT(replace(cfg, vocab_size=cfg.vocab_size or 1))
    if cfg.schedule == "constant":
        require(not cfg.decay_iters, f"decay_iters={cfg.decay_iters} does nothing with schedule="
                "constant; decay with --schedule=linear or cosine, which is constant before")
    else:
        require(cfg.min_lr <= cfg.learning_rate, f"min_lr={cfg.min_lr} is above learning_rate="
                f"{cfg.learning_rate}, so the learning rate would rise; lower --min_lr")

def open_data(cfg, processes):
    """Returns the train split and the list of splits to evaluate. If the data set is missing and
    needs no download, one process of each machine writes it while the others wait."""
    if processes.local_rank == 0:
        write_if_missing(cfg.data)
    processes.max(0)  # all processes wait here for that one
    folder = locate(cfg.data)
    return Split(folder, "train"), [Split(folder, name) for name in cfg.eval_splits.split(",")]

def fill_in(cfg, train, device):
    """Sets the options that depend on the data and the device. dtype is that in which layers
    compute. Parameters are float32 either way."""
    cfg.vocab_size = cfg.vocab_size or train.vocab_size
    if cfg.dtype == "auto":
        has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(
            including_emulation=False)  # emulation is slower than float32
        cfg.dtype = "bfloat16" if has_bfloat16 else "float32"

def refuse_what_does_not_fit(cfg, saved, origin, train):
    """Raises Mistake if a resumed run has other options or data than before, if a fine-tuned model
    knows another tokenizer, or if a token of the data would have no embedding."""
    if saved:
        source = saved["config"].get("init_from", "")  # the run that it started from
        has_moved = source and cfg.init_from and not os.path.exists(os.path.join(source, "ckpt.pt"))
        require(source == cfg.init_from or has_moved,
                f"{cfg.out_dir} was started with --init_from={source or 'nothing'}, not with "
                f"--init_from={cfg.init_from or 'nothing'}; give it the former, or write elsewhere "
                "with --out_dir=...")
        before, now = runs.differences(cfg, saved, learning_rate)
        if not train.is_same_set(saved["meta"]):
            before.append("other data")
            now.append(str(train.folder))
        require(not before, f"{cfg.out_dir} was trained with {' '.join(before)}, not "
                f"{' '.join(now)}; resume it with the former, or start another run from its "
                f"weights with --init_from={cfg.out_dir} --out_dir=...")
    if origin:
        runs.require_same_tokenizer(train, origin["meta"], cfg.init_from)
    require(cfg.vocab_size >= train.vocab_size, f"vocab_size={cfg.vocab_size} is less than the "
            f"{train.vocab_size} of {train.folder}; use --vocab_size=0")

def set_up(cfg, saved, origin, device):
    """Returns the model and its optimizer, either new or as they were saved."""
    devices.set_threads(device, cfg.n_embd)
    torch.manual_seed(cfg.seed)
    model = GPT(cfg).to(device)  # a TrainConfig is also a GPTConfig
    optimizer = model.configure_optimizers(
        cfg.weight_decay, cfg.learning_rate, (cfg.beta1, cfg.beta2), device.type, cfg.pe_lr)
    if saved:
        runs.load_weights(model, saved["model"], cfg.out_dir)
        optimizer.load_state_dict(saved["optimizer"])
    elif origin:
        runs.load_weights(model, origin["model"], cfg.init_from)
    return model, optimizer

# --- processes and signals ------------------------------------------------------------------------

class Processes:
    """The processes that torchrun started for this run, or only this process if there is no
    torchrun. Each has a device and an equal part of every batch. `sum` and `max` wait for all
    processes, so all must call them at the same point of the program. For a tensor on the CPU they
    do not wait for the GPU, because gloo sends it, rather than NCCL."""

    def __init__(self, cfg):
        self.rank = int(os.environ.get("RANK", 0))  # set by torchrun
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        require(self.rank < self.world, f"RANK={self.rank} is set in the environment, but there "
                f"are only {self.world} processes; unset it, or start the run with torchrun")
        require(cfg.batch_size % self.world == 0, f"batch_size={cfg.batch_size} is not divisible "
                f"by the {self.world} processes; change one of them")
        self.device = devices.pick_device(cfg.device)
        backend = "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
        if self.world > 1:  # rank 0 may take long to prepare data or to save a checkpoint
            dist.init_process_group(backend, timeout=timedelta(minutes=30))

    def wrap(self, model):
        """Returns a model whose gradients are the means over all processes."""
        if self.world == 1:
            return model
        # the gradients are views of what DDP sends, so there is no copy of them
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

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

class StopSignal:
    """Within this context, SIGTERM, Ctrl-C and SIGHUP, which a closed terminal sends, only set
    `number`. The run reads it between steps, when no weight is half updated. Afterwards, signals do
    again what they did before: Ctrl-C interrupts a notebook, and SIGTERM ends a script."""

    def __init__(self):
        self.number = 0
        self.ends_the_run = False  # at once, because there is nothing to save
        self.before = {}  # {number: what it did}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # no other may handle signals
            for name in ("SIGTERM", "SIGINT", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                # nohup ignores SIGHUP; None stands for a handler that is not Python's
                if number and signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self.before[number] = signal.signal(number, self.hear)
        return self

    def __exit__(self, *error):
        for number, action in self.before.items():
            signal.signal(number, action)

    def hear(self, number, frame):
        if self.ends_the_run:
            self.say(b"stopped by a signal; the same command with --resume continues")
            self.__exit__()
            signal.raise_signal(number)
            return
        self.say(b"stopping after this step. Another Ctrl-C ends the run without saving")
        self.number = number
        if signal.SIGINT in self.before:
            signal.signal(signal.SIGINT, self.before[signal.SIGINT])

    def say(self, words):
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):  # the terminal may be closed
                os.write(2, b"\n" + words + b"\n")  # because print may be interrupted

    @contextmanager
    def at_once(self):
        """Within this context, a signal ends the run at once."""
        self.ends_the_run = True
        if self.number:  # it came just before
            self.hear(self.number, None)
        yield
        self.ends_the_run = False

# --- the log --------------------------------------------------------------------------------------

class Log:
    """The reports of the process with rank 0. Each record is a line in the terminal and a line of
    log.jsonl, and goes to Weights & Biases if wandb_project is set. Steps that were taken after the
    last checkpoint appear again once the run is resumed, and what was logged before a run starts
    anew stays. Other processes report nothing."""

    def __init__(self, cfg, identity, processes, saved, file):
        self.cfg = cfg
        self.processes = processes
        self.is_mine = processes.rank == 0
        self.start_clock(saved["step"] if saved else 0)
        self.wandb_run = None
        self.wandb_id = saved.get("wandb") if saved else None
        if not self.is_mine:
            return
        self.file = file or runs.open_log(cfg.out_dir)  # locked until it is closed
        require(saved or not os.path.exists(os.path.join(cfg.out_dir, "ckpt.pt")),
                f"another process has just trained in {cfg.out_dir}")
        if cfg.resume and not saved:
            self.say(f"--resume found no run in {cfg.out_dir}, so this starts one")
        runs.append(self.file, dict(
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

    def introduce(self, model, step):
        """Says what is trained, where, and by which code."""
        cfg, device = self.cfg, self.processes.device
        self.say(f"{model.get_num_params() / 1e6:.2f}M parameters, pe={cfg.pe}, data={cfg.data}, "
                 f"{self.processes.world} x {device.type}, {cfg.dtype}, {cfg.out_dir}, from step "
                 f"{step}")
        self.say(model.use_kernels(getattr(torch, cfg.dtype), cfg.kernels))
        if device.type == "cpu" and torch.get_num_threads() > 1:
            self.say(f"{torch.get_num_threads()} threads; if the machine has other work, fewer are "
                     "much faster (OMP_NUM_THREADS=1)")
        if cfg.compile:
            self.say("compile: the first evaluation and the first step may take minutes each")

    def start_clock(self, step):
        """Begins to measure the time per step anew, because something else took time."""
        self.clock = time.perf_counter()
        self.clock_step = step

    def speed(self, step, model, batch):
        """Returns the milliseconds and tokens per second of the steps since the clock was started,
        on batches like this one, and mfu, the fraction of the peak FLOP/s, if peak_tflops is given.
        """
        seconds = (time.perf_counter() - self.clock) / (step - self.clock_step)
        self.start_clock(step)
        length = batch[0].size(1)
        values = dict(ms=1e3 * seconds, tokens_per_s=self.cfg.batch_size * length / seconds)
        if self.cfg.peak_tflops:
            values["mfu"] = model.estimate_mfu(
                self.cfg.batch_size / self.processes.world, seconds, 1e12 * self.cfg.peak_tflops,
                length)
        return values

    def record(self, step, values):
        """Reports the values of a step, which are a dict of numbers."""
        if not self.is_mine:
            return
        try:
            runs.append(self.file, dict(step=step, **values))
        except OSError as error:  # the disk may be full, which must not keep the run from saving
            self.say(f"{error}; this line is only printed")
        words = [f"step {step}/{self.cfg.max_iters}"]
        for name, value in values.items():
            if name == "loss":
                name = "loss of one batch"
            words.append(f"{name} {value:.5g}")
        if "ms" in values:
            left = (self.cfg.max_iters - step) * values["ms"] / 1e3
            words.append(f"left {timedelta(seconds=round(left))}")
        self.say("  ".join(words))
        if self.wandb_run:
            self.wandb_run.log(dict(step=step, **values))

    def close(self):
        """Unlocks the run, so that it can be resumed while this process lives on."""
        if self.is_mine:
            self.file.close()

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
        records = [record for record in runs.read_log(self.cfg.out_dir) if key in record]
        if records:
            best = min(records, key=lambda record: record[key])
            self.say(f"the lowest {key} was {best[key]:.4f}, at step {best['step']}")
        if self.wandb_run:
            self.wandb_run.finish()

if __name__ == "__main__":
    config.run(main)
