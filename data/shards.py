"""One format for every data set of the project: its writer, its reader, its tokenizers.

data/<name>/ holds

  <split>_000000.bin, ...   the tokens, raw little-endian uint16
  <split>_000000.loss, ...  in masked sets only: uint8 per token, 1 = this token is a target that carries loss
  meta.json                 written last, so its presence means that the set is whole:
    vocab_size   at most 65536
    tokenizer    "bytes", "gpt2" or another name that tiktoken knows, a name on the Hugging Face hub
                 ("hf-internal-testing/llama-tokenizer"), the path of a tokenizer.json, or {"symbols": [id 0's string, ...]}
    separator    the token id between documents, or null
    row_length   {split: n} for splits in which every n tokens are a row, an example of its own; the others, and
                 all splits of {}, are one long stream each
    loss         "all" | "mask"
    shards       {"train_000000.bin": number of tokens, ...}
    words        {split: n}, in sets of text: what spaces and line ends separate. Perplexity per word, which does not depend on
                 the tokenizer, is exp(loss * tokens / words), with the sums over all tokens and words of the split

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
import shutil
import signal
import time
import urllib.request
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np

CORES = os.cpu_count() or 1
BLOCK = 1_000_000  # characters that a core is given at once to tokenise


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
    """The command that writes the data set of that folder, `quoted`; which script it is may be for the reader to know."""
    name, _, options = Path(folder).name.partition("@")
    scripts = sorted({path.stem for path in Path(__file__).parent.glob("[a-z]*.py")} - {"shards"})
    if name not in scripts:
        return f"`python -m data.NAME --out={folder}`; NAME is one of {', '.join(scripts)}"
    return f"`{' '.join([f'python -m data.{name}', *(f'--{option}' for option in options.split(',') if option)])}`"


class Split:
    """One split of a prepared set, memory-mapped: nothing is read before a batch asks for it.

    Attributes: meta (the dict of meta.json), vocab_size, tokens (in the whole split), rows (0 for a stream).
    Raises FileNotFoundError when the set is not there, ValueError when its files are not those of meta.json.
    """

    def __init__(self, folder, split):
        folder = Path(folder)
        if not (folder / "meta.json").exists():
            raise FileNotFoundError(f"no meta.json in {folder}; write the data with {command_for(folder)}")
        self.folder, self.split = folder, split
        self.meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.names = sorted(name for name in self.meta["shards"] if split_of(name) == split)
        if not self.names:
            known = ", ".join(sorted({split_of(name) for name in self.meta["shards"]}))
            raise ValueError(f"{folder} has no split {split!r}; it has: {known}; change --eval_splits, --evaluate or --split")
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
        again = f"delete {self.folder} and write it again with {command_for(self.folder)}"
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
    if seed < 0:
        raise ValueError(f"seed={seed} is negative; use 0 or more")
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

    def finish(self, vocab_size, tokenizer, separator=None, words=None):
        """Flush every split and write meta.json. Raises ValueError for tokens beyond vocab_size and an empty set."""
        for split in list(self.open):
            self.flush(split)
        meta = {"vocab_size": vocab_size, "tokenizer": tokenizer, "separator": separator}
        meta["row_length"] = {split: n for split, n in self.row_length.items() if n}
        meta["loss"] = "mask" if self.masked else "all"
        meta["shards"] = dict(sorted(self.shards.items()))
        if words is not None:
            meta["words"] = words
        if not self.shards:
            raise ValueError(f"nothing was written to {self.folder}; the source holds no tokens")
        if not self.largest < vocab_size <= 65536:
            need = f"in [{self.largest + 1}, 65536]: the tokens reach {self.largest} and are stored as uint16"
            raise ValueError(f"vocab_size must lie {need}, got {vocab_size}")
        save_json(self.folder / "meta.json", meta)


def tokenizer(meta):
    """The tokenizer of a set: encode(text) -> list of ids, decode(ids) -> text.

    In text, <|endoftext|> (Llama's and Mistral's: </s>) is the separator. Symbols are written with spaces between them.
    Raises ValueError when it cannot be loaded, and in encode for an unknown symbol.
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
    """The tiktoken.Encoding of a name, or what has the same methods; "bytes" needs no download: id = byte, and 256
    between documents. Raises ValueError when it cannot be loaded, ImportError without the library that it needs."""
    import tiktoken

    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        end = {"<|endoftext|>": 256}
        return tiktoken.Encoding(name, pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=end)
    try:
        if "/" in name or name.endswith(".json"):
            return HubEncoding(name)
        return tiktoken.get_encoding(name)
    except ImportError:
        raise
    except Exception as error:  # an unknown name, no network, a broken download: whatever the library meets
        need = "tiktoken must know the name, and needs the network once or TIKTOKEN_CACHE_DIR with its files"
        if "/" in name:
            need = "the hub must know the name, and needs the network once; one behind terms of use needs `hf auth login` too"
        if name.endswith(".json"):
            need = "it must be a file of the tokenizers library, with </s> or <|endoftext|> in its vocabulary"
        raise ValueError(f"tokenizer {name!r} did not load ({type(error).__name__}): {need}") from None


class HubEncoding:
    """A tokenizer of the Hugging Face hub, or of a local tokenizer.json, with the methods of tiktoken.Encoding."""

    def __init__(self, name):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError(f"tokenizer {name!r} needs one more package: pip install tokenizers") from None
        self.inner = Tokenizer.from_file(name) if name.endswith(".json") else Tokenizer.from_pretrained(name)
        self.inner.no_truncation()
        self.inner.no_padding()
        ids = self.inner.get_vocab()
        self.n_vocab = max(ids.values()) + 1
        self.eot_token = ids["</s>" if "</s>" in ids else "<|endoftext|>"]

    def encode(self, text, allowed_special="all"):
        self.inner.encode_special_tokens = False  # the library's name for: find them in the text
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_ordinary(self, text):
        self.inner.encode_special_tokens = True
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_to_numpy(self, text, disallowed_special):
        return np.array(self.encode_ordinary(text), dtype=np.uint32)

    def decode(self, tokens):
        return self.inner.decode(tokens, skip_special_tokens=False)


def write_documents(
    folder, corpus, tokenizer, separator="after", tokens=None, shortest=0, expect=None, shard_tokens=100_000_000, **origin
):
    """Tokenise a text corpus on all cores and write it; goes on after an interruption.

    corpus: a function -> {split: documents}, called after all checks: no download precedes an error. The splits are written in
        this order; documents(skip) is an iterator of str that begins with document number `skip`.
    separator: the end-of-text token goes "before" or "after" each document, or nowhere: None.
    tokens: {split: n}: a split that has n tokens is full, and its documents go on in the next one named here; None: no end.
    shortest: documents of fewer tokens are left out.
    expect: about how many tokens come in all, where `tokens` does not say; for the time left and the check of the disk.
    origin: what else the corpus depends on, by name.
    However often a run is stopped, the files come out the same to the byte. Raises ValueError when the folder holds a part of
    a set that was begun with other arguments, and when its disk has no room for the set.
    """
    folder, tokens = Path(folder), tokens or {}
    note = folder / "progress.json"  # lives as long as the set is not whole
    if (folder / "meta.json").exists():
        note.unlink(missing_ok=True)
        print(f"{folder} is whole already; delete it to write it again")
        return
    encoding = load_encoding(tokenizer)
    if encoding.n_vocab > 65536:
        raise ValueError(f"tokenizer {tokenizer!r} has {encoding.n_vocab} tokens, uint16 holds 65536; take another")
    asked = {"tokenizer": tokenizer, "separator": separator, "tokens": tokens, "shortest": shortest}
    asked |= {"shard_tokens": shard_tokens, **origin}
    saved = {"asked": asked, "shards": {}, "words": {}, "part": 0, "document": 0, "offset": 0}
    if note.exists():
        saved = json.loads(note.read_text(encoding="utf-8"))
        if saved["asked"] != asked:
            raise ValueError(f"{folder} was begun with {saved['asked']}, not {asked}; delete it to start over")
    held, words = collections.Counter(), collections.Counter(saved["words"])  # by split
    for name, count in saved["shards"].items():
        held[split_of(name)] += count
    if tokens and None not in tokens.values():
        expect = sum(tokens.values())
    check_disk(folder, (expect or 0) - held.total())
    parts = list(corpus().items())
    writer = Writer(folder, shard_tokens, keep=saved["shards"])

    def save(part, document, offset):  # when no shard is open: all that was read so far is safe
        state = {"shards": writer.shards, "words": words, "part": part, "document": document, "offset": offset}
        save_json(note, {"asked": asked, **state})

    share = lambda: held.total() / expect if expect else 0
    first, offset, progress = saved["document"], saved["offset"], Progress(share(), held.total())
    following = dict(itertools.pairwise(tokens))
    with multiprocessing.Pool(CORES, start_worker, (encoding, separator, shortest)) as pool:
        for part in range(saved["part"], len(parts)):
            split, documents = parts[part]
            while split and held[split] == tokens.get(split):  # full before the interruption
                split = following.get(split)
            for index, (ids, count) in enumerate(encode_all(documents(first), pool), first):
                if split and not offset:
                    words[split] += count
                while split and offset < len(ids):
                    shards, most = len(writer.shards), tokens.get(split)
                    done = writer.fill(split, ids[offset:] if most is None else ids[offset : offset + most - held[split]])
                    offset += done
                    held[split] += done
                    if held[split] == most:
                        writer.flush(split)
                        split = following.get(split)
                    if len(writer.shards) > shards:
                        save(part, index, offset)
                if not split:
                    break
                offset = 0
                progress.show(share(), held.total(), "tokens")
            if split:
                writer.flush(split)
            first = offset = 0
            save(part + 1, 0, 0)
    end = None if separator is None else encoding.eot_token
    writer.finish(vocab_size=encoding.n_vocab, tokenizer=tokenizer, separator=end, words=words)
    note.unlink(missing_ok=True)
    sizes = (f"{split} {count:,} tokens of {words[split]:,} words" for split, count in held.items())
    print(f"\r{f'{folder}: ' + ', '.join(sizes):78}")


def check_disk(folder, tokens):
    """Raises ValueError when the disk of a folder, there or yet to be made, has no room for so many tokens."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    need, free = 2 * tokens / 1e9, shutil.disk_usage(there).free / 1e9
    if need > free:
        raise ValueError(f"{folder} needs {need:.1f} GB, its disk has {free:.1f} GB free; make room or choose another with --out")


def encode_all(texts, pool):
    """Tokenise an iterator of str in parallel; yields (uint16 array (n,), number of words) in the order of the texts."""
    pending = collections.deque()  # two blocks per core and no more: pool.imap would read ahead without end
    for block in blocks(texts):
        pending.append(pool.apply_async(encode_block, (block,)))
        if len(pending) > 2 * CORES:
            yield from pending.popleft().get()
    while pending:
        yield from pending.popleft().get()


def blocks(texts):
    """Lists of texts, each of BLOCK characters or one text more: stories and books alike keep all cores busy."""
    block, size = [], 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def start_worker(*how):
    global worker
    worker = how
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is the parent's to answer, once


def encode_block(texts):
    encoding, separator, shortest = worker
    end, found = [encoding.eot_token], []
    for text in texts:
        # ordinary text: a document that spells out <|endoftext|> holds these letters, not the token
        ids = encoding.encode_to_numpy(text, disallowed_special=())
        if len(ids) < shortest:
            found.append((np.zeros(0, dtype=np.uint16), 0))
            continue
        if separator is not None:
            ids = np.concatenate([end, ids] if separator == "before" else [ids, end])
        letter = np.frombuffer(b" " + text.encode(), dtype=np.uint8) > 32  # words, ten times as fast as by text.split()
        found.append((ids.astype(np.uint16), int(np.count_nonzero(letter[1:] > letter[:-1]))))
    return found


def hub(*args, **options):
    """datasets.load_dataset(...): a corpus from the Hugging Face hub. Raises ImportError without the library."""
    try:
        import datasets
    except ImportError:
        raise ImportError("corpora from the hub need one more package: pip install datasets") from None
    return datasets.load_dataset(*args, **options)


class Progress:
    """A line on the screen, renewed every second: how much is done, at what rate, and the time left.

    share, count: of what an earlier run did, as in `show`.
    """

    def __init__(self, share=0.0, count=0):
        self.share, self.count = share, count
        self.began = self.shown = time.monotonic()

    def show(self, share, count, unit):
        """share: of the work, or 0 where the whole is unknown; count: what was done so far, in `unit`."""
        now = time.monotonic()
        if now - self.shown > 1:
            self.shown, seconds = now, now - self.began
            line = f"{count:,} {unit}, {(count - self.count) / seconds:,.0f} a second"
            if self.share < share <= 1:
                left = timedelta(seconds=int(seconds * (1 - share) / (share - self.share)))
                line = f"{100 * share:.0f}%, {line}, {left} left"
            print(f"\r{line:78}", end="", flush=True)


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


def texts(dataset, limit=None, column="text"):
    """The first `limit` rows of a datasets.Dataset or IterableDataset, as write_documents takes documents."""
    stop = lambda skip: None if limit is None else max(limit - skip, 0)
    return lambda skip: itertools.islice((row[column] for row in dataset.skip(skip)), stop(skip))


def write_rows(folder, symbols, seed, generate, **splits):
    """Write a synthetic task. Each split, name=(rows, options), is filled by generate(rng, rows, **options) -> tokens and
    their loss mask, both (rows, row_length). The same seed gives the same bytes, and fewer rows are the first of more.
    Raises ValueError for a negative seed or number of rows."""
    rng(seed, 0)  # what is wrong is refused before a file is touched
    for split, (rows, _) in splits.items():
        if rows < 0:
            raise ValueError(f"{split}={rows} is negative; use 0 or more")
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
            known = ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items()) or "none"
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
        parser.error(f"an option with a {os.sep} needs --out too, the folder to write")
    try:
        prepare(locate(name) if out is None else out, **flags)
    except (ImportError, ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; give the same command again") from None
