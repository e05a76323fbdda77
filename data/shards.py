"""The format that all data sets share, its reader and its writer.

A data set is a folder, data/NAME/. While it is being written, its name ends in .part, so a folder
under its final name is always complete. It holds

  train_000000.bin, ...     the tokens of the split train, raw little-endian uint16
  train_000000.loss, ...    only in masked sets: one uint8 per token, 1 if this target carries loss
  meta.json
    vocab_size   at most 65536
    tokenizer    its name, see data/tokenizer.py, or {"symbols": [the string of id 0, ...]}
    separator    the id of the token between documents, or null
    row_length   {split: n} if every n tokens are a row, which is an example of its own. A split
                 that is not listed is a stream, in which a window may begin at any token
    loss         "all", or "mask" if there are .loss files
    shards       {"train_000000.bin": number of tokens, ...}
    checksum     the CRC-32 of all tokens and masks in the order in which they were written, by
                 which a run notices that its set was written again with other contents
    and perhaps other entries, which a script has added
"""
import collections
import contextlib
import errno
import functools
import json
import os
import secrets
import shutil
import zlib
from pathlib import Path

import numpy as np

from config import Mistake

KEYS = ("vocab_size", "tokenizer", "separator", "row_length", "loss", "shards", "checksum")
NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # what some network drives answer

def rng(seed, number):
    """Returns a numpy generator that depends only on (seed, number)."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))

@functools.lru_cache(maxsize=2)  # two, because a batch may contain the border between two epochs
def order_of_rows(rows, seed, epoch):
    """Returns the order, (rows,), in which an epoch reads the rows of a split."""
    return rng(seed, epoch).permutation(rows)

@contextlib.contextmanager
def naming(path):
    """An OSError that names no file, as that of a full disk, gets the name of this one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise

@contextlib.contextmanager
def whole_file(path):
    """Opens a file for bytes, which gets its name at the end of the `with` block, once the disk has
    all of it. So a kill or a power cut at any moment leaves a complete file under this name, which
    is either the old one or the new one. An exception leaves the old one."""
    temporary = f"{path}.tmp"
    try:
        with naming(path), open(temporary, "wb") as file:
            yield file
            file.flush()
            try:
                os.fsync(file.fileno())
            except OSError as error:
                if error.errno not in NO_FSYNC:
                    raise
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise

def fingerprint(meta):
    """Returns a checksum of all contents of a data set and of how they are divided into splits,
    given its meta.json."""
    contents = (meta["checksum"], meta["row_length"], meta["shards"])
    return zlib.crc32(repr(contents).encode())

def split_of(shard):
    """Returns the split of a shard: "train" of "train_000000.bin"."""
    return shard.rpartition("_")[0]

class Split:
    """One split of a data set. Its files are memory-mapped, so a batch reads only its own tokens.

    `meta` is the content of meta.json, `tokens` is the number of tokens, `row_length` is the number
    of tokens per row, and `rows` is the number of rows. The last two are 0 in a stream.
    `fingerprint` is that of the set.

    Raises FileNotFoundError if there is no such set, and Mistake if it has no such split or if the
    size of a file is not the one in meta.json.
    """

    def __init__(self, folder, split):
        self.folder = Path(folder)
        self.split = split
        path = self.folder / "meta.json"
        if not path.exists():
            raise FileNotFoundError(f"{folder} is not a data set; write one with `python -m "
                                    "data.NAME` (data.text for your own text), or correct --data")
        try:
            self.meta = json.loads(path.read_text(encoding="utf-8"))
            shards = self.meta["shards"]
            row_length = self.meta["row_length"]
            self.fingerprint = fingerprint(self.meta)
        except (ValueError, KeyError):
            raise Mistake(f"{path} is damaged; delete {folder} and write it again") from None
        names = sorted(name for name in shards if split_of(name) == split)
        if not names:
            known = ", ".join(sorted({split_of(name) for name in shards}))
            raise Mistake(f"{folder} has no split {split!r}; it has: {known}")
        self.bins = [self._map(name, "<u2", shards[name]) for name in names]
        self.masks = []
        if self.meta["loss"] == "mask":
            for name in names:
                self.masks.append(self._map(name.replace(".bin", ".loss"), "u1", shards[name]))
        self.ends = np.cumsum([shards[name] for name in names])  # of each shard
        self.tokens = int(self.ends[-1])
        self.vocab_size = self.meta["vocab_size"]
        self.row_length = row_length.get(split, 0)
        self.rows = self.tokens // self.row_length if self.row_length else 0

    def batch(self, step, batch_size, block_size, seed, rank=0, world=1):
        """Returns the part of training batch `step` that belongs to one rank: x and y, int64
        (batch_size // world, T). y is -1 where a target carries no loss.

        A stream gives random windows with T = block_size. They are drawn with replacement, so a run
        that draws as many windows as the split holds leaves 37% of its tokens unread. Rows come in
        epochs, each of which holds every row once, with T = row_length - 1. The batch of all ranks
        together depends only on (seed, step), so a resumed run reads what an uninterrupted one
        would have read.
        """
        length = self._targets(block_size)
        size = batch_size // world
        mine = np.arange(rank * size, (rank + 1) * size)
        if not self.rows:
            starts = rng(seed, step).integers(0, self.tokens - length, size=batch_size)
            return self.read(starts[mine], length)
        rows = []
        # row `number` of the run, counted from the first batch on, has this place in this epoch
        for number in step * batch_size + mine:
            epoch, place = divmod(int(number), self.rows)
            rows.append(order_of_rows(self.rows, seed, epoch)[place])
        return self.read(np.array(rows) * self.row_length, length)

    def windows(self, length, count=None):
        """Returns the starts, int64 (n,), of windows that share no target and are spread evenly
        over the split. n is `count`, or the largest number that fits if count is None or too large.
        In a split of rows, each window is a row."""
        length = self._targets(length)
        fit = self.rows or (self.tokens - 1) // length
        count = fit if count is None else min(count, fit)
        numbers = np.arange(count)
        if self.rows:
            return numbers * self.rows // count * self.row_length
        return numbers * (self.tokens - 1 - length) // max(count - 1, 1)

    def read(self, starts, length):
        """Returns x and y, as `batch` does, of the windows whose first tokens have the numbers
        `starts` (n,). y holds the token after each token of x."""
        length = self._targets(length)
        starts = np.asarray(starts)
        assert starts.min(initial=0) >= 0, f"a window cannot start at {starts.min()}"
        window = self._gather(self.bins, starts, length + 1)
        x = window[:, :-1].copy()
        y = window[:, 1:].copy()
        if self.masks:
            y[self._gather(self.masks, starts + 1, length) == 0] = -1
        return x, y

    def is_same_set(self, meta):
        """Returns whether meta, the meta.json that a run has kept, describes these contents."""
        return all(self.meta[key] == meta[key] for key in KEYS)

    def _map(self, name, dtype, count):
        path = self.folder / name
        size = count * np.dtype(dtype).itemsize
        found = path.stat().st_size
        if found != size:
            raise Mistake(f"{path} has {found} bytes instead of {size}; delete {self.folder} and "
                          "write it again")
        return np.memmap(path, dtype, mode="r")

    def _targets(self, block_size):
        """Returns the number of targets in a window, which block_size sets only in a stream."""
        targets = block_size
        need = f"more text, or block_size < {self.tokens}"
        if self.row_length:
            targets = self.row_length - 1
            need = f"block_size >= {targets}"
        if targets > min(block_size, self.tokens - 1):
            raise Mistake(f"split {self.split!r} of {self.folder} has {self.tokens} tokens and "
                          f"needs {need}, got {block_size}")
        return targets

    def _gather(self, arrays, starts, length):
        """Returns int64 (n, length), the `length` values from each start on. `arrays` are the
        shards of a split, and a window may begin in one and end in another."""
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts.tolist()):
            shard = int(np.searchsorted(self.ends, start, side="right"))
            done = 0
            while done < length:
                begin = start + done - int(self.ends[shard])  # negative: counted from its end
                values = arrays[shard][begin:][: length - done]
                row[done : done + len(values)] = values
                done += len(values)
                shard += 1
        return out

class Writer(contextlib.AbstractContextManager):
    """Writes a data set:

        with Writer("data/mine", vocab_size=257, tokenizer="bytes", separator=256) as writer:
            writer.write("train", tokens)
            writer.write("val", other_tokens)

    The files are written into a folder of this process, data/mine.xxxxxxxx.part, and the end of the
    `with` block gives it its final name. So several processes may write the same set at once. Each
    of them does all of the work, and the set of the first one stays. If there is an error, the
    folder is deleted. Only a process that is killed leaves it behind, and you may delete it. (A
    corpus takes hours, so data/documents.py has a writer that resumes.)

    folder: where the set will be. If this folder exists, it must be empty.
    vocab_size, tokenizer, separator: as in meta.json.
    shard_tokens: a shard of rows has at most this many tokens, and a shard of a stream ends with
        the `write` that brings it to this many.

    `meta` will be meta.json, and `written` is {split: number of its tokens}.
    """

    def __init__(self, folder, vocab_size, tokenizer, separator=None, shard_tokens=100_000_000):
        if vocab_size > 65536:
            raise Mistake(f"tokenizer {tokenizer!r} has {vocab_size} tokens, but uint16 holds only "
                          "65536; choose another")
        # if this is a link to another disk, .part must lie on that disk, where it can be renamed
        self.folder = Path(folder).resolve()
        self._refuse_if_complete()
        if self.folder.exists() and any(self.folder.iterdir()):
            raise Mistake(f"{folder} holds other files; choose another folder with --out")
        self.shard_tokens = shard_tokens
        self.meta = {"vocab_size": vocab_size, "tokenizer": tokenizer, "separator": separator,
                     "row_length": {}, "loss": "all", "shards": {}, "checksum": 0}
        self.written = collections.Counter()
        self.part = self._make_part()
        # {split: the bytes of the tokens, or of the mask, that are not in a shard yet}
        self.tokens = collections.defaultdict(bytearray)
        self.masks = collections.defaultdict(bytearray)

    def __exit__(self, error, *_):
        try:
            if error is None:
                self._finish()
        finally:
            shutil.rmtree(self.part, ignore_errors=True)  # it is gone if it was renamed

    def write(self, split, tokens, loss=None):
        """Appends tokens to a split: (n,) to a stream, or (n, row_length) to rows. The mask `loss`
        has the same shape and is nonzero where a target carries loss."""
        tokens = np.asarray(tokens)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.meta["vocab_size"]:
            raise ValueError(f"tokens must lie in [0, {self.meta['vocab_size']}), got "
                             f"{tokens.min()} to {tokens.max()}")
        content = tokens.astype("<u2").tobytes()
        self.tokens[split] += content
        self.meta["checksum"] = zlib.crc32(content, self.meta["checksum"])
        self.written[split] += tokens.size
        if loss is not None:
            mask = (np.asarray(loss) != 0).tobytes()
            self.masks[split] += mask
            self.meta["checksum"] = zlib.crc32(mask, self.meta["checksum"])
            self.meta["loss"] = "mask"
        if tokens.ndim == 1:
            if len(self.tokens[split]) >= 2 * self.shard_tokens:
                self.end_shard(split)
            return
        length = self.meta["row_length"].setdefault(split, tokens.shape[1])
        if tokens.shape[1] != length:
            raise ValueError(f"{split} has rows of {length} tokens, got one of {tokens.shape[1]}")
        size = max(self.shard_tokens // length, 1) * length
        while len(self.tokens[split]) >= 2 * size:
            self.end_shard(split, size)

    def end_shard(self, split, size=None):
        """Saves the first `size` of the tokens that wait in a split, or all, as a shard."""
        size = size or len(self.tokens[split]) // 2
        if not size:
            return
        number = sum(split_of(name) == split for name in self.meta["shards"])
        name = f"{split}_{number:06d}"
        self._save(f"{name}.bin", self.tokens[split], 2 * size)
        if self.masks[split]:
            self._save(f"{name}.loss", self.masks[split], size)
        self.meta["shards"][f"{name}.bin"] = size

    def _make_part(self):
        """Makes the folder into which the files are written, and returns it."""
        part = Path(f"{self.folder}.{secrets.token_hex(4)}.part")
        part.mkdir(parents=True)
        return part

    def _finish(self):
        """Saves what is left, and gives the folder its final name."""
        for split in list(self.tokens):
            self.end_shard(split)
        if not self.meta["shards"]:
            raise Mistake(f"{self.folder} got no tokens; check its source")
        self.meta["shards"] = dict(sorted(self.meta["shards"].items()))
        self._save_meta("meta.json")
        try:
            os.rename(self.part, self.folder)
        except OSError:
            self._refuse_if_complete()  # another process was faster
            raise
        sizes = ", ".join(f"{split} {count:,} tokens" for split, count in self.written.items())
        print(f"wrote {self.folder}: {sizes}", flush=True)

    def _refuse_if_complete(self):
        if (self.folder / "meta.json").exists():
            raise FileExistsError(f"{self.folder} is already complete, and is kept")

    def _save_meta(self, name):
        content = bytearray(f"{json.dumps(self.meta, indent=1)}\n".encode())
        self._save(name, content, len(content))

    def _save(self, name, waiting, size):
        """Moves the first `size` bytes of `waiting` to a file."""
        with whole_file(self.part / name) as file, memoryview(waiting) as view:
            file.write(view[:size])
        del waiting[:size]
