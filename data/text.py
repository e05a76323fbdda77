"""Your own text as a data set.

    python -m data.text --source=input.txt                     # writes data/input
    python -m data.text --source=FOLDER --tokenizer=gpt2       # its files, as GPT-2 tokens
    python -m data.text --source=input.txt --out=data/mine --val=0.05

The text must be UTF-8. In a folder, files and folders whose names begin with a dot are skipped, and
so are links to folders. The last tenth of each file (or another fraction, --val) is for validation,
and the rest is for training. End-of-text follows each of the two parts. A file may be larger than
memory. If this is interrupted, it starts over.

splits   train, val
"""
from pathlib import Path

from config import Mistake
from data import SCRIPTS, command
from data.documents import encode_piece, in_threads
from data.shards import Writer
from data.tokenizer import tokenizer as load

PIECE = 1 << 18  # the number of characters of a file that are read and tokenized at a time

def files(source):
    """Returns the paths of the files of a source, sorted."""
    if not source:
        raise Mistake("no text was named; name a file, or a folder of files, with --source=...")
    top = Path(source)
    if not top.exists():
        raise Mistake(f"{source} does not exist; name a file, or a folder of files")
    if top.is_file():
        return [top]
    paths = []
    for path in sorted(top.rglob("*")):
        is_hidden = any(name.startswith(".") for name in path.relative_to(top).parts)
        if path.is_file() and not is_hidden:
            paths.append(path)
    return paths

def open_text(path):
    """Opens a file of UTF-8 text. A byte order mark at its beginning is not part of the text."""
    return open(path, encoding="utf-8-sig", newline="")

def count_characters(path):
    """Returns the number of characters of a file. Raises Mistake if it is not UTF-8."""
    count = 0
    try:
        with open_text(path) as file:
            while text := file.read(PIECE):
                count += len(text)
    except UnicodeDecodeError as error:
        raise Mistake(f"{path} is not UTF-8 ({error.reason}); convert or move it") from None
    return count

def pieces(sizes):
    """Yields (split, text, is_first) for each piece of each file, where is_first says whether it is
    the first piece of a document. A document is the part of a file that belongs to one split, and
    (split, None, False) follows it. `sizes` is {path: {split: number of characters}}. A piece ends
    with a line unless the line is very long."""
    for path, sizes_of_file in sizes.items():
        with open_text(path) as file:
            for split, left in sizes_of_file.items():
                if not left:
                    continue
                is_first = True
                while text := file.read(min(PIECE, left)):
                    text += file.readline(min(PIECE, left - len(text)))
                    left -= len(text)
                    yield split, text, is_first
                    is_first = False
                yield split, None, False

def prepare(
    folder,
    source: str = "",  # the file, or the folder of files
    tokenizer: str = "bytes",  # "bytes", or a name that tiktoken or the hub knows
    val: float = 0.1,  # the fraction for validation
):
    if not 0 < val < 1:
        raise Mistake(f"val={val} must lie between 0 and 1, because it is a fraction")
    codec = load(tokenizer)
    sizes = {}
    for path in files(source):
        length = count_characters(path)
        cut = round(length * (1 - val))
        sizes[path] = {"train": cut, "val": length - cut}
    for split in ("train", "val"):
        if not any(sizes_of_file[split] for sizes_of_file in sizes.values()):
            raise Mistake(f"{source} is so short that val={val} leaves nothing for {split}; give "
                          "more text")

    def encode(piece):
        split, text, is_first = piece
        if text is None:
            return split, [codec.separator]
        return split, encode_piece(codec, text, is_first)

    with Writer(folder, codec.vocab_size, tokenizer, codec.separator) as writer:
        for split, ids in in_threads(encode, pieces(sizes)):
            writer.write(split, ids)

def name_of(source="", **_):
    """Returns the name of the data set of a source, which is that of its folder, or that of its
    file without the suffix."""
    files(source)  # raises Mistake if there is no such source
    path = Path(source).resolve()
    name = path.stem if path.is_file() else path.name
    if name == "downloads" or name in SCRIPTS:
        raise Mistake(f"data/{name} is the place of another data set; choose another with --out")
    return name

if __name__ == "__main__":
    command(prepare, __doc__, name_of)
