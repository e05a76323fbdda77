"""Tokenizers: bytes, those of tiktoken and of the Hugging Face hub, and the symbols of a task.

    python -m data.text --source=input.txt --tokenizer=gpt2     # or bytes, or any other
"""
import functools
from types import SimpleNamespace

import numpy as np
import tiktoken


def tokenizer(meta):
    """The tokenizer of a set, from its meta.json: encode(text) -> list of ids, decode(ids) -> text.

    In text, <|endoftext|> (Llama's and Mistral's: </s>) is the separator. Symbols are separated by
    spaces. Ids that the set lacks, as a model with a larger vocab_size may draw, decode to nothing.
    ValueError: it does not load, or encode meets an unknown symbol.
    """
    if isinstance(meta["tokenizer"], str):
        encoding = load_encoding(meta["tokenizer"])
        encode = functools.partial(encoding.encode, allowed_special="all")

        def decode(ids):
            return encoding.decode([i for i in ids if i < encoding.n_vocab])

        return SimpleNamespace(encode=encode, decode=decode)
    symbols = meta["tokenizer"]["symbols"]
    ids = {symbol: i for i, symbol in enumerate(symbols)}

    def encode(text):
        for word in text.split():
            if word not in ids:
                known = " ".join(symbols)
                raise ValueError(f"{word!r} is no symbol of this set; its symbols: {known}")
        return [ids[word] for word in text.split()]

    def decode(ids):
        return " ".join(symbols[i] for i in ids if i < len(symbols))

    return SimpleNamespace(encode=encode, decode=decode)

def load_encoding(name):
    """A tiktoken.Encoding of this name, or an object with the same methods. ValueError: it does not
    load. ImportError: it needs the package tokenizers."""
    ranks, pattern, special = {bytes([i]): i for i in range(256)}, r"[\s\S]", {"<|endoftext|>": 256}
    try:
        if "/" in name or name.endswith(".json"):
            return HubEncoding(name)
        if name != "bytes":  # its ids are the bytes, and 256 between documents
            known = tiktoken.get_encoding(name)
            ranks, pattern, special = known._mergeable_ranks, known._pat_str, known._special_tokens
    except ImportError:
        raise ImportError(f"tokenizer {name!r} needs a package: pip install tokenizers") from None
    except Exception as error:  # an unknown name, no network, terms of use: each library's own kind
        fault = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"tokenizer {name!r} did not load ({fault}); check its name; at first it "
                         "needs the network, and terms of use need `hf auth login`") from None
    # a new object each time: tiktoken is slower if threads share one
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

@functools.lru_cache
class HubEncoding:
    """A tokenizer from the Hugging Face hub, or of a tokenizer.json, with tiktoken's methods."""

    def __init__(self, name):
        from tokenizers import Tokenizer

        load = Tokenizer.from_file if name.endswith(".json") else Tokenizer.from_pretrained
        self.inner = load(name)
        self.inner.no_truncation()
        self.inner.no_padding()
        ids = self.inner.get_vocab()
        self.n_vocab = max(ids.values()) + 1
        self.eot_token = ids["</s>" if "</s>" in ids else "<|endoftext|>"]
        self.inner.encode_special_tokens = True  # despite the name: treat them as text

    def encode(self, text, allowed_special="all"):
        self.inner.encode_special_tokens = False
        ids = self.encode_ordinary(text)
        self.inner.encode_special_tokens = True
        return ids

    def encode_ordinary(self, text):
        # a batch of one, as the library's encode() holds the GIL
        return self.inner.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_to_numpy(self, text, disallowed_special=()):
        return np.array(self.encode_ordinary(text), dtype=np.uint32)

    def decode(self, tokens):
        return self.inner.decode(tokens, skip_special_tokens=False)
