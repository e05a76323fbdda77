"""
What a run is on disk: a directory, named after the options of the run, which holds

    ckpt.pt         the last checkpoint of train.py (read_checkpoint says what is in it)
    log.jsonl       what train.py logged, one JSON record per line
    results.jsonl   what sample.py and eval/ measured, in the same format

train.py, sample.py and eval/ share this module. Only the functions that read weights import
PyTorch, so tables and pictures of results do without it.
"""
import json
import os
import re
import sys
import zlib
from contextlib import suppress
from dataclasses import asdict, replace

import config
from config import Mistake, require
from data import locate, place
from data.shards import Split, naming, whole_file

try:
    import fcntl
except ImportError:  # Windows has no such module
    fcntl = None

# --- the name of a run ----------------------------------------------------------------------------

# A resumed run may change these, because they do not change what it learns, except for rounding
# and, with micro_batch, for the dropout masks. Its data, and the run that it started from, may have
# moved. That the contents of the data are the same is checked elsewhere
MAY_CHANGE = {"config", "data", "out_dir", "resume", "init_from", "title", "micro_batch", "device",
              "compile", "eval_interval", "eval_batches", "eval_splits", "checkpoint_interval",
              "log_interval", "peak_tflops", "wandb_project"}

# It may change these if the learning rate of the steps that it has taken stays the same
SCHEDULE = {"learning_rate", "min_lr", "schedule", "max_iters", "warmup_iters", "decay_iters"}

def identify(cfg, default, from_file, from_flags):
    """Returns what identifies a run in tables and pictures, besides its config file, pe, seed and
    step, as a dict that is saved with it. `flags` are those that change what it learns. `settings`
    is a checksum of what the config file says, because somebody may edit it between two runs, and
    their mean would then mean nothing. default has the options of a run without flags."""
    unnamed = MAY_CHANGE - {"data", "init_from"} | {"pe", "seed"}
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
    name = re.sub(r"[^\w.,=+-]", "_", "_".join(words))
    if len(name) > 150:  # file systems have limits
        name = f"{name[:140]}_{zlib.crc32(name.encode()):08x}"
    return os.path.join("out", name)

def with_options(name, options):
    """Returns a name such as out/quickstart_rope@rope_scaling=ntk,rope_factor=8."""
    changes = [assignment(option, value) for option, value in options.items()]
    return f"{name}@{','.join(changes)}" if changes else name

def assignment(option, value):
    """Returns option=value, with a number as one would type it, such as base=100."""
    return f"{option}={value:g}" if isinstance(value, float) else f"{option}={value}"

def differences(cfg, saved, learning_rate):
    """Returns the options that a resumed run has changed although it must not, as two lists of
    flags: one with the values of its checkpoint, and one with the new values. learning_rate(step,
    cfg) is train.py's."""
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

# --- its checkpoint -------------------------------------------------------------------------------

def open_run(run, resume):
    """Returns the checkpoint in a run directory, or None, and its log, locked, or None if there is
    none yet. Raises Mistake if the directory holds a run that is not to be resumed."""
    def has(name):
        return os.path.exists(os.path.join(run, name))

    require(resume or not has("ckpt.pt"), f"{run} already holds a run; resume it with --resume, or "
                                          "write elsewhere with --out_dir=...")
    require(has("ckpt.pt") or not has("results.jsonl"),
            f"{run} holds the results of a run whose ckpt.pt is gone; delete the directory, or "
            "write elsewhere with --out_dir=...")
    log = None
    if has("log.jsonl") and os.environ.get("RANK", "0") == "0":
        log = open_log(run)  # which is locked first, so that nobody saves a newer checkpoint
    return read_checkpoint(run) if has("ckpt.pt") else None, log

def read_checkpoint(run):
    """Returns what train.py has saved in run/ckpt.pt, with all tensors on the CPU. It is a dict of
    model and optimizer (their state_dicts), step, config (all options of the run), flags and
    settings (see identify), meta (meta.json of its data set) and wandb (its id at Weights & Biases,
    or None). Raises Mistake if there is no such file, or if it is damaged or not from train.py."""
    import torch

    path = os.path.join(run, "ckpt.pt")
    if not os.path.isfile(path):
        others = [os.path.join("out", name) for name in sorted(os.listdir("out"))
                  if os.path.isfile(os.path.join("out", name, "ckpt.pt"))
                  ] if os.path.isdir("out") else []
        mend = f"there is {', '.join(others[:5])}" if others else "train it first"
        raise Mistake(f"{run!r} is not a directory with a ckpt.pt; {mend}")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:  # the file may be whole
        raise
    except Exception as error:  # its type depends on which bytes are missing or wrong
        if "memory" in str(error):  # that of this machine, whose allocator raises a RuntimeError
            raise
        raise Mistake(f"{path} is damaged ({type(error).__name__})") from error
    require({"model", "optimizer", "step", "config", "meta"} <= set(saved),
            f"{path} is not a checkpoint of this train.py")
    return saved

def save_checkpoint(run, checkpoint):
    """Writes run/ckpt.pt. A kill or a full disk leaves the previous one."""
    import torch

    path = os.path.join(run, "ckpt.pt")
    try:
        with whole_file(path) as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch.save hides that the disk is full
            with naming(path):
                raise error.__context__ from None
        raise

def load_model(run, device="cpu", **changes):
    """Returns the trained model of a run directory, in evaluation mode, and the whole checkpoint,
    a dict that read_checkpoint describes. `changes` are options of model.TEST_TIME to use instead
    of those of the training, such as rope_scaling="ntk", rope_factor=4.0. Raises Mistake for any
    other option or a wrong value, or if the weights do not fit."""
    from model import GPT, GPTConfig, refuse_idle_options

    require_test_time(changes)
    saved = read_checkpoint(run)
    options = model_options(saved)
    refuse_idle_options(options["pe"], changes)
    model = GPT(GPTConfig(**options | changes))
    load_weights(model, saved["model"], run)
    return model.to(device).eval(), saved

def require_test_time(options):
    """Raises Mistake if one of these names is not an option that a trained model may change."""
    from model import TEST_TIME

    for name in options:
        require(name in TEST_TIME, f"{name} cannot be changed after training; only "
                                   f"{', '.join(TEST_TIME)} can")

def load_weights(model, weights, run):
    """Copies weights, the state_dict of a run directory, into the model. Raises Mistake if they
    belong to another architecture."""
    unfit = f"the weights of {run} do not fit a model with pe={model.cfg.pe!r}"
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).split("\n")[1].strip()
        raise Mistake(f"{unfit}: {first}") from error
    # Layers that share a tensor save it under several names, and loading keeps only the last
    # copy. So all copies must be equal
    for name, tensor in model.state_dict().items():
        require(tensor.cpu().equal(weights[name].cpu()),
                f"{unfit}: its layers share {name}, of which the run has several")

def model_options(saved):
    """Returns the options of the model in a checkpoint, as a dict. Options that were added to
    GPTConfig since it was saved have their defaults."""
    from model import GPTConfig

    options = asdict(GPTConfig())
    options.update({name: saved["config"][name] for name in options if name in saved["config"]})
    # YaRN has to know the trained length, and a run that starts from these weights may have another
    # block_size. A run that was trained with YaRN keeps the length that YaRN used then
    if options["rope_scaling"] != "yarn":
        options["rope_trained"] = trained_length(saved)
    elif not options["rope_trained"]:
        options["rope_trained"] = options["block_size"]
    return options

def trained_length(saved):
    """Returns the number of tokens per sequence in the training of a checkpoint."""
    row_length = saved["meta"]["row_length"].get("train")
    # the last token of a row is only a target
    return row_length - 1 if row_length else saved["config"]["block_size"]

def require_same_tokenizer(split, meta, run):
    """Raises Mistake if a split was tokenized with another tokenizer than the data of a run, whose
    meta.json is given."""
    def name(tokenizer):
        if isinstance(tokenizer, dict):  # of a task
            return f"{len(tokenizer['symbols'])} symbols of its own"
        return repr(tokenizer)

    found, wanted = split.meta["tokenizer"], meta["tokenizer"]
    require(found == wanted, f"{split.folder} was tokenized with {name(found)}, but {run} was "
            f"trained with {name(wanted)}; prepare the data with the tokenizer of the run")

# --- its records ----------------------------------------------------------------------------------

def open_log(run):
    """Opens run/log.jsonl, to append to it, and locks it until it is closed, because two processes
    in one directory would overwrite each other's checkpoints."""
    os.makedirs(run, exist_ok=True)
    file = open(os.path.join(run, "log.jsonl"), "a", encoding="utf-8")
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

def append(file, record):
    """Appends a dict to an open file of JSON lines. A line begins with the line break that ends the
    one before, which a kill or a full disk may have cut short."""
    with naming(file.name):
        file.write(f"\n{json.dumps(record)}")
        file.flush()

def read_records(path):
    """Returns the dicts in a file of JSON lines. A line that is not complete is skipped."""
    records = []
    with open(path, encoding="utf-8") as file:
        try:
            for line in file:
                with suppress(json.JSONDecodeError):
                    records.append(json.loads(line))
        except UnicodeDecodeError:
            raise Mistake(f"{path} is not a file of results") from None
    return records

def read_log(run):
    """Returns the records of run/log.jsonl, from the last start of the run at step 0. The first one
    has the options of the run and what identifies it."""
    path = os.path.join(run, "log.jsonl")
    require(os.path.exists(path), f"{run} is not a run directory, because it has no log.jsonl")
    records = read_records(path)
    starts = [n for n, record in enumerate(records) if record.get("from_step") == 0]
    return records[starts[-1] if starts else 0 :]

# --- a trained run, to be measured ----------------------------------------------------------------

class TrainedRun:
    """A trained model and the data set to measure it on, which is the run's own by default. name is
    a run directory, or "directory@key=value,...", which changes options of the model."""

    def __init__(self, name, device="auto", data=None):
        import torch

        from config.devices import pick_device, set_threads

        torch.set_float32_matmul_precision("highest")  # whatever the environment says of TF32
        folder, options = parse_name(name)
        self.folder = os.path.normpath(folder)
        self.options = options
        self.name = with_options(self.folder, options)
        self.device = pick_device(device)
        self.model, saved = load_model(self.folder, self.device, **options)
        set_threads(self.device, self.model.cfg.n_embd)
        self.step = saved["step"]
        self.config = saved["config"]  # all options of the training
        self.flags = saved.get("flags", {})  # those that name it in tables
        self.settings = saved.get("settings")  # a checksum of its config file, see identify
        self.meta = saved["meta"]  # meta.json of the data set that it was trained on
        self.is_task = self.meta["loss"] == "mask"
        self.trained = trained_length(saved)  # tokens per sequence in training
        self.data = data or self.config["data"]
        self.reads_its_own = data is None

    def open_split(self, name=None):
        """Opens a split of the data set, by default the first that training evaluated. Raises
        Mistake if the set has another tokenizer than the run, or if it is the run's own but was
        written again, because it may then hold other text than before."""
        split = Split(locate(self.data), name or self.config["eval_splits"].split(",")[0])
        require_same_tokenizer(split, self.meta, self.name)
        require(not self.reads_its_own or split.is_same_set(self.meta),
                f"{split.folder} has changed since {self.name} was trained on it; to evaluate on "
                f"it as it is now, use --data={self.data}")
        return split

    def length(self, split):
        """Returns the number of tokens per sequence of the split, which is the same as in training
        unless the split has rows of a length of its own."""
        return split.row_length - 1 if split.rows else self.trained

    def about(self):
        """Returns what identifies the run in a table or picture, as a dict."""
        return {"run": self.folder, "config": self.config["config"],
                "title": self.config.get("title", ""), "pe": self.model.cfg.pe,
                "flags": self.flags, "settings": self.settings, "seed": self.config["seed"],
                "step": self.step, "options": self.options, "trained": self.trained}

    def record(self, values, data, split, fingerprint, length, **measured):
        """Appends a record to RUN/results.jsonl. It holds the values, {metric: number}, apart from
        those that are None, what about() returns, and what was measured:

            data         the data set, or the task
            split        its split
            fingerprint  a checksum of the data
            length       tokens per sequence
            multiple     of --extrapolate: length / trained length
            tokens       of --extrapolate: how many tokens were read
            window       of --extrapolate: how many tokens a token sees for window_loss
            unit, axis, at, tick, kind   where it belongs in a picture, see `place` in data/
        """
        import torch

        record = {**self.about(), "data": data, "split": split, "fingerprint": fingerprint,
                  "length": length, **place(data, split, length), **measured,
                  "torch": torch.__version__, "device": self.device.type,
                  "values": {name: value for name, value in values.items() if value is not None}}
        path = os.path.join(self.folder, "results.jsonl")
        try:
            with open(path, "a", encoding="utf-8") as file:
                append(file, record)
        except OSError as error:  # it may be somebody else's directory
            print(f"{path} could not be written ({error.strerror}), so this is only printed",
                  file=sys.stderr)

def parse_name(name):
    """Returns the run directory and the options, {option: value}, of a name such as
    out/quickstart_rope@rope_scaling=ntk,rope_factor=8. The directory itself may contain an @."""
    from model import GPTConfig

    folder, _, changes = name.rpartition("@")
    if os.path.isdir(name) or not folder:
        return name, {}
    words = [change for change in changes.split(",") if change]
    try:
        require_test_time([word.partition("=")[0] for word in words])
        return folder, config.parse(GPTConfig, [f"--{word}" for word in words])
    except Mistake as mistake:
        raise Mistake(f"{name}: {mistake}") from None

def add_run_options(parser):
    """Adds the options that say which runs to read, and on which device."""
    parser.add_argument("runs", nargs="+", type=config.text, metavar="RUN",
                        help="run directory, or RUN@key=value")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto",
                        help="auto: the fastest available [auto]")

def add_data_options(parser):
    """Adds the options that say on which data the runs are measured."""
    parser.add_argument("--data", type=config.text,
                        help="a data set or folder to read [the run's own]")
    parser.add_argument("--split",
                        help="a split of the data set [the first that training evaluated]")
