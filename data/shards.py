"""The format that all data sets share, its reader and its writer.

data/<name>/, which is data/<name>.part/ until it is complete, holds

  <split>_000000.bin, ...   the tokens, raw little-endian uint16
  <split>_000000.loss, ...  in masked sets only: a uint8 per token, 1 = this target carries loss
  meta.json
    vocab_size   at most 65536
    tokenizer    a name, see data/tokenizer.py, or {"symbols": [id 0's string, ...]}
    separator    the token id between documents, or null
    row_length   {split: n} if every n tokens are a row, an example of its own; else it is a stream
    loss         "all" | "mask"
    shards       {"train_000000.bin": number of tokens, ...}
    words, asked: text corpora only, see write_documents in data/text.py
"""
import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np

from data import command_for, locate, options, prepare  # noqa: F401, train.py finds them here


def rng(seed, number):
    """A numpy generator that depends on (seed, number) alone."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))

class Split:
    """One split of a data set, memory-mapped: a batch reads its own tokens and no others.

    Attributes: meta (meta.json), vocab_size, tokens, row_length and rows (0 in a stream).
    FileNotFoundError: no such set. ValueError: no such split, or a file of another size.
    """

    def __init__(self, folder, split):
        self.folder, self.split = Path(folder), split
        self.again = f"delete {folder} and write it again with {command_for(folder)}"
        if not (self.folder / "meta.json").exists():
            how = f"write the data with {command_for(folder)}"
            raise FileNotFoundError(f"no meta.json in {folder}; {how}")
        self.meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
        shards = {}  # split -> {name: tokens}
        for name, count in sorted(self.meta["shards"].items()):
            shards.setdefault(name.rpartition("_")[0], {})[name] = count
        if split not in shards:
            fault = f"{folder} has no split {split!r}; it has: {', '.join(sorted(shards))}"
            raise ValueError(f"{fault}; change --eval_splits, --evaluate or --split")
        self.bins, self.masks = [], []
        for name, count in shards[split].items():
            self.bins.append(self._map(name, count, "<u2"))
            if self.meta["loss"] == "mask":
                self.masks.append(self._map(name.replace(".bin", ".loss"), count, "u1"))
        self.ends = np.cumsum([len(tokens) for tokens in self.bins])  # where each shard ends
        self.tokens, self.vocab_size = int(self.ends[-1]), self.meta["vocab_size"]
        self.row_length = self.meta["row_length"].get(split, 0)
        self.rows = self.tokens // self.row_length if self.row_length else 0
        self.order = functools.lru_cache(2)(lambda *key: rng(*key).permutation(self.rows))

    def batch(self, step, batch_size, block_size, seed, rank=0, world=1):
        """Training batch `step` -> x, y, int64 (batch_size // world, T). y is -1 without loss.

        A stream gives random windows, T = block_size. Rows come in epochs, each row once per epoch,
        T = row_length - 1. All ranks together read a batch that depends on (seed, step) alone.
        """
        length, share = self._targets(block_size), batch_size // world
        mine = np.arange(rank * share, (rank + 1) * share)
        if not self.rows:
            starts = rng(seed, step).integers(0, self.tokens - length, size=batch_size)[mine]
            return self.read(starts, length)
        rows = [self.order(seed, n // self.rows)[n % self.rows] for n in step * batch_size + mine]
        return self.read(np.array(rows) * self.row_length, length)

    def windows(self, length, count=None):
        """The starts, int64 (n,), of `count` windows that share no target, or of all that fit."""
        length = self._targets(length)
        fit = self.rows or (self.tokens - 1) // length
        count = fit if count is None else min(count, fit)
        if self.rows:
            return np.arange(count) * self.rows // count * self.row_length
        return np.arange(count) * (self.tokens - 1 - length) // max(count - 1, 1)

    def read(self, starts, length):
        """The windows at `starts`, token offsets (n,) -> x, y as in `batch`. y[i] follows x[i]."""
        length, starts = self._targets(length), np.asarray(starts, dtype=np.int64)
        window = self._gather(self.bins, starts, length + 1)
        if window.size and window.max() >= self.vocab_size:
            raise ValueError(f"{self.folder} has token {window.max()}, beyond "
                             f"vocab_size={self.vocab_size}; {self.again}")
        x, y = window[:, :-1].copy(), window[:, 1:].copy()
        if self.masks:
            y[self._gather(self.masks, starts + 1, length) == 0] = -1
        return x, y

    def _map(self, name, count, dtype):
        path, size = self.folder / name, count * np.dtype(dtype).itemsize
        if not path.exists():
            raise ValueError(f"{path} is missing, though meta.json lists it; {self.again}")
        if path.stat().st_size != size:
            found = path.stat().st_size
            raise ValueError(f"{path} has {found} bytes instead of {size}; {self.again}")
        return np.memmap(path, dtype, mode="r")

    def _targets(self, block_size):
        targets = self.row_length - 1 if self.row_length else block_size
        if targets > min(block_size, self.tokens - 1):
            need = f"block_size >= {targets}" if self.row_length else f"block_size < {self.tokens}"
            raise ValueError(f"split {self.split!r} of {self.folder} has {self.tokens} tokens, "
                             f"needs {need}, got {block_size}")
        return targets

    def _gather(self, arrays, starts, length):
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts.tolist()):
            i, done = int(np.searchsorted(self.ends, start, side="right")), 0
            while done < length:  # again if the window continues in the next shard
                part = arrays[i][start + done - int(self.ends[i]) :][: length - done]
                row[done : done + len(part)] = part
                i, done = i + 1, done + len(part)
        return out

class Writer(contextlib.AbstractContextManager):
    """Writes a set: `with Writer(folder) as writer`, `write` as often as needed, then `finish`.

    A shard of rows has at most `shard_tokens`; a stream's ends with the `write` that reaches them.
    size: of the set, in bytes. asked: what the set depends on, if it can be resumed. source: the
    name of a file that may lie beside the shards. FileExistsError: the set is complete. ValueError:
    it has another `asked`, other files are in the way, or the disk is too small.
    """

    def __init__(self, folder, shard_tokens=100_000_000, size=0, asked=None, source=None):
        self.folder, self.shard_tokens = Path(folder).resolve(), shard_tokens
        self.part, self.asked, self.source = Path(f"{self.folder}.part"), asked, source
        self.tokens, self.masks, self.row_length, self.largest = {}, {}, {}, 0
        self._lock()
        try:
            self._check()  # again: another process may have finished meanwhile
            self.noted = self._read(self.part)
            self.shards = self.noted.get("shards", {})  # name -> tokens
            for path in self.part.iterdir():  # what a killed process left
                if path.name not in {"meta.json", source, *self.shards}:
                    path.unlink()
            need, free = size - 2 * sum(self.shards.values()), shutil.disk_usage(self.part).free
            if need > free:
                sizes = f"{need / 1e9:.3g} GB, its disk has {free / 1e9:.3g} GB free"
                raise ValueError(f"{folder} needs {sizes}; make room or choose another with --out")
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        os.close(self.lock)
        with contextlib.suppress(OSError):  # it has files in it, or its final name
            self.part.rmdir()

    def write(self, split, tokens, loss=None):
        """Append tokens, (n,) of a stream or (rows, row_length), and their mask to a split."""
        tokens = np.asarray(tokens)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() <= 65535:
            raise ValueError(f"tokens must lie in [0, 65535], got {tokens.min()} to {tokens.max()}")
        self.largest = max(self.largest, int(tokens.max(initial=0)))
        waiting = self.tokens.setdefault(split, bytearray())
        waiting += tokens.astype("<u2").tobytes()
        if loss is not None:
            self.masks.setdefault(split, bytearray()).extend((np.asarray(loss) != 0).tobytes())
        size = None
        if tokens.ndim == 2:
            row = self.row_length[split] = tokens.shape[1]
            size = max(self.shard_tokens // row, 1) * row
        while len(waiting) >= 2 * (size or self.shard_tokens):
            self.flush(split, size)

    def flush(self, split, size=None):
        """Save the next `size` tokens of a split, or all that are left, as a shard."""
        tokens, mask = self.tokens[split], self.masks.get(split)
        size = size or len(tokens) // 2
        number = sum(name.rpartition("_")[0] == split for name in self.shards)
        name = f"{split}_{number:06d}"
        if mask:
            self._save(f"{name}.loss", mask[:size])
            del mask[:size]
        if tokens:
            self._save(f"{name}.bin", tokens[: 2 * size])
            del tokens[: 2 * size]
            self.shards[f"{name}.bin"] = size

    def note(self, **state):
        """Save `state` beside the list of shards. The next start finds it as `noted`."""
        self._save("meta.json", {"asked": self.asked, "shards": self.shards, **state})

    def finish(self, vocab_size, tokenizer, separator=None, **more):
        """Save what is left and meta.json, plus `more`, and give the folder its final name."""
        for split in self.tokens:
            self.flush(split)
        if not self.shards or not self.largest < vocab_size <= 65536:
            raise ValueError(f"{self.folder} got no tokens, or some beyond vocab_size={vocab_size}")
        meta = {"vocab_size": vocab_size, "tokenizer": tokenizer, "separator": separator,
                "row_length": self.row_length, "loss": "mask" if self.masks else "all",
                "shards": dict(sorted(self.shards.items()))}
        self._save("meta.json", meta | more)
        os.rename(self.part, self.folder)

    def _lock(self):
        """Make the .part folder and lock it. If another process holds the lock, wait."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # the other has just finished or given up
                self._check()
                self.part.mkdir(parents=True, exist_ok=True)
                self.lock = os.open(self.part, os.O_RDONLY)
                try:
                    fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    print(f"waiting for the process that writes {self.folder}", flush=True)
                    fcntl.flock(self.lock, fcntl.LOCK_EX)
                except OSError:  # a file system without locks
                    pass
                if os.path.samestat(os.fstat(self.lock), os.stat(self.part)):
                    return

    def _check(self):
        others = [*self.folder.iterdir()] if self.folder.exists() else []
        if self._read(self.folder) or (self.folder / "meta.json").exists():
            raise FileExistsError(f"{self.folder} is complete; delete it to write it again")
        for path in self.part.iterdir() if self.part.exists() else []:
            ours = re.fullmatch(r"(.+_\d{6}\.(bin|loss)|meta\.json)(\.tmp)?", path.name)
            if path.is_symlink() or not ours and not path.name.startswith(self.source or "/"):
                others.append(path)
        if others or self.part.is_symlink() or os.path.ismount(self.folder):
            raise ValueError(f"{min(others, default=self.folder)} is in the way; "
                             "move it, or choose another folder with --out")

    def _read(self, folder):
        """meta.json of a set that can be resumed, or {}. ValueError: it was written differently."""
        if not self.asked or not (folder / "meta.json").exists():
            return {}
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta.get("asked") != self.asked:
            raise ValueError(f"{folder} was written with {meta.get('asked')}, not {self.asked}; "
                             "delete it to start over, or choose another with --out")
        return meta

    def _save(self, name, content):
        """Write bytes, or a dict as JSON. A file under its own name is always complete."""
        path, is_json = self.part / name, isinstance(content, dict)
        try:
            with open(f"{path}.tmp", "wb") as file:
                file.write(f"{json.dumps(content, indent=1)}\n".encode() if is_json else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{path}.tmp", path)
        except OSError as error:
            Path(f"{path}.tmp").unlink(missing_ok=True)
            raise OSError(f"{path}: {error.strerror}; make room there or use --out") from None
