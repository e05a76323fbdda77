"""
Train a GPT on one device, or on many under torchrun:

    python train.py config/quickstart.py [--key=value ...]         --help prints every key
    torchrun --standalone --nproc_per_node=8 train.py config/...   the same batches, divided up

A step's batch depends only on (seed, step), so a resumed run is the same run. On another number of
processes only dropout differs. On SIGTERM, Ctrl-C or a closed terminal, a run saves a checkpoint
and stops; a second Ctrl-C stops it at once. The same command with --resume=True resumes it.
"""
import contextlib
import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields
from datetime import timedelta

import torch

torch.set_flush_denormal(True)  # fox is 1.7x faster on CPUs; threads inherit it, so set it first

import torch.distributed as dist  # noqa: E402

import checkpoint  # noqa: E402
import config  # noqa: E402
from checkpoint import load_weights, model_config, open_log, pick_device  # noqa: E402
from data.shards import Split, locate, prepare  # noqa: E402
from eval.losses import error_sums, scores  # noqa: E402
from model import GPT, GPTConfig, check, choose, refuse  # noqa: E402

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "RTX 4090": 165e12}  # dense bf16

@dataclass
class TrainConfig(GPTConfig):
    """Keys of train.py: first the model's (GPTConfig), then the run's."""
    vocab_size: int = 0  # number of token ids; 0: the data set's own
    config: str = ""  # path of the config file (set by naming one)
    data: str = "stdlib"  # a data set prepared by data/NAME.py, or the path of a folder of shards
    out_dir: str = ""  # run directory; empty: out/<config>_<pe>, with _seed<n> for another seed
    resume: bool = False  # continue from the run directory's checkpoint, if there is one
    init_from: str = ""  # fine-tuning: the run directory to take weights and model options from
    seed: int = 1337  # of weights, batches and dropout
    batch_size: int = 16  # sequences per step, over all processes and micro-batches
    micro_batch: int = 0  # sequences per forward pass; 0: all of a process's share at once
    max_iters: int = 1000  # training steps
    learning_rate: float = 1e-3  # after warm-up
    min_lr: float = 0.0  # where the schedule ends, at max_iters
    schedule: str = "cosine"  # cosine | linear | constant: from learning_rate to min_lr
    warmup_iters: int = 0  # steps of linear warm-up
    weight_decay: float = 0.1  # on the weights of linear and embedding layers
    beta1: float = 0.9  # AdamW: decay of the mean gradient
    beta2: float = 0.95  # AdamW: decay of the mean squared gradient
    grad_clip: float = 1.0  # maximum norm of the gradient; 0: no clipping
    eval_interval: int = 500  # steps between evaluations
    eval_batches: int = 64  # batches of batch_size sequences per split; 0: the whole split
    eval_splits: str = "val"  # comma-separated splits to evaluate; the first decides the best step
    checkpoint_interval: int = 0  # steps between checkpoints; 0: eval_interval
    log_interval: int = 10  # steps between log lines
    device: str = "auto"  # auto | cpu | cuda | mps
    dtype: str = "auto"  # auto: bfloat16 autocast if the GPU has it | float32, no TF32 | bfloat16
    compile: bool = False  # torch.compile: slow to start, fast steps
    kernels: str = "auto"  # auto: Triton kernels in the layers that have one | off: PyTorch alone
    wandb_project: str = ""  # also log to this Weights & Biases project

def main(argv):
    refuse(not argv, "nothing to train; try python train.py config/quickstart.py, or --help")
    cfg = config.load(TrainConfig, argv)
    if cfg.init_from:  # fine-tuning: its model's options are the defaults of this run
        origin = checkpoint.read(cfg.init_from)
        cfg = config.load(TrainConfig, argv, **asdict(model_config(origin)))
    check(cfg)
    choose("schedule", cfg.schedule, ("cosine", "linear", "constant"))
    choose("dtype", cfg.dtype, ("auto", "float32", "bfloat16"))
    choose("kernels", cfg.kernels, ("auto", "off"))
    for key in ("batch_size", "eval_interval", "log_interval"):
        refuse(getattr(cfg, key) < 1, f"{key}={getattr(cfg, key)} is too small; use 1 or more")
    folder = locate(cfg.data)
    stem = os.path.splitext(os.path.basename(cfg.config))[0] or "train"
    seed = f"_seed{cfg.seed}" if cfg.seed != TrainConfig.seed else ""
    cfg.out_dir = cfg.out_dir or os.path.join("out", f"{stem}_{cfg.pe}{seed}")

    # processes: torchrun sets these variables
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    refuse(cfg.batch_size % world, f"batch_size={cfg.batch_size} is not divisible by the {world} "
           "processes; change one of them")
    device = pick_device(cfg.device, int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def over_all(tensor, op=dist.ReduceOp.SUM):  # all processes must call it together
        if world > 1:
            tensor = tensor.to(device)
            dist.all_reduce(tensor, op)
        return tensor

    def say(line):
        if rank == 0:
            try:
                print(line, flush=True)
            except OSError:  # the reader of a pipe, or the terminal, is gone
                sys.stdout = open(os.devnull, "w")

    # data
    if rank == 0:
        prepare(cfg.data, folder)
    over_all(torch.zeros(1))  # the others wait here
    train = Split(folder, "train")
    evals = [Split(folder, name) for name in cfg.eval_splits.split(",")]
    for split in (train, *evals):
        split.windows(cfg.block_size, 1)  # refuses a block_size that does not fit
    cfg.vocab_size = cfg.vocab_size or train.vocab_size
    refuse(cfg.vocab_size < train.vocab_size, f"vocab_size={cfg.vocab_size} is less than the "
           f"{train.vocab_size} of {folder}; use vocab_size=0 for the data set's own")
    share = cfg.batch_size, cfg.block_size, cfg.seed, rank, world  # what this process reads

    # model and optimizer
    torch.manual_seed(cfg.seed)
    torch.set_float32_matmul_precision("highest" if cfg.dtype == "float32" else "high")
    raw = GPT(GPTConfig(**{f.name: getattr(cfg, f.name) for f in fields(GPTConfig)})).to(device)
    betas = cfg.beta1, cfg.beta2
    optimizer = raw.configure_optimizers(cfg.weight_decay, cfg.learning_rate, betas, device.type)
    if cfg.init_from:
        load_weights(raw, origin, cfg.init_from)

    # run directory: take its lock, then read the checkpoint if there is one
    path = os.path.join(cfg.out_dir, "ckpt.pt")
    refuse(os.path.exists(path) and not cfg.resume, f"{cfg.out_dir} already holds a run; continue "
           "it with --resume=True, or write elsewhere with --out_dir=...")
    log = open_log(cfg.out_dir) if rank == 0 else None
    before = checkpoint.read(cfg.out_dir, device) if os.path.exists(path) else {}
    step, best = before.get("step", 0), before.get("best")
    saved = (step, best) if before else None
    if before:  # resuming takes the same model and the same data
        for key, value in asdict(model_config(before)).items():
            refuse(getattr(cfg, key) != value, f"{cfg.out_dir} was trained with {key}={value!r}, "
                   f"not {getattr(cfg, key)!r}; keep it, or write elsewhere with --out_dir=...")
        data, meta = before["config"]["data"], before["meta"]
        differ = [key for key in meta if train.meta.get(key) != meta[key]]
        differ += ["name"] * (locate(data).name != folder.name)
        refuse(differ, f"{cfg.out_dir} was trained on data={data!r}, but {cfg.data!r} differs in "
               f"{', '.join(differ)}; to fine-tune on it, use --init_from={cfg.out_dir}")
        load_weights(raw, before, cfg.out_dir)
        groups = optimizer.state_dict()["param_groups"]  # keep the moments, use this run's settings
        optimizer.load_state_dict(before.pop("optimizer") | dict(param_groups=groups))
    refuse(over_all(torch.tensor(step), dist.ReduceOp.MAX) != step, "the processes found different "
           f"checkpoints; put out_dir={cfg.out_dir!r} on storage that all machines share")
    tracker = None
    if cfg.wandb_project and rank == 0:
        import wandb
        tracker = wandb.init(project=cfg.wandb_project, name=os.path.basename(cfg.out_dir),
                             config=asdict(cfg), id=before.get("wandb"), resume="allow")

    def record(**values):  # in log.jsonl, where a resumed run repeats some steps
        if rank == 0:
            log.write(json.dumps(values).encode() + b"\n")
            log.flush()
        if tracker and "step" in values:
            step, split = values.pop("step"), values.pop("split", "train")
            tracker.log({f"{split}/{key}": value for key, value in values.items()}, step)

    def save():
        nonlocal saved
        if rank == 0 and saved != (step, best):
            checkpoint.write(cfg.out_dir, dict(
                model=raw.state_dict(), optimizer=optimizer.state_dict(), step=step,
                config=asdict(cfg), meta=train.meta, best=best, wandb=tracker and tracker.id))
        saved = step, best

    def refuse_nan(loss, name):
        kept = f"{path} holds the good step {saved[0]}" if saved else "no checkpoint yet"
        refuse(not math.isfinite(loss),
               f"{name} is {loss} at step {step}; {kept}; try a lower learning_rate")

    fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
    bf16 = cfg.dtype == "bfloat16" or cfg.dtype == "auto" and fast
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu), None)
    say(f"{raw.get_num_params() / 1e6:.2f}M parameters, pe={cfg.pe}, {world} x {device.type}, "
        f"{'bfloat16' if bf16 else 'float32'}, {cfg.out_dir}, from step {step}")
    for key, value in before.get("config", {}).items():
        if key != "resume" and getattr(cfg, key, value) != value:
            say(f"{key}={getattr(cfg, key)!r} from here on; it was {value!r}")
    dtype = torch.bfloat16 if bf16 else torch.float32
    say(raw.use_kernels(dtype) if cfg.kernels == "auto" else "attention: pytorch (kernels=off)")
    net = torch.compile(raw) if cfg.compile else raw
    model = torch.nn.parallel.DistributedDataParallel(net) if world > 1 else net
    n = cfg.micro_batch or cfg.batch_size // world

    # signals that stop the run: SIGTERM, Ctrl-C, and SIGHUP from a closed terminal
    heard = []

    def hear(number, frame):
        if not heard and rank == 0:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, b"\nstopping after this step or batch; Ctrl-C again ends it at once\n")
        heard.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # not SIGTERM: torchrun sends two

    def stopped():  # by which signal, to any process; else 0
        return int(over_all(torch.tensor(max(heard, default=0)), dist.ReduceOp.MAX))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores some
            signal.signal(number, hear)

    def evaluate(split):
        """The split's scores, on the same windows each time, or None if a signal interrupts."""
        starts = split.windows(cfg.block_size, cfg.eval_batches * cfg.batch_size or None)
        sums, shown = torch.zeros(5, dtype=torch.float64), time.monotonic()
        net.eval()
        for i in range(0, len(starts), world * n):
            mine = starts[i + rank * n : i + (rank + 1) * n]
            if len(mine):
                with autocast:
                    sums += error_sums(net, *to(device, split.read(mine, cfg.block_size)))
            if stopped():
                return None
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                say(f"evaluating {split.split}: window {i + len(mine):,} of {len(starts):,}")
        net.train()
        return scores(over_all(sums), split.meta["loss"] == "mask")

    # training
    x, y = to(device, train.batch(step, *share))
    record(config=asdict(cfg), length=x.size(1), device=gpu, torch=torch.__version__)
    first, train_seconds, eval_seconds = step, 0.0, 0.0
    began = time.perf_counter()
    while True:
        stop = stopped()
        last = stop or step >= cfg.max_iters
        torch.manual_seed(cfg.seed + step * world + rank)  # of dropout, so that resuming is exact

        # the loss and, unless the run ends here, its gradients. Every target counts the same
        targets = over_all((y != -1).sum()).clamp(min=1)
        loss = torch.zeros((), device=device)
        for i in range(0, len(x), n):
            if world > 1:  # sum gradients over processes only once a step
                model.require_backward_grad_sync = i + n >= len(x)
            with torch.set_grad_enabled(not last), autocast:
                part = model(x[i : i + n], y[i : i + n])[1] * (y[i : i + n] != -1).sum() / targets
            if not last:
                (part * world).backward()  # DistributedDataParallel averages over processes
            loss += part.detach()
        if not last:
            x, y = to(device, train.batch(step + 1, *share))  # while the device computes
        loss = over_all(loss).item()
        refuse_nan(loss, "loss")

        # these weights are good, so save them before a long evaluation
        paused = time.perf_counter()
        if last or step > 0 and step % (cfg.checkpoint_interval or cfg.eval_interval) == 0:
            save()
        if step % cfg.eval_interval == 0 or step >= cfg.max_iters:
            for split in evals:
                result = evaluate(split)
                if result is None:
                    stop = last = stopped()
                    break
                refuse_nan(result["loss"], f"{split.split} loss")
                record(step=step, split=split.split, **result)
                numbers = ", ".join(f"{name} {value:.4f}" for name, value in result.items())
                say(f"step {step}: {split.split} {numbers}")
                if split is evals[0] and (not best or result["loss"] < best["loss"]):
                    best = dict(step=step, split=split.split, loss=result["loss"])
            eval_seconds = time.perf_counter() - paused
        if last:
            save()  # again, if this evaluation was the best
            break
        began += time.perf_counter() - paused  # the speed counts training alone

        lr = learning_rate(step, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if cfg.grad_clip:
            torch.nn.utils.clip_grad_norm_(raw.parameters(), cfg.grad_clip)
        optimizer.step()
        raw.clamp_parameters()  # pope's delta stays within its bounds
        optimizer.zero_grad()
        step += 1

        if step % cfg.log_interval == 0:
            seconds, began = time.perf_counter() - began, time.perf_counter()
            train_seconds += seconds
            dt = seconds / min(cfg.log_interval, step - first)  # fewer after a resume
            speed = cfg.batch_size * x.size(1) / dt
            values = dict(step=step, loss=loss, lr=lr, ms=1e3 * dt, tokens_per_s=speed)
            line = (f"step {step}/{cfg.max_iters} loss {loss:.4f} lr {lr:.2e} "
                    f"{1e3 * dt:.0f} ms {speed:,.0f} tokens/s")
            if peak:
                values["mfu"] = raw.estimate_mfu(cfg.batch_size / world, dt, peak, x.size(1))
                line += f" mfu {100 * values['mfu']:.0f}%"
            record(**values)
            per_step = train_seconds / (step - first) + eval_seconds / cfg.eval_interval
            say(f"{line} left {timedelta(seconds=round((cfg.max_iters - step) * per_step))}")

    record(ended=step, best=best)
    line = f"stopped by a signal at step {step}: {path}" if stop else f"done: {path}"
    if best:
        line += ", best {split} loss {loss:.4f} at step {step}".format(**best)
    fits = 8 * cfg.block_size < min(evals[0].tokens, 8193)  # --extrapolate reads 8192 at a time
    then = f"python sample.py {cfg.out_dir}" + " --extrapolate=1,2,4,8" * (fits and not train.rows)
    say(f"{line}\nnext: {'the same command with --resume=True' if stop else then}")
    if tracker:
        tracker.finish()
    if world > 1:
        time.sleep(0.5)  # gloo's threads could abort if Python ended at once (torch 2.13)
        dist.destroy_process_group()
    if stop:  # die by the signal, so that a shell script stops too
        signal.signal(stop, signal.SIG_DFL)
        os.kill(os.getpid(), stop)

def to(device, arrays):
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cuda":
        return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    return [tensor.to(device) for tensor in tensors]

def learning_rate(step, cfg):
    """Linear warm-up, then from learning_rate down to min_lr at max_iters."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    t = (step - cfg.warmup_iters) / max(1, cfg.max_iters - cfg.warmup_iters)
    shapes = {"cosine": 0.5 * (1 + math.cos(math.pi * t)), "linear": 1 - t, "constant": 1.0}
    return cfg.min_lr + shapes[cfg.schedule] * (cfg.learning_rate - cfg.min_lr)

def last_words(error):
    """An expected error as one line for sys.exit. A bug keeps its traceback."""
    line = f"{type(error).__name__}: {error}".partition("\n")[0]
    if isinstance(error, ImportError):
        line += f"; pip install {error.name}"
    bug = isinstance(error, RuntimeError)
    if re.search("MemoryError|allocate memory|size calculation overflowed", line):
        line, bug = f"out of memory ({line}); try a smaller --micro_batch or model", False
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")  # torchrun prints this file when it ends
    if report and (bug or os.environ["RANK"] != "0"):  # let rank 0 report first, if it can
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun then ends the others
        time.sleep(10 if bug else 5)
    if bug:
        raise error
    if not report:
        return line
    with open(report, "w") as file:
        json.dump(dict(message=line), file)
    return 1

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, ImportError, MemoryError, RuntimeError) as error:
        sys.exit(last_words(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command starts again")
