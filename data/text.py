"""Your own text as a data set, and what all text corpora share: tokenizers, downloads, threads.

    python -m data.text --source=input.txt                     # writes data/input
    python -m data.text --source=FOLDER --tokenizer=gpt2       # its files, as GPT-2 tokens
    python -m data.text --source=input.txt --out=data/mine --val=0.05

Any UTF-8 files will do. In a folder, files and folders whose name begins with a dot are skipped.
The last tenth of each file, or the share --val of it, is for validation, the rest for training.
End-of-text follows each of the two parts.

splits   train, val
options  source: the file or the folder; tokenizer: "bytes", a name that tiktoken or the Hugging
         Face hub knows, or the path of a tokenizer.json; val: the share of the validation split
"""
import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import math
import multiprocessing
import os
import re
import signal
import threading
import time
import urllib.request
from datetime import timedelta
from pathlib import Path

import numpy as np

from data import SCRIPTS, command, locate
from data.shards import Writer
from data.tokenizer import load_encoding
from data.tokenizer import tokenizer as tokenizer  # for sample.py

CORES = os.cpu_count() or 1

def write_documents(folder, corpus, tokenizer, separator="after", tokens=None, shortest=0,
                    expect=None, shard_tokens=100_000_000, **origin):
    """Tokenise a text corpus on all cores and write it. A rerun resumes where the last one stopped.

    corpus: a function -> {split: documents}, called after all checks. documents(skip) yields the
        texts from number `skip` on.
    separator: the end-of-text token goes "before" or "after" each document, or None.
    tokens: {split: n} if the documents fill these splits one after the other. A split ends with the
        document that brings it to n tokens. None takes all that are left.
    shortest: documents of fewer tokens are left out.
    expect: about how many tokens there will be, if `tokens` does not say.
    origin: what else the corpus depends on, by name.

    The number of documents read is saved with each shard. A rerun resumes there, and the files come
    out the same to the byte. meta.json gets these arguments, as `asked`, and `words` {split: n}:
    perplexity per word, exp(loss * tokens / words), does not depend on the tokenizer.
    """
    encoding, local = load_encoding(tokenizer), threading.local()
    if encoding.n_vocab > 65536:
        raise ValueError(f"tokenizer {tokenizer!r} has {encoding.n_vocab} tokens, uint16 holds "
                         "65536; take another")
    asked = {"tokenizer": tokenizer, "separator": separator, "tokens": tokens or {},
             "shortest": shortest, "shard_tokens": shard_tokens, **origin}
    if tokens and None not in tokens.values():
        expect = sum(tokens.values())

    def encode(text):
        if not hasattr(local, "encoding"):
            local.encoding = load_encoding(tokenizer)
        # a document that spells out <|endoftext|> gets these letters, not the token
        ids = local.encoding.encode_to_numpy(text, disallowed_special=())
        if len(ids) < shortest:
            return np.zeros(0, dtype=np.uint16), 0
        end = [] if separator is None else [encoding.eot_token]
        ids = np.concatenate([end, ids] if separator == "before" else [ids, end])
        return ids.astype(np.uint16), count_words(text)

    try:
        writer = Writer(folder, shard_tokens, 2 * (expect or 0), asked)
    except FileExistsError as error:  # with the same `asked`
        print(error)
        return
    with writer:
        parts, noted = list(corpus().items()), writer.noted
        words, count = collections.Counter(noted.get("words")), collections.Counter()
        for shard, n in writer.shards.items():
            count[shard.rpartition("_")[0]] += n
        # without a place, meta.json is the final one: only the rename is missing
        first, skip = noted.get("place", (len(parts) if noted else 0, 0))
        progress = Progress(expect, "tokens", count.total())
        for number, (part, documents) in enumerate(parts[first:], first):
            limits = {split: n or math.inf for split, n in (tokens or {part: None}).items()}
            for ids, n in in_threads(encode, documents(skip)):
                split = next((split for split in limits if count[split] < limits[split]), None)
                if split is None:
                    break
                skip, shards = skip + 1, len(writer.shards)
                writer.write(split, ids)
                words[split] += n
                count[split] += len(ids)
                if count[split] >= limits[split]:
                    writer.flush(split)
                if len(writer.shards) > shards:
                    writer.note(words=words, place=(number, skip))
                progress.show(count.total())
            for split in writer.tokens:
                writer.flush(split)
            skip = 0
            writer.note(words=words, place=(number + 1, 0))
        end = None if separator is None else encoding.eot_token
        writer.finish(encoding.n_vocab, tokenizer, end, words=words, asked=asked)
    sizes = (f"{split} {n:,} tokens of {words[split]:,} words" for split, n in count.items())
    print(f"\r{f'{folder}: ' + ', '.join(sizes):78}")

def in_threads(function, items):
    """map(function, items) on all cores, only a little ahead of the caller. Threads suffice, since
    tiktoken, tokenizers and numpy release the GIL."""
    items, pending = iter(items), collections.deque()
    with concurrent.futures.ThreadPoolExecutor(CORES) as pool:
        while block := list(itertools.islice(items, 8)):
            pending.append(pool.submit(lambda block: [function(item) for item in block], block))
            if len(pending) > 2 * CORES:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()

@contextlib.contextmanager
def workers(setup, *arguments):
    """A pool of processes, one per core, for Python code. Each begins with setup(*arguments)."""
    pool = concurrent.futures.ProcessPoolExecutor(CORES, None, start_worker, (setup, *arguments))
    try:
        yield pool
    except concurrent.futures.BrokenExecutor:
        raise OSError("a worker process was killed, as happens when memory runs out; free some and "
                      "give the same command again") from None
    finally:
        pool.shutdown(cancel_futures=True)

def start_worker(setup, *arguments):
    parent = multiprocessing.parent_process()
    # without this, the workers of a killed process would wait for work forever
    threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles ctrl-c
    setup(*arguments)

def count_words(text):
    """len(text.split()), ten times as fast: counts bytes above 32 that follow one that is not."""
    above = np.frombuffer(b" " + text.encode(), dtype=np.uint8) > 32
    return int(np.count_nonzero(above[1:] > above[:-1]))

class Progress:
    """A status line, refreshed every second: how much is done, how fast, and the time left."""

    def __init__(self, total, unit, done=0):
        self.total, self.unit, self.before = total or 0, unit, done
        self.began = self.shown = time.monotonic()

    def show(self, done):
        now = time.monotonic()
        if now - self.shown > 1:
            self.shown, rate = now, (done - self.before) / (now - self.began)
            line = f"{done:,} {self.unit}, {rate:,.0f} a second"
            if rate and done <= self.total:
                left = timedelta(seconds=int((self.total - done) / rate))
                line = f"{100 * done / self.total:.0f}%, {line}, {left} left"
            print(f"\r{line:78}", end="", flush=True)

def hub(*args, **options):
    """datasets.load_dataset(...), a corpus from the Hugging Face hub."""
    try:
        import datasets
    except ImportError:
        raise ImportError("corpora from the hub need a package: pip install datasets") from None
    return datasets.load_dataset(*args, **options)

def texts(dataset, limit=None):
    """The first `limit` texts of a Dataset or IterableDataset, as write_documents takes them."""
    def documents(skip):
        if skip == getattr(dataset, "num_rows", None):  # skip() refuses that
            return iter(())
        stop = None if limit is None else max(limit - skip, 0)
        return itertools.islice((row["text"] for row in dataset.skip(skip)), stop)

    return documents

def download(url, folder, sha256=None):
    """Fetch a file into a folder, unless it is there -> its path. ValueError: it did not arrive."""
    path = Path(folder) / url.rpartition("/")[2]
    if not path.exists():
        from torch.hub import download_url_to_file

        print(f"downloading {url}")
        try:
            download_url_to_file(url, f"{path}.tmp", sha256)
            with urllib.request.urlopen(url, timeout=60) as answer:
                sizes = os.path.getsize(f"{path}.tmp"), int(answer.headers["Content-Length"] or 0)
            if sizes[1] not in (0, sizes[0]):
                raise OSError("{:,} of {:,} bytes came".format(*sizes))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{url} did not arrive whole ({error}); try again, or fetch it in "
                             "another way and name it with --source=") from None
        os.replace(f"{path}.tmp", path)
    return path

def digest(paths):
    """A hash of the contents of files. If it is in `asked`, a rerun notices an edit."""
    total = hashlib.sha256()
    for path in paths:
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()

def read(path):
    """The text of a file. ValueError: it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); convert or move it") from None

def prepare(folder, source: str, tokenizer: str = "bytes", val: float = 0.1):
    """Write the text of a file, or of the files of a folder, into `folder`."""
    if not 0 < val < 1:
        raise ValueError(f"val={val} must lie between 0 and 1: it is a share of the text")
    top, is_hidden = Path(source), re.compile(r"(.*/)?\.").match
    paths = sorted(path for path in top.rglob("*")
                   if path.is_file() and not is_hidden(path.relative_to(top).as_posix()))
    paths = [top] if top.is_file() else paths
    size = sum(len(read(path).encode()) for path in paths)  # all, before anything is written
    if not size:
        raise ValueError(f"source={source!r} holds no text; name a file, or a folder of files")

    def documents(is_train, skip):
        for text in map(read, paths[skip:]):
            cut = round(len(text) * (1 - val))
            yield text[:cut] if is_train else text[cut:]

    write_documents(folder, lambda: {"train": functools.partial(documents, True),
                                     "val": functools.partial(documents, False)},
                    tokenizer, expect=size if tokenizer == "bytes" else size // 4,
                    source=str(top.resolve()), bytes=size, val=val, sha256=digest(paths))
    name, folder = Path(folder).name, Path(folder).resolve()
    data = name if folder == locate(name).resolve() else f"{folder}{os.sep}"
    flags = f"--data={data} --out_dir=out/{name}"
    print(f"train on it with `python train.py config/quickstart.py {flags}`")

def name(source, **_):
    """The name of a source's data set: that of its file or folder."""
    path = Path(source).resolve()
    name = path.stem if path.is_file() else path.name
    if name in SCRIPTS:
        raise ValueError(f"{source} would become data/{name}, the set of data/{name}.py; "
                         "choose another with --out")
    return name

if __name__ == "__main__":
    command(prepare, __doc__, named=name)
