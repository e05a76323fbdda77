"""One format for every data set of the project: its reader, its writer, its scripts' command line.

data/<name>/ holds

  <split>_000000.bin, ...   the tokens, raw little-endian uint16
  <split>_000000.loss, ...  in masked sets only: uint8 per token, 1 = a target that carries loss
  meta.json                 written last, so its presence means that the set is whole:
    vocab_size   at most 65536
    tokenizer    "bytes", "gpt2" or another name that tiktoken knows, a name on the Hugging Face hub,
                 the path of a tokenizer.json, or {"symbols": [id 0's string, ...]}; see data/text.py
    separator    the token id between documents, or null
    row_length   {split: n} for splits in which every n tokens are a row, an example of its own;
                 the others are one long stream each
    loss         "all" | "mask"
    shards       {"train_000000.bin": number of tokens, ...}
    words, asked in sets of text, see write_documents in data/text.py
  unfinished                in place of meta.json while a process writes the set, and after a failure

`Split` reads a set, `Writer` writes one, and `write_rows` writes a synthetic task. A set is named
after its script, with the options that it was written with: `stdlib`, `flip_flop@length=256`.
"""
import argparse
import contextlib
import fcntl
import importlib
import inspect
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np

NO_SCRIPTS = {"shards", "text"}  # text.py makes sets too, but of a file that only its user knows
SCRIPTS = sorted({path.stem for path in Path(__file__).parent.glob("[a-z]*.py")} - NO_SCRIPTS)
SHARD = re.compile(r"(.+_\d{6})\.(bin|loss)(\.tmp)?")


def split_of(name):
    """The split that a shard belongs to: "train_000000.bin" -> "train"."""
    return name.rpartition("_")[0]


def rng(seed, number):
    """A numpy generator that is a pure function of (seed, number), the key of its Philox."""
    if seed < 0:
        raise ValueError(f"seed={seed} is negative; use 0 or more")
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))


def locate(data):
    """The folder of a data set by its name, or `data` itself where it is a path."""
    is_path = os.sep in data or Path(data).is_file()
    return Path(data) if is_path else Path(__file__).parent / data


def command_for(folder):
    """The command that writes the set of a folder, `quoted`, or how to find it."""
    name, _, options = Path(folder).name.partition("@")
    if name not in SCRIPTS:
        return (f"`python -m data.NAME --out={folder}`; NAME is one of {', '.join(SCRIPTS)}, "
                "or text with --source=YOUR_TEXT")
    words = [f"python -m data.{name}", *(f"--{option}" for option in options.split(",") if option)]
    return f"`{' '.join(words)}`"


# reading


def read_meta(folder):
    """meta.json of a folder, as a dict. FileNotFoundError: there is none; ValueError: it is broken."""
    path = folder / "meta.json"
    if folder.is_file():
        raise ValueError(f"{folder} is a file, not a data set; "
                         f"make one of it with `python -m data.text --source={folder}`")
    if not path.exists():
        raise FileNotFoundError(f"no meta.json in {folder}; "
                                f"write the data with {command_for(folder)}")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        fault = fault_in(meta)
    except (OSError, ValueError, RecursionError) as error:
        fault = f"cannot be read ({type(error).__name__})"
    if fault:
        raise ValueError(f"{path} {fault}; "
                         f"delete {folder} and write it again with {command_for(folder)}")
    return meta


def fault_in(meta):
    """Why this content of a meta.json describes no set, or None."""
    if not isinstance(meta, dict):
        return "holds no JSON object"
    for key in ("vocab_size", "tokenizer", "separator", "row_length", "loss", "shards"):
        if key not in meta:
            return f"has no {key!r}"
    vocab_size, tokenizer, separator = meta["vocab_size"], meta["tokenizer"], meta["separator"]
    if not is_count(vocab_size) or vocab_size > 65536:
        return f"has vocab_size={vocab_size!r}, not 1 to 65536"
    if not isinstance(tokenizer, str):
        symbols = tokenizer.get("symbols") if isinstance(tokenizer, dict) else None
        if not isinstance(symbols, list) or len(symbols) != vocab_size:
            return f"has a tokenizer that is neither a name nor {vocab_size} symbols"
    if separator is not None and not (separator == 0 or is_count(separator)):
        return f"has separator={separator!r}, which is no token"
    if meta["loss"] not in ("all", "mask"):
        return f"has loss={meta['loss']!r}, neither 'all' nor 'mask'"
    for key in ("row_length", "shards"):
        if not isinstance(meta[key], dict) or not all(map(is_count, meta[key].values())):
            return f"has {key!r} that are no positive numbers by name"
    for name, count in meta["shards"].items():
        if not SHARD.fullmatch(name) or not name.endswith(".bin") or os.sep in name:
            return f"lists {name!r}, which is no name of a shard"
        if count % meta["row_length"].get(split_of(name), 1):
            return f"lists {name!r}, which does not divide into rows"
    return None


def is_count(value):
    return type(value) is int and value > 0


def has_ones(mask):
    """mask.any(), piece by piece: in a sound set the first has one, and no more is read."""
    return any(mask[i : i + 2**20].any() for i in range(0, len(mask), 2**20))


class Split:
    """One split of a prepared set, memory-mapped: nothing is read before a batch asks for it.

    Attributes: meta (the dict of meta.json), vocab_size, tokens (in the whole split), rows (0 for a
    stream). Raises FileNotFoundError when the set is not there, ValueError when its files are not
    those of meta.json. Sizes are checked here and not again: a process that reads a shard which was
    cut later dies of SIGBUS.
    """

    def __init__(self, folder, split):
        folder = Path(folder)
        self.folder, self.split, self.meta = folder, split, read_meta(folder)
        counts = self.meta["shards"]
        self.names = sorted(name for name in counts if split_of(name) == split)
        if not self.names:
            known = ", ".join(sorted({split_of(name) for name in counts}))
            mend = "change --eval_splits, --evaluate or --split"
            if split == "train":
                mend = "train.py needs one: take other --data, or write the set with text to train on"
            raise ValueError(f"{folder} has no split {split!r}; it has: {known}; {mend}")
        for path in folder.glob("*.bin"):
            if split_of(path.name) == split and path.name not in self.names:
                raise self._broken(path.name, "is not in meta.json, another run left it")
        self.bins = [self._map(name, counts[name], "<u2") for name in self.names]
        self.masks = []
        if self.meta["loss"] == "mask":
            self.masks = [self._map(name[:-3] + "loss", counts[name], "u1") for name in self.names]
            if not any(has_ones(mask) for mask in self.masks):
                raise self._broken(self.names[0][:-3] + "loss", "and its other masks are all zero")
        ends = np.cumsum([len(tokens) for tokens in self.bins])
        self.begins = np.append(0, ends[:-1])  # the offset in the split of each shard's first token
        self.tokens = int(ends[-1])
        self.vocab_size = self.meta["vocab_size"]
        self.row_length = self.meta["row_length"].get(split, 0)
        self.rows = self.tokens // self.row_length if self.row_length else 0
        self.order = None, None  # (seed, epoch) and its permutation of the rows

    def batch(self, step, batch_size, block_size, seed, rank=0, world=1):
        """Training batch number `step` -> x, y, int64 (batch_size // world, T); y is -1 without loss.

        The batch of all ranks together is a pure function of (seed, step), and rank r takes its r-th
        slice: neither resuming nor the number of devices changes the training data of a run. A stream
        gives uniformly random windows, T = block_size. Rows come in epochs, each row once in each,
        T = row_length - 1. Raises ValueError when the split, block_size or world does not allow it.
        """
        if batch_size % world:
            raise ValueError(f"batch_size={batch_size} is no multiple of world={world}; make it one")
        length = self._context(block_size)
        share = batch_size // world
        mine = np.arange(rank * share, (rank + 1) * share)
        if not self.rows:
            starts = rng(seed, step).integers(0, self.tokens - length, size=batch_size)[mine]
            return self.read(starts, length)
        epochs, places = np.divmod(step * batch_size + mine, self.rows)
        for epoch in np.unique(epochs).tolist():  # ascending: the last one, kept, is the next batch's
            if self.order[0] != (seed, epoch):
                self.order = (seed, epoch), rng(seed, epoch).permutation(self.rows)
            places[epochs == epoch] = self.order[1][places[epochs == epoch]]
        return self.read(places * self.row_length, length)

    def windows(self, length, count=None):
        """Where to `read` for an evaluation: starts, int64 (n,), of n windows that share no target.

        They are spread evenly over the split. n is `count`, or fewer where no more fit; None: all that fit.
        Raises ValueError when not even one fits.
        """
        length = self._context(length)
        fit = self.rows or (self.tokens - 1) // length
        count = fit if count is None else min(count, fit)
        if self.rows:
            return np.arange(count) * self.rows // count * self.row_length
        # the step between starts is at least `length`, as count * length <= tokens - 1
        return np.arange(count) * (self.tokens - 1 - length) // max(count - 1, 1)

    def read(self, starts, length):
        """The windows at `starts` (token offsets, (n,)) -> x, y, int64 (n, T); y[i] follows x[i].

        T is `length`, or row_length - 1 for rows, whose starts are multiples of row_length. y is -1
        where the mask says that the target carries no loss. Raises ValueError for a token beyond the
        vocabulary.
        """
        length, starts = self._context(length), np.asarray(starts, dtype=np.int64)
        if starts.size and not 0 <= starts.min() <= starts.max() < self.tokens - length:
            bounds = f"[0, {self.tokens - length})"
            raise ValueError(f"starts must lie in {bounds}, got {starts.min()} to {starts.max()}")
        window = self._gather(self.bins, starts, length + 1)
        if window.size and window.max() >= self.vocab_size:
            row, column = np.argwhere(window >= self.vocab_size)[0]
            name = self.names[self._shard(starts[row] + column)]
            token = window[row, column]
            raise self._broken(name, f"has token {token}, beyond vocab_size={self.vocab_size}")
        x, y = window[:, :-1].copy(), window[:, 1:].copy()
        if self.masks:
            y[self._gather(self.masks, starts + 1, length) == 0] = -1
        return x, y

    def _broken(self, name, fault):
        again = f"delete {self.folder} and write it again with {command_for(self.folder)}"
        return ValueError(f"{self.folder / name} {fault}; {again}")

    def _map(self, name, count, dtype):
        path, size = self.folder / name, count * np.dtype(dtype).itemsize
        if not path.exists():
            raise self._broken(name, "is missing, though meta.json lists it")
        if path.stat().st_size != size:
            raise self._broken(name, f"has {path.stat().st_size} bytes instead of {size}")
        try:
            mapped = np.memmap(path, dtype=dtype, mode="r")
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}); see to its rights") from None
        return mapped.view(np.ndarray)  # slices of the bare view are cheaper

    def _context(self, length):
        if not self.row_length:
            if length >= self.tokens:
                need = f"a window of {length} and its last target need {length + 1}"
                raise ValueError(f"split {self.split!r} of {self.folder} has {self.tokens} tokens, {need}; "
                                 "take a shorter block_size")
            return length
        if length < self.row_length - 1:
            need = f"rows of {self.row_length} tokens, so block_size >= {self.row_length - 1}"
            raise ValueError(f"{self.folder} has {need}, got {length}")
        return self.row_length - 1

    def _shard(self, offset):
        return int(np.searchsorted(self.begins, offset, side="right")) - 1

    def _gather(self, arrays, starts, length):
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts.tolist()):
            done = 0
            while done < length:  # once, unless the window goes on in the next shard
                i = self._shard(start + done)
                at = start + done - int(self.begins[i])
                part = arrays[i][at : at + length - done]
                row[done : done + len(part)] = part
                done += len(part)
        return out


# writing


def publish(file, path):
    """Give a written file its name: even after a loss of power the old or the new one is whole."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def no_room(path, error):
    fault = f"{path} could not be written ({error.strerror})"
    return OSError(f"{fault}; make room there, or choose another with --out, and start again")


def save_json(path, value):
    """Write `value` as JSON: readers find the old file or the new one, never half of one."""
    part = Path(f"{path}.tmp")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=1) + "\n")
            publish(file, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise no_room(path, error) from None


def check_disk(folder, size):
    """Raises ValueError when the disk of a folder, which may not be there yet, lacks `size` bytes."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    need, free = size / 1e9, shutil.disk_usage(there).free / 1e9
    if need > free:
        raise ValueError(f"{folder} needs {need:.1f} GB, its disk has {free:.1f} GB free; "
                         "make room or choose another with --out")


def check_folder(folder, source=None):
    """Refuse to write a set into a folder with files that are not its own.

    Only the files of an unfinished set may be there, and `source`, the file that the set is made of.
    Raises FileExistsError for a whole set, ValueError for anything else.
    """
    if (folder / "meta.json").exists():
        raise FileExistsError(f"{folder} holds a whole set already; delete it to write it again")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose a folder with --out")
    paths = sorted(folder.iterdir()) if folder.exists() else []
    unfinished = (folder / "unfinished").exists()
    names = {"unfinished", "progress.json", "progress.json.tmp", "meta.json.tmp"}
    sources = [Path(f"{source}{end}").absolute() for end in ("", ".part")]
    for path in paths:
        is_own = unfinished and (path.name in names or SHARD.fullmatch(path.name))
        if not is_own and path.absolute() not in sources:
            raise ValueError(f"{path} is no file of an unfinished data set; "
                             "move it away, or choose another --out")


def claim(folder, source=None):
    """Take a folder to write a set in -> its file "unfinished", locked until it is closed.

    Waits while another process writes there. Raises as `check_folder` does, and deletes nothing.
    """
    check_folder(folder, source)
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "unfinished", "a")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        print(f"waiting for the process that writes {folder}", flush=True)
        fcntl.lockf(lock, fcntl.LOCK_EX)
        check_folder(folder, source)
        raise ValueError(f"the process that wrote {folder} did not finish it; start again")
    except OSError:  # a file system without locks
        pass
    check_folder(folder, source)  # another process may just have finished the set
    return lock


class Writer:
    """Writes a set into `folder`, in shards of at most `shard_tokens` tokens.

    keep: the finished shards {name: tokens} of an interrupted run that this one goes on from; its
        other files are deleted.
    source: the file that the set is made of, where it may lie in the folder.
    A shard is streamed to a temporary name and renamed when it is full, so a half-written one never
    looks whole. Waits and raises as `claim` does; raises OSError when the disk is full, with the
    temporary files removed, and ValueError when a shard of `keep` is not there.
    """

    def __init__(self, folder, shard_tokens=100_000_000, keep=None, source=None):
        self.folder, self.shard_tokens = Path(folder), shard_tokens
        self.shards = dict(keep or {})  # the finished ones
        self.open = {}  # split -> [tokens so far, [(open file, its final path), ...]]
        self.masked, self.row_length, self.largest = None, {}, 0
        self.lock = claim(self.folder, source)
        for name, count in self.shards.items():
            path = self.folder / name
            if not path.exists() or path.stat().st_size != 2 * count:
                raise ValueError(f"{path} has changed since; delete {self.folder} to start over")
        for path in self.folder.iterdir():
            shard = SHARD.fullmatch(path.name)
            if shard and f"{shard[1]}.bin" not in self.shards:
                path.unlink()

    def write(self, split, tokens, loss=None):
        """Append tokens, (n,) of a stream or (rows, row_length), to a split; `loss` is their mask.

        Raises ValueError for a token outside uint16, and for shapes or masks unlike the earlier ones.
        """
        tokens = np.asarray(tokens)
        kind = tokens.shape[1] if tokens.ndim == 2 else 0, loss is not None
        was = self.row_length.get(split, kind[0]), kind[1] if self.masked is None else self.masked
        if tokens.ndim not in (1, 2) or was != kind:
            raise ValueError(f"(row_length, masked) of {split!r} was {was}, got {kind} from tokens of shape "
                             f"{tokens.shape}; a split is of one kind")
        if loss is not None and np.shape(loss) != tokens.shape:
            raise ValueError(f"tokens are {tokens.shape}, their mask is {np.shape(loss)}; "
                             "give one value per token")
        if not tokens.size:
            return
        if tokens.min() < 0 or tokens.max() > 65535:
            raise ValueError(f"tokens must lie in [0, 65535], got {tokens.min()} to {tokens.max()}")
        self.row_length[split], self.masked = kind
        self.largest = max(self.largest, int(tokens.max()))
        tokens, loss = tokens.ravel(), None if loss is None else np.ravel(loss)
        done = 0
        while done < len(tokens):
            done += self._fill(split, tokens[done:], None if loss is None else loss[done:])

    def _fill(self, split, tokens, loss):
        """Append as much of a flat array as the open shard still takes; -> the number of tokens."""
        row = self.row_length[split] or 1
        size = max(self.shard_tokens // row, 1) * row  # whole rows only
        with self._tidy():
            if split not in self.open:
                number = sum(split_of(name) == split for name in self.shards)
                path = self.folder / f"{split}_{number:06d}.bin"
                # the mask is renamed first: a .bin under its own name has its mask beside it
                paths = [path] if loss is None else [path.with_suffix(".loss"), path]
                self.open[split] = [0, [(open(f"{p}.tmp", "wb"), p) for p in paths]]
            room = size - self.open[split][0]
            tokens = tokens[:room]
            files = self.open[split][1]
            files[-1][0].write(tokens.astype("<u2").tobytes())
            if loss is not None:
                files[0][0].write((loss[:room] != 0).astype("u1").tobytes())
        self.open[split][0] += len(tokens)
        if len(tokens) == room:
            self.flush(split)
        return len(tokens)

    def flush(self, split):
        """Finish the open shard of a split, full or not, if there is one."""
        if split in self.open:
            count, files = self.open[split]
            with self._tidy():
                for file, path in files:
                    publish(file, path)
            del self.open[split]
            self.shards[path.name] = count

    def finish(self, vocab_size, tokenizer, separator=None, **more):
        """Flush every split and write meta.json, with `more` in it, if it is given: words and asked.

        Raises ValueError for tokens beyond vocab_size and an empty set.
        """
        for split in list(self.open):
            self.flush(split)
        meta = {"vocab_size": vocab_size, "tokenizer": tokenizer, "separator": separator}
        meta["row_length"] = {split: n for split, n in self.row_length.items() if n}
        meta["loss"] = "mask" if self.masked else "all"
        meta["shards"] = dict(sorted(self.shards.items()))
        if not self.shards:
            (self.folder / "unfinished").unlink(missing_ok=True)
            raise ValueError(f"nothing was written to {self.folder}; the source holds no tokens")
        if not self.largest < vocab_size <= 65536:
            need = f"[{self.largest + 1}, 65536]: the tokens reach {self.largest}, stored as uint16"
            raise ValueError(f"vocab_size must lie in {need}, got {vocab_size}")
        save_json(self.folder / "meta.json", meta | more)
        (self.folder / "unfinished").unlink(missing_ok=True)
        self.lock.close()

    @contextlib.contextmanager
    def _tidy(self):
        """A full disk becomes one line, and leaves no temporary file."""
        try:
            yield
        except OSError as error:
            for _, files in self.open.values():
                for file, path in files:
                    with contextlib.suppress(OSError):  # its buffer finds no room either
                        file.close()
                    Path(f"{path}.tmp").unlink(missing_ok=True)
            self.open = {}
            raise no_room(self.folder, error) from None


def write_rows(folder, symbols, seed, generate, hold_out=False, **splits):
    """Write a synthetic task.

    Each split, name=(rows, options), is filled by generate(rng, rows, **options) -> tokens and their
    loss mask, both (rows, row_length). The same seed gives the same bytes, and fewer rows are the
    first of more. Train comes first. A row of another split that is also in train is drawn again.
    hold_out: the task has so few different rows that train would draw nearly all of them. Keep a
    tenth of them, chosen by a hash, out of train. Raises ValueError for a negative seed or number
    of rows, for a disk without room, and when train leaves no rows for another split.
    """
    size = 0
    for split, (rows, options) in splits.items():
        if rows < 0:
            raise ValueError(f"{split}={rows} is negative; use 0 or more")
        tokens, _ = generate(rng(seed, 0), 1, **options)
        size += 3 * rows * tokens.size  # two bytes a token, and one of the mask
    check_disk(Path(folder), size)
    writer = Writer(folder)
    known = np.zeros(1, dtype=np.uint64)  # the keys of train's rows, sorted
    for i, (split, (rows, options)) in enumerate(splits.items()):
        written = [known]
        for start in range(0, rows, 1000):
            random = rng(seed, i << 32 | start)
            tokens, loss = generate(random, 1000, **options)
            again = np.arange(1000)  # the rows to look at, then those to draw again
            for _ in range(500):
                keys = row_keys(tokens[again])
                if split == "train":
                    again = again[keys % 10 == 0] if hold_out else again[:0]
                else:
                    again = again[known[np.searchsorted(known[:-1], keys)] == keys]
                if not len(again):
                    break
                tokens[again], loss[again] = generate(random, len(again), **options)
            else:
                raise ValueError(f"{split}={rows}: there are hardly any rows that are not in train; "
                                 "take fewer train rows or a larger task")
            tokens, loss = tokens[: rows - start], loss[: rows - start]
            written.append(row_keys(tokens))
            writer.write(split, tokens, loss)
        if split == "train":
            known = np.sort(np.concatenate(written))
    writer.finish(len(symbols), {"symbols": symbols})
    print(f"{folder}: " + ", ".join(f"{rows:,} {split}" for split, (rows, _) in splits.items()))


def row_keys(tokens):
    """A 64-bit hash of each row: tokens (rows, row_length) -> uint64 (rows,)."""
    weights = rng(0, 0).integers(1, 2**64, 1 + tokens.shape[1], dtype=np.uint64)
    keys = tokens.astype(np.uint64) @ weights[1:] + weights[0]
    return keys ^ keys >> np.uint64(32)


# scripts


def options(prepare, text):
    """"length=64,seed=1" as arguments of prepare, of its signature's types. ValueError for others."""
    types, arguments = prepare.__annotations__, {}
    for option in filter(None, text.split(",")):
        name, _, value = option.partition("=")
        try:
            arguments[name] = types[name](value)
        except (KeyError, ValueError):
            known = ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items()) or "none"
            fault = f"data option {option!r} is unknown or of another type"
            raise ValueError(f"{fault}; there are: {known}") from None
    return arguments


def prepare(data, folder):
    """Make a missing set that needs no download; of several processes one does, the others wait."""
    name, _, text = data.partition("@")
    if name not in SCRIPTS or (Path(folder) / "meta.json").exists():
        return  # if something is wrong, Split says it
    module = importlib.import_module(f"data.{name}")
    arguments = options(module.prepare, text)
    if module.DOWNLOAD:
        raise FileNotFoundError(f"data set {data!r} is not prepared and needs a download; "
                                f"run {command_for(folder)}")
    with contextlib.suppress(FileExistsError):  # another process was faster
        module.prepare(folder, **arguments)


def command(prepare, doc, named=None):
    """The command line of a data script: the arguments of prepare that have a type, and --out.

    named: a function of the flags -> the name of the set; None: the script's name with these flags.
    A failure is one line.
    """
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=as_written)
    for name, kind in prepare.__annotations__.items():
        default = inspect.signature(prepare).parameters[name].default
        how = dict(default=argparse.SUPPRESS, help=f"default: {default}")
        if default is inspect.Parameter.empty:
            how = dict(required=True)
        parser.add_argument(f"--{name}", type=kind, **how)
    parser.add_argument("--out", help="the folder to write; default: in data/, named after the options")
    flags = vars(parser.parse_args())
    out = flags.pop("out")
    try:
        if out is None:
            out = locate(named(**flags) if named else name_of(prepare, flags))
        elif not out:
            raise ValueError("--out= names no folder; give one, or leave it out")
        prepare(out, **flags)
    except (ImportError, ValueError, OSError, MemoryError) as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; give the same command again") from None


def name_of(prepare, flags):
    """The name of the set that a script writes with these flags, such as flip_flop@length=256."""
    script = Path(inspect.getfile(prepare)).stem
    name = ",".join(f"{key}={value}" for key, value in flags.items())
    if os.sep in name:
        raise ValueError(f"an option with a {os.sep} needs --out too, the folder to write")
    return f"{script}@{name}" if name else script
