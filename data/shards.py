"""One format for every data set of the project: its writer, its reader, its tokenizers.

data/<name>/ holds

  <split>_000000.bin, ...   the tokens, raw little-endian uint16
  <split>_000000.loss, ...  in masked sets only: uint8 per token, 1 = this token is a target that carries loss
  meta.json                 written last, so its presence means that the set is whole:
    vocab_size   at most 65536
    tokenizer    "bytes", "gpt2" or another name that tiktoken knows, or {"symbols": [the string of id 0, ...]}
    separator    the token id between documents, or null
    row_length   {split: n} for splits in which every n tokens are a row, an example of its own; the others, and
                 all splits of {}, are one long stream each
    loss         "all" | "mask"
    shards       {"train_000000.bin": number of tokens, ...}

`Split` reads a set, `Writer` writes one, `write_documents` writes a large text corpus on all cores, and `write_rows` a
synthetic task. A set is named after its script, with the options that it was written with: `stdlib`,
`flip_flop@length=256,train=32000`.
"""

import argparse
import collections
import hashlib
import http.client
import inspect
import itertools
import json
import multiprocessing
import os
import re
import signal
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np


def split_of(name):
    """The split that a shard belongs to: "train_000000.bin" -> "train"."""
    return name.rpartition("_")[0]


def save_json(path, value):
    """Write `value` as JSON in one stroke: readers find the old file or the new one, never half of one."""
    part = Path(f"{path}.tmp")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def locate(data):
    """The folder of a data set by its name, or `data` itself where it is a path."""
    return Path(data) if os.sep in data else Path(__file__).parent / data


def command_for(folder):
    """The command that writes the data set of that folder."""
    name, _, options = Path(folder).name.partition("@")
    return " ".join([f"python -m data.{name}", *(f"--{option}" for option in options.split(",") if option)])


class Split:
    """One split of a prepared set, memory-mapped: nothing is read before a batch asks for it.

    Attributes: meta (the dict of meta.json), vocab_size, tokens (in the whole split), rows (0 for a stream).
    Raises FileNotFoundError when the set is not there, ValueError when its files are not those of meta.json.
    """

    def __init__(self, folder, split):
        folder = Path(folder)
        if not (folder / "meta.json").exists():
            raise FileNotFoundError(f"no meta.json in {folder}; write the data with `{command_for(folder)}`")
        self.folder, self.split = folder, split
        self.meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.names = sorted(name for name in self.meta["shards"] if split_of(name) == split)
        if not self.names:
            known = ", ".join(sorted({split_of(name) for name in self.meta["shards"]}))
            raise ValueError(f"{folder} has no split {split!r}; it has: {known}")
        for path in folder.glob("*.bin"):
            if split_of(path.name) == split and path.name not in self.names:
                raise self._broken(path.name, "is not in meta.json, another run left it")
        counts = self.meta["shards"]
        self.bins = [self._map(name, counts[name], "<u2") for name in self.names]
        self.masks = []
        if self.meta["loss"] == "mask":
            self.masks = [self._map(name[:-3] + "loss", counts[name], "u1") for name in self.names]
        ends = np.cumsum([len(tokens) for tokens in self.bins])
        self.begins = np.append(0, ends[:-1])  # the offset in the split of each shard's first token
        self.tokens = int(ends[-1])
        self.vocab_size, self.row_length = self.meta["vocab_size"], self.meta["row_length"].get(split, 0)
        self.rows = self.tokens // self.row_length if self.row_length else 0
        self.order = None, None  # (seed, epoch) and its permutation of the rows

    def batch(self, step, batch_size, block_size, seed, rank=0, world=1):
        """Training batch number `step` -> x, y, int64 (batch_size // world, T); y is -1 where there is no loss.

        The batch of all ranks together is a pure function of (seed, step), and rank r takes its r-th slice:
        neither resuming nor the number of devices changes what a run is trained on. A stream gives uniformly
        random windows, T = block_size. Rows come in epochs, each row once in each, T = row_length - 1.
        Raises ValueError when the split, block_size or world does not allow it.
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

        They are spread evenly over the split. n is `count`, or fewer where no more fit; None: as many as fit.
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
        """The windows at `starts` (token offsets, (n,)) -> x, y, int64 (n, T), where y[i] is what follows x[i].

        T is `length`, or row_length - 1 for rows, whose starts are multiples of row_length. y is -1 where the
        mask says that the target carries no loss. Raises ValueError for a token beyond the vocabulary.
        """
        length, starts = self._context(length), np.asarray(starts, dtype=np.int64)
        if starts.size and not 0 <= starts.min() <= starts.max() < self.tokens - length:
            raise ValueError(f"starts must lie in [0, {self.tokens - length}), got {starts.min()} to {starts.max()}")
        window = self._gather(self.bins, starts, length + 1)
        if window.size and window.max() >= self.vocab_size:
            row, column = np.argwhere(window >= self.vocab_size)[0]
            name = self.names[self._shard(starts[row] + column)]
            raise self._broken(name, f"has token {window[row, column]}, beyond vocab_size={self.vocab_size}")
        x, y = window[:, :-1].copy(), window[:, 1:].copy()
        if self.masks:
            y[self._gather(self.masks, starts + 1, length) == 0] = -1
        return x, y

    def _broken(self, name, fault):
        again = f"delete {self.folder} and write it again with `{command_for(self.folder)}`"
        return ValueError(f"{self.folder / name} {fault}; {again}")

    def _map(self, name, count, dtype):
        path, size = self.folder / name, count * np.dtype(dtype).itemsize
        if not path.exists():
            raise self._broken(name, "is missing, though meta.json lists it")
        if path.stat().st_size != size:
            raise self._broken(name, f"has {path.stat().st_size} bytes instead of {size}")
        return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)  # slices of the bare view are cheaper

    def _context(self, length):
        if not self.row_length:
            if length >= self.tokens:
                size = f"{self.tokens} tokens, a window of {length} and its last target need {length + 1}"
                raise ValueError(f"split {self.split!r} of {self.folder} has {size}; take a shorter block_size")
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


def rng(seed, number):
    """A numpy generator that is a pure function of (seed, number), which are the key of its counter-based Philox."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))


class Writer:
    """Writes a set into `folder`, in shards of at most `shard_tokens` tokens; what an earlier run left goes.

    keep: the finished shards {name: tokens} of an interrupted run that this one goes on from.
    A shard is streamed to a temporary name and renamed when it is full, so a half-written one never looks whole.
    """

    def __init__(self, folder, shard_tokens=100_000_000, keep=None):
        self.folder, self.shard_tokens = Path(folder), shard_tokens
        self.shards = dict(keep or {})  # the finished ones
        self.open = {}  # split -> [tokens so far, [(final path, open file), ...]]
        self.masked, self.row_length, self.largest = None, {}, 0
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "meta.json").unlink(missing_ok=True)  # first: from here on the set is not whole
        for path in self.folder.iterdir():
            shard = re.fullmatch(r"(.+_\d{6})\.(bin|loss)(\.tmp)?", path.name)
            if shard and f"{shard[1]}.bin" not in self.shards:
                path.unlink()

    def write(self, split, tokens, loss=None):
        """Append tokens, (n,) of a stream or (rows, row_length), to a split; `loss`, of the same shape, is the mask.

        Raises ValueError for a token outside uint16 and for shapes or masks that differ from the earlier ones.
        """
        tokens = np.asarray(tokens)
        kind = tokens.shape[1] if tokens.ndim == 2 else 0, loss is not None
        was = self.row_length.get(split, kind[0]), kind[1] if self.masked is None else self.masked
        if tokens.ndim not in (1, 2) or was != kind:
            was = f"(row_length, masked) of {split!r} was {was}"
            raise ValueError(f"{was}, got {kind} from tokens of shape {tokens.shape}; a split is of one kind")
        if loss is not None and np.shape(loss) != tokens.shape:
            raise ValueError(f"tokens are {tokens.shape}, their mask is {np.shape(loss)}; give one value per token")
        if not tokens.size:
            return
        if tokens.min() < 0 or tokens.max() > 65535:
            raise ValueError(f"tokens must lie in [0, 65535], got {tokens.min()} to {tokens.max()}")
        self.row_length[split], self.masked = kind
        self.largest = max(self.largest, int(tokens.max()))
        tokens, loss = tokens.ravel(), None if loss is None else np.ravel(loss)
        done = 0
        while done < len(tokens):
            done += self.fill(split, tokens[done:], None if loss is None else loss[done:])

    def fill(self, split, tokens, loss=None):
        """Append as much of a flat array as the open shard of a split still takes; -> the number of tokens."""
        if split not in self.open:
            number = sum(split_of(name) == split for name in self.shards)
            path = self.folder / f"{split}_{number:06d}.bin"
            # the mask is renamed first: a .bin under its own name has its mask beside it
            paths = [path] if loss is None else [path.with_suffix(".loss"), path]
            self.open[split] = [0, [(p, open(f"{p}.tmp", "wb")) for p in paths]]
        row = self.row_length.get(split) or 1
        room = max(self.shard_tokens // row, 1) * row - self.open[split][0]  # whole rows only
        tokens = tokens[:room]
        files = self.open[split][1]
        files[-1][1].write(tokens.astype("<u2").tobytes())
        if loss is not None:
            files[0][1].write((loss[:room] != 0).astype("u1").tobytes())
        self.open[split][0] += len(tokens)
        if len(tokens) == room:
            self.flush(split)
        return len(tokens)

    def flush(self, split):
        """Finish the open shard of a split, full or not, if there is one."""
        if split in self.open:
            count, files = self.open.pop(split)
            for path, file in files:
                file.close()
                os.replace(file.name, path)
            self.shards[path.name] = count

    def finish(self, vocab_size, tokenizer, separator=None):
        """Flush every split and write meta.json. Raises ValueError for tokens beyond vocab_size and an empty set."""
        for split in list(self.open):
            self.flush(split)
        meta = {"vocab_size": vocab_size, "tokenizer": tokenizer, "separator": separator}
        meta["row_length"] = {split: n for split, n in self.row_length.items() if n}
        meta["loss"] = "mask" if self.masked else "all"
        meta["shards"] = dict(sorted(self.shards.items()))
        if not self.shards:
            raise ValueError(f"nothing was written to {self.folder}; the source holds no tokens")
        if not self.largest < vocab_size <= 65536:
            need = f"in [{self.largest + 1}, 65536]: the tokens reach {self.largest} and are stored as uint16"
            raise ValueError(f"vocab_size must lie {need}, got {vocab_size}")
        save_json(self.folder / "meta.json", meta)


def tokenizer(meta):
    """The tokenizer of a set: encode(text) -> list of ids, decode(ids) -> text.

    In text, <|endoftext|> is the separator. Symbols are written with spaces between them.
    Raises ValueError when tiktoken cannot load it, and in encode for an unknown symbol.
    """
    if isinstance(meta["tokenizer"], dict):
        symbols = meta["tokenizer"]["symbols"]
        ids = {symbol: i for i, symbol in enumerate(symbols)}

        def encode(text):
            unknown = [word for word in text.split() if word not in ids]
            if unknown:
                raise ValueError(f"{unknown[0]!r} is no symbol of this set; its symbols: {' '.join(symbols)}")
            return [ids[word] for word in text.split()]

        return SimpleNamespace(encode=encode, decode=lambda tokens: " ".join(symbols[i] for i in tokens))
    encoding = load_encoding(meta["tokenizer"])
    return SimpleNamespace(encode=lambda text: encoding.encode(text, allowed_special="all"), decode=encoding.decode)


def load_encoding(name):
    """The tiktoken.Encoding of a name; "bytes" needs no download: id = byte, and 256 between documents."""
    import tiktoken

    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        end = {"<|endoftext|>": 256}
        return tiktoken.Encoding(name, pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=end)
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # an unknown name, no network, a broken download: whatever tiktoken meets
        need = "tiktoken must know the name, and needs the network once or TIKTOKEN_CACHE_DIR with its files"
        raise ValueError(f"tokenizer {name!r} did not load ({type(error).__name__}): {need}") from None


def write_documents(
    folder, documents, tokenizer, prepend=False, val_documents=None, limit=None, shard_tokens=100_000_000
):
    """Tokenise a text corpus on all cores and write it as the splits val and train; goes on after an interruption.

    documents: a function, documents(skip) -> iterator of str that begins with document number `skip`.
    prepend: the end-of-text token goes before each document instead of after it.
    val_documents: that many first documents are val; None: the whole first shard is.
    limit: stop after that many documents. However often a run is stopped, the files come out the same to the byte.
    Raises ValueError when the folder holds a part of a set that was begun with other arguments.
    """
    folder = Path(folder)
    progress = folder / "progress.json"  # lives as long as the set is not whole
    if (folder / "meta.json").exists():
        progress.unlink(missing_ok=True)
        print(f"{folder} is whole already; delete it to write it again")
        return
    encoding = load_encoding(tokenizer)
    if encoding.n_vocab > 65536:
        raise ValueError(f"tokenizer {tokenizer!r} has {encoding.n_vocab} tokens, uint16 holds 65536; take another")
    end = np.array([encoding.eot_token], dtype=np.uint16)
    asked = {"tokenizer": tokenizer, "prepend": prepend, "val_documents": val_documents, "limit": limit}
    asked["shard_tokens"] = shard_tokens
    saved = {"asked": asked, "shards": {}, "document": 0, "offset": 0}
    if progress.exists():
        saved = json.loads(progress.read_text(encoding="utf-8"))
        if saved["asked"] != asked:
            raise ValueError(f"{folder} was begun with {saved['asked']}, not {asked}; delete it to start over")
    writer = Writer(folder, shard_tokens, keep=saved["shards"])
    first, offset = saved["document"], saved["offset"]
    texts = itertools.islice(documents(first), None if limit is None else limit - first)
    began = shown = time.monotonic()
    seen = 0
    for index, tokens in enumerate(encode_all(texts, tokenizer), first):
        tokens = np.concatenate([end, tokens] if prepend else [tokens, end])
        seen += len(tokens) - offset
        while offset < len(tokens):
            val = not writer.shards if val_documents is None else index < val_documents
            if not val:
                writer.flush("val")
            count = len(writer.shards)
            offset += writer.fill("val" if val else "train", tokens[offset:])
            if len(writer.shards) > count:  # no shard is open: all that was read so far is safe
                state = {"shards": writer.shards, "document": index, "offset": offset}
                save_json(progress, {"asked": asked, **state})
        offset = 0
        if time.monotonic() - shown > 1:
            shown = time.monotonic()
            rate = seen / 1e6 / (shown - began)
            print(f"\r{index + 1:,} documents, {rate:.2f}M tokens/s ", end="", flush=True)
    writer.finish(vocab_size=encoding.n_vocab, tokenizer=tokenizer, separator=encoding.eot_token)
    progress.unlink(missing_ok=True)
    print(f"\r{folder}: {sum(writer.shards.values()):,} tokens in {len(writer.shards)} shards")


def encode_all(texts, tokenizer):
    """Tokenise an iterator of str in parallel; yields uint16 arrays (n,) in the order of the texts."""
    cores = os.cpu_count() or 1
    with multiprocessing.Pool(cores, start_worker, (tokenizer,)) as pool:
        pending = collections.deque()  # a few blocks per core and no more: pool.imap would read ahead without end
        while True:
            block = list(itertools.islice(texts, 64))
            if block:
                pending.append(pool.apply_async(encode_block, (block,)))
            elif not pending:
                return
            if not block or len(pending) > 4 * cores:
                yield from pending.popleft().get()


def start_worker(tokenizer):
    global worker_encoding
    worker_encoding = load_encoding(tokenizer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is the parent's to answer, once


def encode_block(texts):
    # ordinary: a document that spells out <|endoftext|> holds these letters, not the token
    return [np.array(worker_encoding.encode_ordinary(text), dtype=np.uint16) for text in texts]


def hub(*args, **options):
    """datasets.load_dataset(...): a corpus from the Hugging Face hub. Raises ImportError without the library."""
    try:
        import datasets
    except ImportError:
        raise ImportError("corpora from the hub need one more package: pip install datasets") from None
    return datasets.load_dataset(*args, **options)


class Progress:
    """A line on the screen, renewed every second: how much is done, at what rate, and the time left."""

    def __init__(self):
        self.began = self.shown = time.monotonic()

    def show(self, share, count, unit):
        """share: of the work, in (0, 1]; count: what was done so far, in `unit`."""
        now = time.monotonic()
        if now - self.shown > 1:
            self.shown, seconds = now, now - self.began
            left = int(seconds * (1 / share - 1))
            rate = f"{count / seconds:,.0f} {unit}/s, left {left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
            print(f"\r{100 * share:.0f}%, {rate} ", end="", flush=True)


def download(url, path, sha256=None):
    """Fetch a file, unless it is there already -> path. Raises ValueError when it does not arrive whole."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part, digest, progress = Path(f"{path}.part"), hashlib.sha256(), Progress()
    print(f"downloading {url}")
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, open(part, "wb") as file:
            size = int(answer.headers["Content-Length"] or 0)
            while block := answer.read(1 << 20):
                file.write(block)
                digest.update(block)
                progress.show(file.tell() / size if size else 1, file.tell(), "bytes")
            got = file.tell()
        fault = f"{got:,} of {size:,} bytes came" if size and got != size else ""
    except (OSError, http.client.HTTPException) as error:
        fault = f"{type(error).__name__}: {error}"
    if not fault and sha256 not in (None, digest.hexdigest()):
        fault = f"its sha256 is {digest.hexdigest()}, not {sha256}"
    if fault:
        raise ValueError(f"{url} did not arrive whole ({fault}); try again, or fetch it otherwise and give it with --source=")
    os.replace(part, path)
    return path


def write_rows(folder, symbols, seed, generate, **splits):
    """Write a synthetic task. Each split, name=(rows, options), is filled by generate(rng, rows, **options) -> tokens and
    their loss mask, both (rows, row_length). The same seed gives the same bytes, and fewer rows are the first of more.
    Raises ValueError for a negative seed or number of rows."""
    for name, value in [("seed", seed), *((split, rows) for split, (rows, _) in splits.items())]:
        if value < 0:
            raise ValueError(f"{name}={value} is negative; use 0 or more")
    writer = Writer(folder)
    for i, (split, (rows, options)) in enumerate(splits.items()):
        for start in range(0, rows, 1000):
            tokens, loss = generate(rng(seed, i << 32 | start), 1000, **options)
            writer.write(split, tokens[: rows - start], loss[: rows - start])
    writer.finish(len(symbols), {"symbols": symbols})
    print(f"{folder}: " + ", ".join(f"{rows:,} {split}" for split, (rows, _) in splits.items()))


def options(prepare, text):
    """"length=64,seed=1" as arguments of prepare, of the types that its signature gives. ValueError for others."""
    types, found = prepare.__annotations__, {}
    for option in filter(None, text.split(",")):
        name, _, value = option.partition("=")
        try:
            found[name] = types[name](value)
        except (KeyError, ValueError):
            known = ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items())
            raise ValueError(f"data option {option!r} is unknown or of another type; there are: {known}") from None
    return found


def command(prepare, doc):
    """The command line of a data script: the arguments of prepare that have a type, and --out; a failure is one line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in prepare.__annotations__.items():
        default = inspect.signature(prepare).parameters[name].default
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=f"default: {default}")
    parser.add_argument("--out", help="the folder to write; by default one in data/ that is named after the options")
    flags = vars(parser.parse_args())
    out = flags.pop("out")
    name = Path(inspect.getfile(prepare)).stem + "@" * bool(flags) + ",".join(f"{k}={v}" for k, v in flags.items())
    if out is None and os.sep in name:
        parser.error("a path among the options needs --out too, the folder to write")
    try:
        prepare(locate(name) if out is None else out, **flags)
    except (ImportError, ValueError, FileNotFoundError) as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; give the same command again") from None
