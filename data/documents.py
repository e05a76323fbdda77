"""What the corpora of the Hugging Face hub share: loading, tokenizing on all cores, resuming."""
import collections
import concurrent.futures
import itertools
import os

import numpy as np

from config import Mistake, one_line, optional
from data.shards import Writer
from data.tokenizer import tokenizer

CORES = os.cpu_count() or 1
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
        if separator or is_first:
            ids = codec.encode_document(text)
        else:
            ids = codec.encode_continuation(text)
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
    with Writer(folder, codec.vocab_size, tokenizer_name, separator_id, shard_tokens,
                settings) as writer:
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
