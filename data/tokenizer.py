"""Tokenizers: bytes, those of tiktoken and of the Hugging Face hub, and the symbols of a task.

    python -m data.text --source=input.txt --tokenizer=gpt2     # or bytes, or any other
"""
import functools
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tiktoken

from config import Mistake


def tokenizer(meta):
    """Returns the tokenizer of a data set, given its meta.json. encode(text) returns a list of ids,
    and decode(ids) returns a text.

    <|endoftext|> in a text (</s> for Llama's and Mistral's tokenizers) is encoded as the separator.
    The symbols of a task are separated by spaces. A model with a larger vocab_size may generate ids
    that the set does not have, and these are left out of the text.

    Raises ValueError if the tokenizer cannot be loaded; encode raises it for an unknown symbol.
    """
    if isinstance(meta["tokenizer"], str):
        return of_text(load_encoding(meta["tokenizer"]))
    return of_symbols(meta["tokenizer"]["symbols"])

def with_checksum(name):
    """Returns the name of a tokenizer, followed by a checksum if it is a file, as in
    "tokenizer.json#5f3a9c01", because the file may change after data were written with it."""
    if not name.endswith(".json"):
        return name
    return f"{name}#{zlib.crc32(Path(name).read_bytes()):08x}"

def identity(name):
    """Returns the entry "tokenizer" of a meta.json, or only its checksum if it is a file, because
    the path of a file can be written in several ways."""
    return name.rpartition("#")[2] if isinstance(name, str) else name

def of_text(encoding):
    def decode(ids):
        return encoding.decode([i for i in ids if i < encoding.n_vocab])

    encode = functools.partial(encoding.encode, allowed_special="all")
    return SimpleNamespace(encode=encode, decode=decode)

def of_symbols(symbols):
    ids = {symbol: i for i, symbol in enumerate(symbols)}

    def encode(text):
        words = text.split()
        for word in words:
            if word not in ids:
                known = " ".join(symbols)
                raise Mistake(f"{word!r} is not a symbol of this set; its symbols are: {known}")
        return [ids[word] for word in words]

    def decode(tokens):
        return " ".join(symbols[i] for i in tokens if i < len(symbols))

    return SimpleNamespace(encode=encode, decode=decode)

def load_encoding(name):
    """Returns a tiktoken.Encoding of this name, or an object with the same methods. Raises
    ValueError if it cannot be loaded, or ImportError if this needs the package tokenizers."""
    try:
        if "/" in name or ".json" in name:
            return HubEncoding(name)
        if name == "bytes":  # ids 0 to 255 are the bytes
            ranks = {bytes([i]): i for i in range(256)}
            pattern = r"[\s\S]"
            special = {"<|endoftext|>": 256}
        else:
            known = tiktoken.get_encoding(name)
            ranks = known._mergeable_ranks
            pattern = known._pat_str
            special = known._special_tokens
    except ImportError:
        raise Mistake(f"tokenizer {name!r} needs a package: pip install tokenizers") from None
    except Exception as error:  # each library raises errors of its own
        fault = f"{type(error).__name__}: {error}".partition("\n")[0]
        if "#" in name and isinstance(error, (FileNotFoundError, ValueError)):
            raise Mistake(f"tokenizer {name!r} could not be loaded ({fault}); put the file "
                             "there, as it was when data were written with it") from None
        raise Mistake(f"tokenizer {name!r} could not be loaded ({fault}); it must be known and "
                         "have </s> or <|endoftext|>; the first use of one from the hub needs a "
                         "network, and perhaps `hf auth login`") from None
    # get_encoding returns the same object each time, and tiktoken is slower if threads share one
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

@functools.lru_cache
class HubEncoding:
    """A tokenizer from the Hugging Face hub, or from a tokenizer.json, with tiktoken's methods."""

    def __init__(self, name):
        from tokenizers import Tokenizer

        path = name.partition("#")[0]
        if path.endswith(".json"):
            if name not in (path, with_checksum(path)):
                raise ValueError("it has changed")
            self.inner = Tokenizer.from_file(path)
        else:
            self.inner = Tokenizer.from_pretrained(name)
        self.inner.no_truncation()
        self.inner.no_padding()
        ids = self.inner.get_vocab()
        self.n_vocab = max(ids.values()) + 1
        end_of_text = "</s>" if "</s>" in ids else "<|endoftext|>"
        self.eot_token = ids[end_of_text]
        self.inner.encode_special_tokens = True  # despite its name, this treats them as text

    def encode(self, text, allowed_special="all"):
        self.inner.encode_special_tokens = False
        ids = self.encode_ordinary(text)
        self.inner.encode_special_tokens = True
        return ids

    def encode_ordinary(self, text):
        # a batch of one text, because the library's encode() holds the GIL
        return self.inner.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_to_numpy(self, text, disallowed_special=()):
        return np.array(self.encode_ordinary(text), dtype=np.uint32)

    def decode(self, tokens):
        return self.inner.decode(tokens, skip_special_tokens=False)
