"""A text of your own as a data set, and the tools of all text corpora: tokenizers,
downloads, all cores.

    python -m data.text --source=input.txt                     # writes data/input
    python -m data.text --source=FOLDER --tokenizer=gpt2       # its files, as GPT-2 tokens
    python -m data.text --source=input.txt --out=data/mine --val=0.05

Any files in UTF-8 will do; in a folder those whose name begins with a dot are passed over. The
last tenth of each file, or the share --val of it, is for validation, the rest for training.
End-of-text stands after both parts.

splits   train, val
options  source: the file, or the folder; tokenizer: "bytes", a name that tiktoken or the Hugging
         Face hub knows, or the path of a tokenizer.json; val: the share of the validation split
"""
import collections
import concurrent.futures
import contextlib
import hashlib
import http.client
import itertools
import json
import math
import os
import signal
import threading
import time
import urllib.request
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from multiprocessing import parent_process
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from data.shards import (
    SCRIPTS,
    Writer,
    check_disk,
    check_folder,
    command,
    locate,
    read_meta,
    save_json,
    split_of,
)

CORES = os.cpu_count() or 1
BLOCK = 1_000_000  # characters that a core is given at once to tokenise


# tokenizers


def tokenizer(meta):
    """The tokenizer of a set, from its meta.json: encode(text) -> list of ids, decode(ids) -> text.

    In text, <|endoftext|> (Llama's and Mistral's: </s>) is the separator. Symbols have spaces
    between them. Raises ValueError when it cannot be loaded, and in encode for an unknown symbol.
    """
    if isinstance(meta["tokenizer"], dict):
        symbols = meta["tokenizer"]["symbols"]
        ids = {symbol: i for i, symbol in enumerate(symbols)}

        def encode(text):
            words = text.split()
            for word in words:
                if word not in ids:
                    known = " ".join(symbols)
                    raise ValueError(f"{word!r} is no symbol of this set; its symbols: {known}")
            return [ids[word] for word in words]

        def decode(tokens):
            return " ".join(symbols[i] for i in tokens)

        return SimpleNamespace(encode=encode, decode=decode)

    encoding = load_encoding(meta["tokenizer"])

    def encode_with_separators(text):
        return encoding.encode(text, allowed_special="all")

    return SimpleNamespace(encode=encode_with_separators, decode=encoding.decode)


def load_encoding(name):
    """The tiktoken.Encoding of a name, or an object with the same methods.

    "bytes" needs no download: id = byte, and 256 between documents. Raises ValueError when it
    cannot be loaded, ImportError without the library that it needs.
    """
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
    except Exception as error:  # an unknown name, no network, a broken download
        need = "tiktoken must know the name, and needs the network once or TIKTOKEN_CACHE_DIR with its files"
        if "/" in name:
            need = ("the hub must know the name, and needs the network once; one behind terms of use needs "
                    "`hf auth login` too")
        if name.endswith(".json"):
            need = "it must be a file of the tokenizers library, with </s> or <|endoftext|> in its vocabulary"
        raise ValueError(f"tokenizer {name!r} did not load ({type(error).__name__}): {need}") from None


class HubEncoding:
    """A tokenizer of the Hugging Face hub, or of a local tokenizer.json, with the methods of
    tiktoken.Encoding."""

    def __init__(self, name):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError(f"tokenizer {name!r} needs one more package: pip install tokenizers") from None
        load = Tokenizer.from_file if name.endswith(".json") else Tokenizer.from_pretrained
        self.inner = load(name)
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


# large corpora


def write_documents(folder, corpus, tokenizer, separator="after", tokens=None, shortest=0,
                    expect=None, shard_tokens=100_000_000, **origin):
    """Tokenise a text corpus on all cores and write it; goes on after an interruption.

    corpus: a function -> {split: documents}, called after all checks: no download precedes an
        error. The splits are written in this order; documents(skip) is an iterator of str that
        begins with document number `skip`.
    separator: the end-of-text token goes "before" or "after" each document, or nowhere: None.
    tokens: {split: n}: a split that has n tokens is full, and its documents go on in the next one
        named here; None: no end.
    shortest: documents of fewer tokens are left out.
    expect: about how many tokens come in all, where `tokens` does not say; for the time left and
        the check of the disk.
    origin: what else the corpus depends on, by name.

    meta.json gets `asked`, these arguments, and `words` {split: n}: what spaces and line ends
    separate. Perplexity per word, which does not depend on the tokenizer, is exp(loss * tokens /
    words), with the sums over all tokens and words of the split.

    A note is saved with each full shard. A start after an interruption goes on from there, so
    that the files come out the same to the byte, however often it was stopped. Raises ValueError
    when the folder holds a set, or part of one, that was written with other arguments, and when
    its disk has no room for the set.
    """
    folder, budgets = Path(folder), tokens or {}
    asked = {"tokenizer": tokenizer, "separator": separator, "tokens": budgets, "shortest": shortest,
             "shard_tokens": shard_tokens, **origin}
    note = folder / "progress.json"
    if (folder / "meta.json").exists():
        theirs = read_meta(folder).get("asked", "unknown arguments")
        refuse_other(asked, theirs, f"{folder} was written")
        for path in (note, folder / "unfinished"):  # killed right after meta.json
            path.unlink(missing_ok=True)
        print(f"{folder} is whole already; delete it to write it again")
        return
    check_folder(folder)
    encoding = load_encoding(tokenizer)
    if encoding.n_vocab > 65536:
        raise ValueError(f"tokenizer {tokenizer!r} has {encoding.n_vocab} tokens, uint16 holds 65536; "
                         "take another")
    saved = {"asked": asked, "shards": {}, "words": {}, "place": (0, 0, 0)}
    if note.exists():
        saved = read_note(note)
        refuse_other(asked, saved["asked"], f"{folder} was begun")
    if budgets and None not in budgets.values():
        expect = sum(budgets.values())
    written = sum(saved["shards"].values())
    check_disk(folder, 2 * ((expect or 0) - written))

    parts = list(corpus().items())
    writer = Writer(folder, shard_tokens, keep=saved["shards"])
    words = collections.Counter(saved["words"])
    first_part, first_document, offset = saved["place"]

    def save(*place):  # only when no shard is open
        save_json(note, {"asked": asked, "shards": writer.shards, "words": words, "place": place})

    def share():
        return written / expect if expect else 0

    progress = Progress(share(), written)
    with workers(start_encoder, encoding, separator, shortest) as pool:
        for part in range(first_part, len(parts)):
            split, documents = parts[part]
            encoded = enumerate(encode_all(documents(first_document), pool), first_document)
            shards = shards_to_come(split, budgets, shard_tokens, writer.shards)
            for split, ids, new_words, end in cut(encoded, offset, shards):
                writer.write(split, ids)
                words[split] += new_words
                written += len(ids)
                if end:
                    writer.flush(split)
                    save(part, *end)
                else:
                    progress.show(share(), written, "tokens")
            for split in list(writer.open):  # the last shard of a part is shorter
                writer.flush(split)
            first_document = offset = 0
            save(part + 1, 0, 0)
    token = None if separator is None else encoding.eot_token
    writer.finish(encoding.n_vocab, tokenizer, token, words=words, asked=asked)
    note.unlink(missing_ok=True)
    tokens = collections.Counter()
    for name, count in writer.shards.items():
        tokens[split_of(name)] += count
    sizes = (f"{split} {count:,} tokens of {words[split]:,} words" for split, count in tokens.items())
    print(f"\r{f'{folder}: ' + ', '.join(sizes):78}")


def read_note(note):
    try:
        saved = json.loads(note.read_text(encoding="utf-8"))
        return {key: saved[key] for key in ("asked", "shards", "words", "place")}
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{note} is broken; delete {note.parent} to start over") from None


def refuse_other(asked, theirs, past):
    if theirs != asked:
        raise ValueError(f"{past} with {theirs}, not {asked}; "
                         "delete it to start over, or choose another with --out")


def shards_to_come(split, budgets, shard_tokens, there):
    """The shards that a split's documents fill and that are not there: yields (split, tokens)."""
    names = [split]
    if split in budgets:  # a full split hands on to the next one
        names = list(budgets)[list(budgets).index(split) :]
    for name in names:
        left = math.inf if budgets.get(name) is None else budgets[name]
        for number in itertools.count():
            size = min(left, shard_tokens)
            if size == 0:
                break
            if f"{name}_{number:06d}.bin" not in there:
                yield name, size
            left -= size


def cut(documents, offset, shards):
    """Cut documents where a shard ends.

    documents: pairs of a number and (tokens (n,), words), of the first of which `offset` tokens
    are written already. shards: pairs of a split and the tokens that a shard takes; where they
    end, the documents end. Yields (split, tokens (n,), words that begin with them, end): end is
    where in the documents the shard ends, as (number, offset), or None while it still takes more.
    """
    split, room = next(shards, (None, 0))
    if split is None:
        return
    for number, (ids, words) in documents:
        if offset:  # counted with the shard before
            words = 0
        while len(ids) - offset >= room:
            begin, offset = offset, offset + room
            yield split, ids[begin:offset], words, (number, offset)
            words = 0
            split, room = next(shards, (None, 0))
            if split is None:
                return
        yield split, ids[offset:], words, None
        room -= len(ids) - offset
        offset = 0


@contextlib.contextmanager
def workers(setup, *arguments):
    """A pool of processes, one a core, which begin with setup(*arguments). OSError when one of
    them is killed."""
    how = dict(initializer=start_worker, initargs=(setup, arguments))
    pool = concurrent.futures.ProcessPoolExecutor(CORES, **how)
    try:
        yield pool
    except BrokenProcessPool:
        raise OSError("a worker process was killed, as happens when memory runs out; "
                      "free some, and give the same command again") from None
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(setup, arguments):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is the parent's to answer, once
    threading.Thread(target=end_with_parent, daemon=True).start()
    setup(*arguments)


def end_with_parent():
    """Without it the workers of a killed process would wait for work for ever."""
    parent_process().join()
    os._exit(1)


def encode_all(texts, pool):
    """Tokenise an iterator of str in parallel; yields (uint16 array (n,), number of words) in the
    order of the texts."""
    pending = collections.deque()  # two blocks a core: pool.map would read ahead without end
    for block in blocks(texts):
        pending.append(pool.submit(encode_block, block))
        if len(pending) > 2 * CORES:
            yield from pending.popleft().result()
    while pending:
        yield from pending.popleft().result()


def blocks(texts):
    """Lists of texts, each of BLOCK characters or one text more: stories and books alike keep all
    cores busy."""
    block, size = [], 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def start_encoder(*how):
    global encoder
    encoder = how


def encode_block(texts):
    """[(uint16 array (n,), number of words), ...] of texts, in a worker; nothing of a text that
    is too short."""
    encoding, separator, shortest = encoder
    end, encoded = [encoding.eot_token], []
    for text in texts:
        # ordinary text: a document that spells out <|endoftext|> holds these letters, not the token
        ids = encoding.encode_to_numpy(text, disallowed_special=())
        words = count_words(text)
        if len(ids) < shortest:
            ids, words = np.zeros(0), 0
        elif separator == "before":
            ids = np.concatenate([end, ids])
        elif separator == "after":
            ids = np.concatenate([ids, end])
        encoded.append((ids.astype(np.uint16), words))
    return encoded


def count_words(text):
    """len(text.split()), ten times as fast: the number of bytes above the space that follow one
    that is not."""
    above = np.frombuffer(b" " + text.encode(), dtype=np.uint8) > 32
    return int(np.count_nonzero(above[1:] > above[:-1]))


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


# sources


def hub(*args, **options):
    """datasets.load_dataset(...): a corpus from the Hugging Face hub. Raises ImportError without
    the library."""
    try:
        import datasets
    except ImportError:
        raise ImportError("corpora from the hub need one more package: pip install datasets") from None
    return datasets.load_dataset(*args, **options)


def texts(dataset, limit=None, column="text"):
    """The first `limit` rows of a datasets.Dataset or IterableDataset, as write_documents takes
    documents."""

    def documents(skip):
        stop = None if limit is None else max(limit - skip, 0)
        return itertools.islice((row[column] for row in dataset.skip(skip)), stop)

    return documents


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
        part.unlink(missing_ok=True)
        raise ValueError(f"{url} did not arrive whole ({fault}); "
                         "try again, or fetch it otherwise and give it with --source=")
    os.replace(part, path)
    return path


# a text of your own


def files(source):
    """The files of a source, which is one itself or a folder, in order. FileNotFoundError when
    there are none."""
    source = Path(source)
    if source.is_file():
        return [source]
    paths = []
    for path in sorted(source.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
        if path.is_file() and not is_hidden:
            paths.append(path)
    if not paths:
        raise FileNotFoundError(f"source={str(source)!r} is neither a file nor a folder with files; "
                                "name a text")
    return paths


def read(path):
    """The text of a file. Raises ValueError when it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 (byte {error.start}); "
                         "convert it, or move it away") from None


def prepare(folder, source: str, tokenizer: str = "bytes", val: float = 0.1):
    """Write the set into `folder`. Raises ValueError for a share `val` that is none, and what
    `files` and `read` do."""
    if not 0 < val < 1:
        raise ValueError(f"val={val} is no share of the text; give a number between 0 and 1")
    paths = files(source)
    for path in paths:
        read(path)  # raises before anything is written
    size = sum(path.stat().st_size for path in paths)
    if not size:
        raise ValueError(f"source={source!r} holds no text")

    def train(skip):
        for path in paths[skip:]:
            text = read(path)
            yield text[: round(len(text) * (1 - val))]

    def validation(skip):
        for path in paths[skip:]:
            text = read(path)
            yield text[round(len(text) * (1 - val)) :]

    expect = size if tokenizer == "bytes" else size // 4
    origin = {"source": str(Path(source).resolve()), "bytes": size, "val": val}
    write_documents(folder, lambda: {"train": train, "val": validation}, tokenizer, expect=expect, **origin)
    folder = Path(folder)
    is_named = folder.resolve() == locate(folder.name).resolve()
    name = folder.name if is_named else os.path.join(folder, "")
    flags = f"--data={name} --out_dir=out/{folder.name}"
    print(f"train on it with `python train.py config/quickstart.py {flags}`")


def name(source, **_):
    """The name of the set that a source becomes: that of its file, or of its folder."""
    path = Path(source).resolve()
    stem = path.stem if path.is_file() else path.name
    if stem in SCRIPTS:
        raise ValueError(f"{source} would become data/{stem}, the set of data/{stem}.py; "
                         "name another with --out")
    return stem


if __name__ == "__main__":
    command(prepare, __doc__, named=name)
