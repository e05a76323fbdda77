"""What the corpora of the Hugging Face hub share: loading, tokenizing on all cores, resuming."""
import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import zlib
from pathlib import Path

import numpy as np

from config import Mistake, one_line, optional
from data.shards import Writer, split_of
from data.tokenizer import tokenizer

CORES = os.cpu_count() or 1
PROGRESS = "progress.json"  # what meta.json would say if there were no more shards
LLAMA = "hf-internal-testing/llama-tokenizer"  # a copy of Llama's tokenizer that needs no login

def hub(*args, rows=None, **options):
    """Returns a corpus of the hub. This needs `pip install datasets`. If the number of its rows is
    given, raises Mistake if it has another one, because a converted copy may hold only a part."""
    datasets = optional("datasets")
    try:
        corpus = datasets.load_dataset(*args, **options)
    except (OSError, ValueError, RuntimeError) as error:  # no network, or a set with a script
        raise Mistake(f"{args[0]} could not be loaded ({one_line(error)}); without a network, set "
                      "HF_HOME to a folder that was filled on another machine") from error
    if rows is not None and len(corpus) != rows:
        raise Mistake(f"{args[0]} has {len(corpus):,} rows instead of {rows:,}, so it is not the "
                      "whole set; try again, because the download may have been cut short")
    return corpus

def write_documents(folder, documents, tokenizer_name, separator="after", sizes=None, shortest=0,
                    at_least=0, shard_tokens=100_000_000, **depends_on):
    """Tokenizes a corpus on all cores and writes it. If this is interrupted, a call with the same
    arguments resumes it after its last shard. It then reads the same documents again from the first
    one on (a corpus that is streamed is downloaded again), but does not tokenize them again.

    documents: an iterable of (split, text), one split after the other.
    separator: end-of-text goes "before" or "after" each document. If separator is None, no
        end-of-text is written, and the documents of a split are the pieces of one text.
    sizes: {split: tokens}. If this is given, the documents fill these splits one after the other,
        whatever split they came with. A split ends with the document that brings it to its size,
        and a split of the size None takes all that are left.
    shortest: documents of fewer tokens are left out.
    at_least: how many documents there must be, so that a corpus that was cut short is noticed.
    depends_on: what else the documents depend on, such as the options of the script. The documents
        themselves must not change between two calls.
    """
    codec = tokenizer(tokenizer_name)
    end = np.array([codec.separator])

    def encode(document):
        split, text, is_first = document
        ids = encode_piece(codec, text, separator is not None or is_first)
        if len(ids) < shortest:
            return split, end[:0]  # no tokens
        if separator == "before":
            ids = np.concatenate((end, ids))
        if separator == "after":
            ids = np.concatenate((ids, end))
        return split, ids

    separator_id = codec.separator if separator else None
    others = sorted(depends_on.items())
    settings = (tokenizer_name, separator, sizes, shortest, shard_tokens, others)
    with ResumingWriter(settings, folder, codec.vocab_size, tokenizer_name, separator_id,
                        shard_tokens) as writer:
        done = writer.meta.setdefault("documents", 0)
        last = None
        for split, ids in in_threads(encode, itertools.islice(marked(documents), done, None)):
            if sizes:
                split = unfilled_split(writer, sizes)
                if split is None:
                    break
            # a shard is saved together with the number of documents that have been read, so no
            # document of a split may still be waiting when a shard of the next one is saved
            if split != last:
                writer.end_shard(last)
                last = split
            writer.meta["documents"] += 1
            writer.write(split, ids)
        refuse_what_was_cut_short(writer, sizes, at_least)

class ResumingWriter(Writer):
    """A Writer that resumes, for a corpus. `settings` are everything that its contents depend on.
    The .part folder is named after them and stays after an error, and the next writer with the same
    settings resumes after the last shard. Only one process at a time may therefore write a corpus.
    What waited for the next shard is lost, so a caller writes one split after the other, and calls
    end_shard in between. `meta` is saved with each shard, so it may hold what a caller needs for
    resuming."""

    def __init__(self, settings, *args):
        self.settings = settings
        super().__init__(*args)

    def _make_part(self):
        part = Path(f"{self.folder}.{zlib.crc32(repr(self.settings).encode()):08x}.part")
        part.mkdir(parents=True, exist_ok=True)
        if (part / PROGRESS).exists():
            self.meta = json.loads((part / PROGRESS).read_text(encoding="utf-8"))
            for shard, count in self.meta["shards"].items():
                self.written[split_of(shard)] += count
            print(f"resuming {part} after {len(self.meta['shards'])} shards; if the source has "
                  "changed, delete this folder and start over", flush=True)
        return part

    def end_shard(self, split, size=None):
        before = set(self.meta["shards"])
        super().end_shard(split, size)
        for name in self.meta["shards"].keys() - before:
            self._save_meta(PROGRESS)
            print(f"{self.folder}: {name} has {self.meta['shards'][name]:,} tokens", flush=True)

    def __exit__(self, error, *_):
        try:
            if error is None:
                self._finish()
                # not before the folder is renamed, because a kill in between would lose all shards
                (self.folder / PROGRESS).unlink(missing_ok=True)
        finally:
            with contextlib.suppress(OSError):
                self.part.rmdir()  # if an error came before the first shard

def encode_piece(codec, text, is_first):
    """Returns the tokens of a piece of a document, which is its first piece or not."""
    if is_first:
        return codec.encode_document(text)
    return codec.encode_continuation(text)

def marked(documents):
    """Yields (split, text, whether it is the first document of its split)."""
    last = None
    for split, text in documents:
        yield split, text, split != last
        last = split

def unfilled_split(writer, sizes):
    """Returns the first split that has not reached its size, or None."""
    for split, size in sizes.items():
        if size is None or writer.written[split] < size:
            return split

def refuse_what_was_cut_short(writer, sizes, at_least):
    """Raises Mistake if the corpus ended early. What was written stays in the .part folder."""
    found = writer.meta["documents"]
    if found < at_least:
        raise Mistake(f"the corpus ended after {found:,} documents, but it should have {at_least:,}"
                      "; try again, because the download may have been cut short")
    for split, size in (sizes or {}).items():
        if size is not None and writer.written[split] < size:
            raise Mistake(f"the corpus ended before {split} had {size:,} tokens; it has "
                          f"{writer.written[split]:,}")

def in_threads(function, items):
    """Yields function(item) for each item, in order. All cores work on them, but only a little
    ahead of the caller, because the results for a corpus would not fit into memory. Threads
    suffice, because tiktoken, tokenizers and numpy release the GIL."""
    pending = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(CORES) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 16 * CORES:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
