"""Tokenizers: bytes, those of tiktoken and of the Hugging Face hub, and the symbols of a task.

    python -m data.text --source=input.txt --tokenizer=gpt2     # or bytes, or any other

Each has `vocab_size` and these methods.

    encode(text)              the ids of a prompt, a list. A tokenizer of text turns <|endoftext|>
                              (</s> if it is Llama's or Mistral's) into the separator
    decode(ids)               a text. A model with a larger vocab_size may generate ids that the
                              tokenizer does not have, and these are left out
    decode_continuation(ids)  the text of ids from the middle of a text. It keeps a space at its
                              beginning, which `decode` drops if the tokenizer is Llama's

A tokenizer of text also has `separator`, the id of end-of-text, and these methods.

    encode_document(text)      the ids of a text to train on, a numpy array (n,). If the text spells
                               out <|endoftext|>, this stays text
    encode_continuation(text)  the ids of a piece from the middle of a text. Llama's tokenizer puts
                               a space before a text, but it puts none before this piece

A text may be encoded in pieces, the first one by encode_document and the others by
encode_continuation. Together, their ids decode to the same text as if it were encoded at once. They
are not always the same ids, because no token extends over the border of two pieces.
"""
import json

import numpy as np

from config import Mistake, one_line, optional


def tokenizer(name):
    """Returns the tokenizer of a data set, given the entry "tokenizer" of its meta.json."""
    if isinstance(name, dict):
        return Symbols(name["symbols"])
    if name == "bytes":
        return Bytes()
    if "/" in name:
        return Hub(name)
    return Tiktoken(name)

class Bytes:
    """The ids 0 to 255 are the bytes of the text in UTF-8."""
    vocab_size = 257
    separator = 256

    def encode(self, text):
        first, *others = text.split("<|endoftext|>")
        ids = [*first.encode(errors="surrogateescape")]  # a prompt may hold any bytes
        for part in others:
            ids += [self.separator, *part.encode(errors="surrogateescape")]
        return ids

    def encode_document(self, text):
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids):
        parts = [b"<|endoftext|>" if i == self.separator else bytes([i])
                 for i in ids if i < self.vocab_size]
        return b"".join(parts).decode(errors="replace")

    encode_continuation = encode_document
    decode_continuation = decode

class Tiktoken:
    """The tokenizers that tiktoken knows by name. The first use of one downloads it."""

    def __init__(self, name):
        tiktoken = optional("tiktoken")
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise Mistake(f"tokenizer {name!r} is unknown; choose bytes, {', '.join(known)}, or "
                          "one of the Hugging Face hub, such as mistralai/Mistral-7B-v0.1")
        try:
            self.inner = tiktoken.get_encoding(name)
        except (OSError, ValueError) as error:  # ValueError: the file has another hash
            raise Mistake(f"tokenizer {name!r} could not be downloaded ({one_line(error)}); "
                          "without a network, set TIKTOKEN_CACHE_DIR to a folder that tiktoken has "
                          "filled on another machine") from error
        self.vocab_size = self.inner.n_vocab
        self.separator = self.inner.eot_token

    def encode(self, text):
        return self.inner.encode(as_unicode(text), allowed_special="all")

    def encode_document(self, text):
        return self.inner.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids):
        return self.inner.decode([i for i in ids if i < self.vocab_size])

    encode_continuation = encode_document
    decode_continuation = decode

class Hub:
    """A tokenizer of the Hugging Face hub. This needs `pip install tokenizers`, and for some
    tokenizers `hf auth login`."""

    def __init__(self, name):
        tokenizers = optional("tokenizers")
        try:
            self.inner = tokenizers.Tokenizer.from_pretrained(name)
        except Exception as error:  # of the hub's library, or a plain Exception for a damaged file
            raise Mistake(f"tokenizer {name!r} could not be loaded ({one_line(error)}); without "
                          "a network, set HF_HOME to a folder that was filled on another "
                          "machine") from error
        self.inner.no_truncation()
        self.inner.no_padding()
        settings = json.loads(self.inner.to_str(), object_hook=without_prefix)
        self.inside = tokenizers.Tokenizer.from_str(json.dumps(settings))  # for continuations
        for inner in (self.inner, self.inside):
            inner.encode_special_tokens = True  # despite its name, this treats them as text
        ids = self.inner.get_vocab()
        self.vocab_size = max(ids.values()) + 1
        known = [token for token in ("</s>", "<|endoftext|>") if token in ids]
        if not known:
            raise Mistake(f"tokenizer {name!r} has neither </s> nor <|endoftext|>; choose another")
        self.separator = ids[known[0]]

    def encode(self, text):
        self.inner.encode_special_tokens = False
        ids = self.encode_document(as_unicode(text)).tolist()
        self.inner.encode_special_tokens = True
        return ids

    def encode_document(self, text):
        return encode_as_text(self.inner, text)

    def encode_continuation(self, text):
        return encode_as_text(self.inside, text)

    def decode(self, ids):
        known = [i for i in ids if i < self.vocab_size]
        return self.inner.decode(known, skip_special_tokens=False)

    def decode_continuation(self, ids):
        before = self.decode([self.separator])
        return self.decode([self.separator, *ids]).removeprefix(before)

def as_unicode(text):
    """Replaces what is not UTF-8 in a word of a command line, such as half a character."""
    return text.encode(errors="surrogateescape").decode(errors="replace")

def encode_as_text(inner, text):
    # a batch of one text, because the library's encode() holds the GIL
    encoding, = inner.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoding.ids, dtype=np.uint32)

def without_prefix(setting):
    """Changes one setting of a Hugging Face tokenizer so that it puts no space before a text. Each
    of these three types can do that."""
    kind = setting.get("type")
    if kind == "Prepend":
        setting["prepend"] = ""
    if kind == "Metaspace":
        setting["prepend_scheme"] = "never"
    if kind == "ByteLevel":
        setting["add_prefix_space"] = False
    return setting

class Symbols:
    """The symbols of a task, which are separated by spaces in a text."""

    def __init__(self, symbols):
        self.symbols = symbols
        self.vocab_size = len(symbols)
        self.ids = {symbol: i for i, symbol in enumerate(symbols)}

    def encode(self, text):
        words = text.split()
        for word in words:
            if word not in self.ids:
                raise Mistake(f"{word!r} is not a symbol of this set; its symbols are: "
                              f"{' '.join(self.symbols)}")
        return [self.ids[word] for word in words]

    def decode(self, ids):
        return " ".join(self.symbols[i] for i in ids if i < self.vocab_size)

    decode_continuation = decode
