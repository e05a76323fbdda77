"""
A run directory holds two files that train.py writes and everything else only reads: ckpt.pt, the
checkpoint, and log.jsonl, with one record per line.

    saved = checkpoint.read("out/quickstart_pope")
    model = GPT(checkpoint.model_config(saved))
    checkpoint.load_weights(model, saved, "out/quickstart_pope")

A checkpoint is a dict of model and optimizer (their state_dicts), step, config (all options of the
run), meta (meta.json of its data set), history (how its weights were trained, see `history`), best
(its best evaluation, or None) and wandb (its run id at Weights & Biases, or None).
"""
import contextlib
import os
import zipfile
import zlib
from dataclasses import asdict, fields

import torch

import config
from model import GPTConfig

try:
    import fcntl
except ImportError:  # Windows lacks it, so nothing there keeps two processes out of one directory
    fcntl = None

# Options in which runs may differ and still count as the same experiment, because they change a run
# no more than another seed does. (The origin that init_from names is in the history.) But dtype and
# kernels change the precision, and eval_batches changes what is averaged
MAY_DIFFER = {"seed", "config", "out_dir", "init_from", "resume", "device", "micro_batch",
              "compile", "log_interval", "checkpoint_interval", "eval_interval", "eval_splits",
              "wandb_project"}

def write(run, checkpoint, log):
    """Writes run/ckpt.pt. A kill or a power cut at any moment leaves a complete file, which is
    either the old one or the new one. Raises OSError if the file cannot be written. Raises
    ValueError, after writing a file of another name, if `log`, the file from open_log, is no longer
    run/log.jsonl, because another run may have taken its place."""
    path = os.path.join(run, "ckpt.pt")
    log_path = os.path.join(run, "log.jsonl")
    in_place = is_still(log_path, os.fstat(log.fileno()))
    if not in_place:
        path += f".{os.getpid()}"
    temporary = path + ".tmp"
    try:
        os.makedirs(run, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if hasattr(os, "O_DIRECTORY"):  # Windows cannot open a directory
            folder = os.open(run, os.O_DIRECTORY)
            os.fsync(folder)  # makes the rename durable
            os.close(folder)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        reason = error
        if isinstance(error, RuntimeError) and error.__context__:
            reason = error.__context__  # torch.save reports a full disk only there
        raise OSError(f"step {checkpoint['step']} could not be written to {path} ({reason}); once "
                      "it can be, give the same command with --resume=True") from error
    if not in_place:
        raise ValueError(f"{log_path} was moved, deleted or replaced while this run trained, so "
                         f"step {checkpoint['step']} is in {path}; move this into the directory "
                         "of this run, as ckpt.pt, and resume")

def is_still(path, stat):
    """Returns whether the path still leads to the file or folder that had this os.stat."""
    return os.path.exists(path) and os.path.samestat(os.stat(path), stat)

def exists(run):
    return os.path.exists(os.path.join(run, "ckpt.pt"))

def read(run, device="cpu"):
    """Returns the checkpoint of a run directory, with its tensors on the device. Raises ValueError
    if it is missing or damaged."""
    path = os.path.join(run, "ckpt.pt")
    if not os.path.isfile(path):
        hint = "train a run with python train.py config/quickstart.py"
        if os.path.basename(run) == "ckpt.pt":
            hint = f"name its directory, {os.path.dirname(run) or '.'}"
        raise ValueError(f"{run!r} is not a directory with a ckpt.pt; {hint}")
    try:
        with open(path, "rb") as file:  # only once, because a run may replace it meanwhile
            archive = zipfile.ZipFile(file)
            if archive.testzip():  # torch.load does not compare the checksums
                raise zipfile.BadZipFile
            checksums = [part.CRC for part in archive.infolist() if "/data/" in part.filename]
            file.seek(0)
            checkpoint = torch.load(file, map_location=device, weights_only=True)
        if not {"model", "optimizer", "step", "config", "meta"} <= set(checkpoint):
            raise KeyError  # for example, it is nanoGPT's
        checkpoint["checksum"] = zlib.crc32(repr(checksums).encode())  # of all tensors
        if "history" not in checkpoint:  # older code saved none, so the origin has only its path
            options = checkpoint["config"]
            checkpoint["history"] = history([], 0, options, init_from=options.get("init_from"))
        return checkpoint
    except Exception as error:  # its type depends on which bytes are wrong
        if isinstance(error, PermissionError) or config.ran_out_of_memory(error):
            raise  # the file may be intact
        raise ValueError(f"{path} is damaged or not a checkpoint of this train.py "
                         f"({type(error).__name__}); train the run again with another "
                         "--out_dir") from error

def history(before, step, cfg, **actual):
    """Returns the history of a run that trains with cfg from this step on. A history is a list of
    [first step, options], such as [[0, {...}], [800, {...}]] if the options changed at step 800.
    The first entry of a fine-tuned run is [-1, ...] and stands for the run that its weights come
    from. Of `before`, the history up to now, entries that begin at this step or later are dropped,
    because no saved step used them. cfg is a dict, and `actual` replaces options such as
    dtype="auto", and the path of the data, by what they stand for here."""
    options = {key: value for key, value in cfg.items() if key not in MAY_DIFFER}
    options.update(actual)
    kept = [entry for entry in before if entry[0] < step]
    if not kept or kept[-1][1] != options:
        kept.append([step, options])
    return kept

def experiment(history, step):
    """Returns a checksum of how the weights of this step were trained. Runs that differ only in
    their seed have the same one, and may share a row of a report."""
    taken = [entry for entry in history if entry[0] < max(1, step)]
    return zlib.crc32(repr(taken).encode())

def model_config(checkpoint, **changes):
    """Returns the GPTConfig of a checkpoint, with these changes. Options that were added since it
    was saved get their defaults."""
    names = {field.name for field in fields(GPTConfig)}
    options = {name: value for name, value in checkpoint["config"].items() if name in names}
    return GPTConfig(**{**options, **changes})

def trained_length(checkpoint):
    """Returns the number of tokens per sequence in the training of a checkpoint."""
    row_length = checkpoint["meta"]["row_length"].get("train")
    # the last token of a row is only a target
    return row_length - 1 if row_length else checkpoint["config"]["block_size"]

def keep_trained_length(cfg, checkpoint):
    """Gives YaRN the length that the checkpoint was trained at, or, if it was trained with YaRN
    from scratch, the block_size that it took as that length."""
    if cfg.rope_scaling == "yarn" and not cfg.rope_trained:
        before = checkpoint["config"]
        had_yarn = before["rope_scaling"] == "yarn"
        cfg.rope_trained = before["block_size"] if had_yarn else trained_length(checkpoint)

def load_weights(model, checkpoint, run):
    """Copies the weights of checkpoint, which was read from run, into the model. Raises ValueError
    if they do not fit, or if model.cfg has another initial value of something that was learned."""
    weights = checkpoint["model"]
    given = asdict(model.cfg)
    before = asdict(model_config(checkpoint))
    changed = [key for key in before if before[key] != given[key]]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        differ = [f"{key}={before[key]!r}, not {given[key]!r}" for key in changed]
        first = str(error).split("\n")[1].strip()  # which says more if the code has changed
        reason = first
        if differ:
            reason = f"{'; '.join(differ)}; keep these as they were"
        raise ValueError(f"{run} holds another architecture: {reason}") from error
    parameters = {name.rpartition(".")[2] for name in weights}
    for key in changed:
        # such as expe_S, or delta of pope_delta
        if key == "expe_learned" or parameters & {key, key.removeprefix("pope_")}:
            raise ValueError(f"{key}={given[key]!r} would do nothing, because {run} has learned "
                             f"what it sets; keep {before[key]!r}, as it was")
    # A tensor that several layers share has several names, and of the copies under these names only
    # the last survives loading. So the copies in the checkpoint must not differ
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor.cpu(), weights[name].cpu()):
            raise ValueError(f"{run} has separate weights for {name}, which layers share in this "
                             "model")

def open_log(run):
    """Makes the run directory and opens its log.jsonl in binary mode, to append records. It stays
    locked until this process ends, because a second process would overwrite the checkpoint of the
    first. Raises ValueError if another process has the lock, or if the directory holds the results
    of a run whose checkpoint is gone."""
    os.makedirs(run, exist_ok=True)
    file = open(os.path.join(run, "log.jsonl"), "ab+")
    if fcntl:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(f"another process is training in {run}; end it first, or write "
                             "elsewhere with --out_dir=...") from None
        except OSError:
            pass  # this file system has no locks
    # A full disk may have cut the last line short, and the next record would be glued to it
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
    if os.path.exists(os.path.join(run, "results.jsonl")) and not exists(run):
        raise ValueError(f"{run} holds the results of a run whose ckpt.pt is gone; put it back, "
                         "delete the directory, or write elsewhere with --out_dir=...")
    return file

def pick_device(kind, index=0):
    """Returns the torch.device for "cpu", "cuda", "mps" or "auto", which is the fastest available.
    index chooses one of several GPUs."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if kind == "auto":
        kind = next(name for name in available if available[name])
    if not available[kind]:
        raise ValueError(f"device={kind!r}, but PyTorch sees none; use --device=cpu")
    if kind == "cuda":
        if index >= torch.cuda.device_count():
            raise ValueError(f"there are {torch.cuda.device_count()} GPUs, but this is process "
                             f"{index + 1} here; start fewer with --nproc_per_node")
        return torch.device("cuda", index)
    return torch.device(kind)
