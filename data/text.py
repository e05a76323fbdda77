"""Your own text as a data set, and what all text corpora share: tokenizing and downloads.

    python -m data.text --source=input.txt                     # writes data/input
    python -m data.text --source=FOLDER --tokenizer=gpt2       # its files, as GPT-2 tokens
    python -m data.text --source=input.txt --out=data/mine --val=0.05

The text must be UTF-8. In a folder, files and folders whose names begin with a dot are skipped. The
last tenth of each file (or another fraction, --val) is for validation, and the rest is for
training. End-of-text follows each of the two parts. A file may be larger than memory.

Tokenizing a corpus uses all cores. If it is interrupted, the same command resumes it. A corpus that
is streamed from the Hugging Face hub is then downloaded again, but not tokenized again.

splits   train, val
options  source: the file or the folder; tokenizer: "bytes", a name that tiktoken or the Hugging
         Face hub knows, or the path of a tokenizer.json; val: the fraction for validation
"""
import collections
import concurrent.futures
import functools
import hashlib
import itertools
import os
import threading
from pathlib import Path

import numpy as np

from config import Mistake
from data import command, locate
from data.shards import Writer
from data.tokenizer import load_encoding, with_checksum

CORES = os.cpu_count() or 1
PIECE = 1 << 18  # the number of characters of a file that are read and tokenized at a time
END_OF_TEXT = object()  # see write_documents

def write_documents(folder, corpus, tokenizer, separator="after", tokens=None, shortest=0,
                    shard_tokens=100_000_000, **origin):
    """Tokenizes a text corpus on all cores and writes it, or resumes it after its last shard.

    corpus: a function that returns {part: documents}. It is called only if the set is not complete.
        documents(skip) yields the texts of a part without the first `skip`.
    separator: the end-of-text token goes "before" or "after" each document, or nowhere if None. If
        it is "marked", it replaces each END_OF_TEXT that documents(skip) yields between the texts.
    tokens: each part is a split of its own, unless this is {split: n}. Then the documents fill
        these splits one after the other. A split ends with the document that brings it to n tokens,
        and a split whose n is None takes all that are left.
    shortest: documents of fewer tokens are left out.
    origin: what else the corpus depends on, by name.

    meta.json, which is saved with each shard, has the number of documents that have been read from
    each part, as `documents`. A rerun skips these, so its files are identical, byte for byte. The
    arguments are there as `settings`, because a rerun must have the same ones.
    """
    tokenizer = with_checksum(tokenizer)
    encoding = load_encoding(tokenizer)
    if encoding.n_vocab > 65536:
        raise Mistake(f"tokenizer {tokenizer!r} has {encoding.n_vocab} tokens, but uint16 holds "
                         "only 65536; choose another")
    settings = {"tokenizer": tokenizer, "separator": separator, "tokens": tokens or {},
                "shortest": shortest, "shard_tokens": shard_tokens, **origin}
    try:
        writer = Writer(folder, shard_tokens, settings)
    except FileExistsError as error:  # it has the same settings, so it is what was asked for
        print(error)
        return
    with writer:
        documents_read = writer.meta.setdefault("documents", {})
        encode = encoder(tokenizer, separator, shortest)
        for part, documents in corpus().items():
            skip = documents_read.setdefault(part, 0)
            encoded = in_threads(encode, documents(skip))
            for split, budget in (tokens or {part: None}).items():
                while budget is None or writer.written[split] < budget:
                    ids = next(encoded, None)
                    if ids is None:
                        break
                    # this comes first, because `write` may save a shard and this number with it
                    documents_read[part] += 1
                    writer.write(split, ids)
                # a shard is saved together with the number of documents that have been read, so no
                # document of this split may still be waiting when a shard of the next one is saved
                writer.end_shard(split)
        end_of_text = None if separator is None else encoding.eot_token
        writer.finish(encoding.n_vocab, tokenizer, end_of_text)

def encoder(tokenizer, separator, shortest):
    """Returns a function that turns a text into its ids, uint16 (n,), with the separator. A text of
    fewer than `shortest` tokens gives no ids."""
    local = threading.local()

    def encode(text):
        if not hasattr(local, "encoding"):  # one per thread, because sharing one is slower
            local.encoding = load_encoding(tokenizer)
        end = [local.encoding.eot_token]
        if text is END_OF_TEXT:
            return np.array(end, dtype=np.uint16)
        # if a document spells out <|endoftext|>, that is text and does not become the token
        ids = local.encoding.encode_to_numpy(text, disallowed_special=())
        if len(ids) < shortest:
            return np.zeros(0, dtype=np.uint16)
        if separator == "before":
            ids = np.concatenate([end, ids])
        if separator == "after":
            ids = np.concatenate([ids, end])
        return ids.astype(np.uint16)

    return encode

def in_threads(function, items):
    """Yields function(item) for each item, in order. All cores work on them, but only a little
    ahead of the caller, because the results for a corpus would not fit into memory. Threads
    suffice, because tiktoken, tokenizers and numpy release the GIL."""
    def of_block(block):
        return [function(item) for item in block]

    items = iter(items)
    pending = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(CORES) as pool:
        while block := list(itertools.islice(items, 8)):
            pending.append(pool.submit(of_block, block))
            if len(pending) > 2 * CORES:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()

def hub(*args, **options):
    """Returns a corpus of the Hugging Face hub. This needs `pip install datasets`."""
    import datasets

    try:
        return datasets.load_dataset(*args, **options)
    except (ValueError, RuntimeError) as error:  # no network, or a set with a script
        raise Mistake(f"{args[0]} could not be loaded ({error})") from error

def texts(dataset, limit=None):
    """Returns the function documents(skip) that write_documents takes, for the first `limit` texts
    of a datasets.Dataset or IterableDataset that has a column "text"."""
    def documents(skip):
        if skip == getattr(dataset, "num_rows", None):  # the library refuses to skip all rows
            return iter(())
        stop = None if limit is None else max(limit - skip, 0)
        return itertools.islice((row["text"] for row in dataset.skip(skip)), stop)

    return documents

def download(url, sha256=None):
    """Fetches a file into data/downloads/, unless it is there, and returns its path. Raises
    ValueError if that fails or if the file has another hash."""
    path = locate("downloads") / url.rpartition("/")[2]
    if not path.exists():
        from torch.hub import download_url_to_file

        print(f"downloading {url}")
        path.parent.mkdir(exist_ok=True)
        try:
            download_url_to_file(url, str(path), sha256)
        except (OSError, RuntimeError) as error:
            raise Mistake(f"{url} could not be downloaded ({error}); try again, or get the file "
                             "in another way and name it with --source=") from None
    return path

def measure(path):
    """Returns the number of characters of a file and the SHA-256 of its contents. Raises ValueError
    if it is not UTF-8."""
    count = 0
    contents = hashlib.sha256()
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while text := file.read(PIECE):
                count += len(text)
                contents.update(text.encode())
    except UnicodeDecodeError as error:
        raise Mistake(f"{path} is not UTF-8 ({error.reason}); convert or move it") from None
    return count, contents.digest()

def pieces(path, start, end):
    """Yields the characters from `start` to `end` of a UTF-8 file, a piece at a time. A piece ends
    with a line unless the line is very long."""
    with open(path, encoding="utf-8", newline="") as file:
        at = 0
        while at < end:
            is_before = at < start
            stop = start if is_before else end
            text = file.read(min(PIECE, stop - at))
            if not text:
                raise OSError(f"{path} was shortened while being read; give the same command again")
            if not is_before:
                text += file.readline(min(PIECE, end - at - len(text)))
                yield text
            at += len(text)

def prepare(folder, source: str = "", tokenizer: str = "bytes", val: float = 0.1):
    if not 0 < val < 1:
        raise Mistake(f"val={val} must lie between 0 and 1, because it is a fraction")
    sha256 = hashlib.sha256()  # a setting, so that nothing is resumed if a file has been edited
    segments = {"train": [], "val": []}
    for path in files(source):
        length, contents = measure(path)
        sha256.update(contents)
        cut = round(length * (1 - val))
        segments["train"].append((path, 0, cut))
        segments["val"].append((path, cut, length))

    def texts_of(split):
        for path, start, end in segments[split]:
            yield from pieces(path, start, end)
            yield END_OF_TEXT

    def documents(split, skip):
        return itertools.islice(texts_of(split), skip, None)

    def corpus():
        return {split: functools.partial(documents, split) for split in segments}

    write_documents(folder, corpus, tokenizer, separator="marked", val=val,
                    sha256=sha256.hexdigest())

def files(source):
    """Returns the paths of the files of a source, sorted."""
    if not source:
        raise Mistake("no text was named; name a file, or a folder of files, with --source=...")
    top = Path(source)
    if top.is_file():
        return [top]
    if not top.is_dir():
        raise Mistake(f"{source!r} does not exist; name a file, or a folder of files")
    paths = []
    for path in sorted(top.rglob("*")):
        is_hidden = any(name.startswith(".") for name in path.relative_to(top).parts)
        if path.is_file() and not is_hidden:
            paths.append(path)
    return paths

def default_name(source="", **_):
    """Returns the name of the data set of a source, which is that of its file or folder."""
    files(source)  # raises ValueError if there is no such source
    path = Path(source).resolve()
    name = path.stem if path.is_file() else path.name
    if name == "downloads" or (Path(__file__).parent / f"{name}.py").exists():
        raise Mistake(f"data/{name} is the place of another data set; choose another with --out")
    return name

if __name__ == "__main__":
    command(prepare, __doc__, default_name)
