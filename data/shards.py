"""The format that all data sets share, its reader and its writer.

A data set is a folder, data/NAME/. While it is being written, its name is data/NAME.part/, so a
folder under its final name is always complete. It holds

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
    settings, documents: only in text corpora, see write_documents in data/text.py
"""
import collections
import contextlib
import functools
import json
import os
import re
import time
import zlib
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such module
    fcntl = None

import numpy as np

from config import Mistake
from data import command_for

KEYS = {"vocab_size", "tokenizer", "separator", "row_length", "loss", "shards", "checksum"}

def rng(seed, number):
    """Returns a numpy generator that depends only on (seed, number)."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))

class Split:
    """One split of a data set. Its files are memory-mapped, so a batch reads only its own tokens.

    `meta` is the content of meta.json, `tokens` is the number of tokens, `row_length` is the number
    of tokens per row, and `rows` is the number of rows. The last two are 0 in a stream.
    `fingerprint` is a checksum of all contents of the set and of how they are divided into splits.

    Raises FileNotFoundError if there is no such set, and ValueError if it has no such split or if
    the size of a file is not the one in meta.json.
    """

    def __init__(self, folder, split):
        self.folder = Path(folder)
        self.split = split
        self.write_again = f"delete {folder} and write it again with {command_for(folder)}"
        path = self.folder / "meta.json"
        if not path.exists():
            command = command_for(folder)
            raise FileNotFoundError(f"no meta.json in {folder}; write the data with {command}, or "
                                    "correct --data, which without a slash is a folder in data/")
        try:
            self.meta = json.loads(path.read_text(encoding="utf-8"))
            known = sorted({split_of(name) for name in self.meta["shards"]})
            if not KEYS <= self.meta.keys():
                raise KeyError
        except (ValueError, KeyError, TypeError):
            raise Mistake(f"{path} is damaged; {self.write_again}") from None
        if split not in known:
            raise Mistake(f"{folder} has no split {split!r}; it has: {', '.join(known)}; change "
                             "--data, --eval_splits, --evaluate or --split")
        divided = self.meta["checksum"], self.meta["row_length"], self.meta["shards"]
        self.fingerprint = zlib.crc32(repr(divided).encode())
        self.bins = []
        self.masks = []
        for name, count in sorted(self.meta["shards"].items()):
            if split_of(name) != split:
                continue
            self.bins.append(self._map(name, count, "<u2"))
            if self.meta["loss"] == "mask":
                self.masks.append(self._map(name.replace(".bin", ".loss"), count, "u1"))
        self.ends = np.cumsum([len(tokens) for tokens in self.bins])  # where each shard ends
        self.tokens = int(self.ends[-1])
        self.vocab_size = self.meta["vocab_size"]
        self.row_length = self.meta["row_length"].get(split, 0)
        self.rows = self.tokens // self.row_length if self.row_length else 0
        # the orders of two epochs are kept, because a batch may contain the border between them
        self.order = functools.lru_cache(maxsize=2)(self._draw_order)

    def batch(self, step, batch_size, block_size, seed, rank=0, world=1):
        """Returns the part of training batch `step` that belongs to one rank: x and y, int64
        (batch_size // world, T). y is -1 where a target carries no loss.

        A stream gives random windows with T = block_size. Rows come in epochs, each of which holds
        every row once, with T = row_length - 1. The batch of all ranks together depends only on
        (seed, step), so a resumed run reads what an uninterrupted one would have read.
        """
        length = self._targets(block_size)
        size = batch_size // world
        mine = np.arange(rank * size, (rank + 1) * size)
        if not self.rows:
            starts = rng(seed, step).integers(0, self.tokens - length, size=batch_size)
            return self.read(starts[mine], length)
        rows = []
        for number in step * batch_size + mine:  # rows are counted from the first batch on
            epoch = number // self.rows
            rows.append(self.order(seed, epoch)[number % self.rows])
        return self.read(np.array(rows) * self.row_length, length)

    def windows(self, length, count=None):
        """Returns the starts, int64 (n,), of `count` windows that share no target and are spread
        evenly over the split. If count is None or fewer windows fit, it returns all that fit."""
        length = self._targets(length)
        fit = self.rows or (self.tokens - 1) // length
        count = fit if count is None else min(count, fit)
        if self.rows:
            return np.arange(count) * self.rows // count * self.row_length
        return np.arange(count) * (self.tokens - 1 - length) // max(count - 1, 1)

    def read(self, starts, length):
        """Returns x and y, as `batch` does, of the windows whose first tokens have the numbers
        `starts` (n,). y holds the token after each token of x."""
        length = self._targets(length)
        starts = np.asarray(starts, dtype=np.int64)
        window = self._gather(self.bins, starts, length + 1)
        if window.size and window.max() >= self.vocab_size:
            raise Mistake(f"{self.folder} has token {window.max()}, which is beyond "
                             f"vocab_size={self.vocab_size}; {self.write_again}")
        x = window[:, :-1].copy()
        y = window[:, 1:].copy()
        if self.masks:
            y[self._gather(self.masks, starts + 1, length) == 0] = -1
        return x, y

    def changes(self, meta):
        """Returns the keys of `meta`, as a run has kept it, whose values differ in this set."""
        return [key for key, value in meta.items() if self.meta.get(key) != value]

    def _draw_order(self, seed, epoch):
        return rng(seed, epoch).permutation(self.rows)

    def _map(self, name, count, dtype):
        path = self.folder / name
        size = count * np.dtype(dtype).itemsize
        if not path.exists():
            raise Mistake(f"{path} is missing; {self.write_again}")
        found = path.stat().st_size
        if found != size:
            raise Mistake(f"{path} has {found} bytes instead of {size}; {self.write_again}")
        return np.memmap(path, dtype, mode="r")

    def _targets(self, block_size):
        """Returns the number of targets in a window, which block_size sets only in a stream."""
        if self.row_length:
            targets = self.row_length - 1
            need = f"block_size >= {targets}"
        else:
            targets = block_size
            need = f"more text or block_size < {self.tokens}"
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
    """Writes a data set: `with Writer(folder) as writer`, then `write` as often as needed, and
    `finish` at the end.

    shard_tokens: a shard of rows has at most this many tokens, and a shard of a stream ends with
        the `write` that brings it to this many.
    settings: everything that the contents depend on. If they are given, a Writer resumes after the
        last shard that an interrupted one with the same settings saved. Otherwise it starts over.
        `meta` is saved with each shard, so a caller puts there what it needs for resuming.

    `written` is {split: number of its tokens}, which is printed during the work and at its end.

    Only one process at a time writes a set, and others wait for it. Windows cannot lock a folder,
    so do not start two there.

    Raises FileExistsError if the set is complete, and ValueError if it was written with other
    settings or if other files are in its place.
    """

    def __init__(self, folder, shard_tokens=100_000_000, settings=None):
        self.folder = Path(folder).resolve()
        self.unfinished = Path(f"{self.folder}.part")
        self.shard_tokens = shard_tokens
        # as in meta.json; a shard that is not listed does not count
        self.meta = {"shards": {}, "checksum": 0}
        if settings is not None:
            self.meta["settings"] = settings
        self.tokens = {}  # {split: the bytes of the tokens that are not in a shard yet}
        self.masks = {}
        self.row_length = {}
        self.written = collections.Counter()
        self.shown_time = time.monotonic()
        self.lock = lock(self.unfinished)
        try:
            self._take_place()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        with contextlib.suppress(OSError):  # it holds files, or it already has its final name
            self.unfinished.rmdir()
        if self.lock is not None:
            os.close(self.lock)

    def write(self, split, tokens, loss=None):
        """Appends tokens to a split: (n,) to a stream, or (n, row_length) to rows. The mask `loss`
        has the same shape and is nonzero where a target carries loss."""
        tokens = np.asarray(tokens)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() <= 65535:
            raise Mistake(f"tokens must lie in [0, 65535], got {tokens.min()} to {tokens.max()}")
        content = tokens.astype("<u2").tobytes()
        self.meta["checksum"] = zlib.crc32(content, self.meta["checksum"])
        self.written[split] += tokens.size
        if time.monotonic() - self.shown_time > 1:
            self.shown_time = time.monotonic()
            print(f"\r{self.written.total():,} tokens", end="", flush=True)
        waiting = self.tokens.setdefault(split, bytearray())
        waiting += content
        if loss is not None:
            mask = (np.asarray(loss) != 0).tobytes()
            self.meta["checksum"] = zlib.crc32(mask, self.meta["checksum"])
            self.masks.setdefault(split, bytearray()).extend(mask)
        if tokens.ndim == 1:
            if len(waiting) >= 2 * self.shard_tokens:
                self.end_shard(split)
            return
        length = self.row_length.setdefault(split, tokens.shape[1])
        if tokens.shape[1] != length:
            raise Mistake(f"{split} has rows of {length} tokens, got one of {tokens.shape[1]}")
        size = max(self.shard_tokens // tokens.shape[1], 1) * tokens.shape[1]
        while len(waiting) >= 2 * size:
            self.end_shard(split, size)

    def end_shard(self, split, size=None):
        """Saves the first `size` of the tokens that wait in a split, or all, as a shard."""
        tokens = self.tokens.get(split)
        if not tokens:
            return
        size = size or len(tokens) // 2
        number = sum(split_of(name) == split for name in self.meta["shards"])
        name = f"{split}_{number:06d}"
        self._save(f"{name}.bin", tokens, 2 * size)
        if split in self.masks:
            self._save(f"{name}.loss", self.masks[split], size)
        self.meta["shards"][f"{name}.bin"] = size
        if "settings" in self.meta:  # otherwise nothing can be resumed
            self._save_meta(self.meta)

    def finish(self, vocab_size, tokenizer, separator=None, **more):
        """Saves the last shards and meta.json, to which it adds `more`, and gives the folder its
        final name. Raises ValueError if there are no tokens."""
        for split in self.tokens:
            self.end_shard(split)
        if not self.meta["shards"]:
            raise Mistake(f"{self.folder} got no tokens; check its source")
        meta = {"vocab_size": vocab_size, "tokenizer": tokenizer, "separator": separator,
                "row_length": self.row_length, "loss": "mask" if self.masks else "all"}
        self.meta["shards"] = dict(sorted(self.meta["shards"].items()))
        meta.update(self.meta)
        meta.update(more)
        self._save_meta(meta)
        os.rename(self.unfinished, self.folder)
        sizes = [f"{split} {count:,} tokens" for split, count in self.written.items()]
        line = f"{self.folder}: {', '.join(sizes)}"
        print(f"\r{line:78}")

    def _take_place(self):
        """Checks that the final name is free, and reads what an interrupted Writer left."""
        if (self.folder / "meta.json").exists():
            if "settings" in self.meta:
                self._read_meta(self.folder)
            raise FileExistsError(f"{self.folder} is complete; delete it to write it again")
        try:
            if self.folder.exists():
                self.folder.rmdir()  # which fails unless it is an empty folder
        except OSError:
            raise Mistake(f"{self.folder} holds other files; move them, or choose another "
                             "folder with --out") from None
        for path in self.unfinished.iterdir():
            if not re.fullmatch(r"(meta\.json|.+_\d{6}\.(bin|loss))(\.tmp)?", path.name):
                raise Mistake(f"{path} is in the way; move it, or choose another folder with "
                                 "--out")
        if (self.unfinished / "meta.json").exists():
            meta = self._read_meta(self.unfinished)
            if "settings" in self.meta:
                self.meta.update(meta)
        for name, count in self.meta["shards"].items():
            self.written[split_of(name)] += count
        for path in self.unfinished.glob("*_*"):
            if path.with_suffix(".bin").name not in self.meta["shards"]:
                path.unlink()

    def _read_meta(self, folder):
        """Returns the content of meta.json. Raises ValueError if the set has other settings."""
        path = folder / "meta.json"
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise Mistake(f"{path} is damaged; delete {folder} to start over") from None
        ours = self.meta.get("settings", {})
        theirs = meta.get("settings", {})
        keys = sorted(ours.keys() | theirs.keys())
        changed = [key for key in keys if ours.get(key) != theirs.get(key)]
        if changed:
            raise Mistake(f"{folder} was written from another source or with other options, as "
                             f"its meta.json shows in {', '.join(changed)}; delete it to start "
                             "over, or choose another with --out")
        return meta

    def _save_meta(self, meta):
        text = json.dumps(meta, indent=1)
        content = bytearray(f"{text}\n".encode())
        self._save("meta.json.tmp", content, len(content))
        os.replace(self.unfinished / "meta.json.tmp", self.unfinished / "meta.json")

    def _save(self, name, waiting, size):
        """Moves the first `size` bytes of `waiting` to a file and waits until the disk has it."""
        path = self.unfinished / name
        try:
            with open(path, "wb") as file, memoryview(waiting) as view:
                file.write(view[:size])
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            path.unlink(missing_ok=True)
            raise OSError(f"{path}: {error.strerror}; make room, or write elsewhere") from None
        del waiting[:size]

def split_of(shard):
    """Returns the split of a shard: "train" of "train_000000.bin"."""
    return shard.rpartition("_")[0]

def lock(folder):
    """Makes a folder and locks it. Returns the descriptor that holds the lock until it is closed or
    this process ends. Waits while another process has the lock. Returns None on Windows."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            return None
        # the other process may rename or remove the folder while this one waits, and then the
        # lock is on a folder that no longer has this name, so we try again
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for the process that writes {folder.with_suffix('')}", flush=True)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError:  # some network file systems have no locks
                pass
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
            os.close(descriptor)
