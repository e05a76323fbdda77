"""The human reference genome, GRCh38.p14, in 6-mers (PoPE section 4, appendix B.1).

    python -m data.human_genome                                       # downloads 1 GB
    python -m data.human_genome --source=/path/GRCh38.fna.gz

The paper follows the preprocessing and the tokenization of the Nucleotide Transformer, and so do
we, with the two differences below. Letters other than A, C, G, T become N. A chromosome is cut into
windows of 6,000 letters. A token is the next six letters of a window, or one letter if the six
include an N or reach beyond the window. The 4107 tokens, with that model's ids, are 4096 6-mers, A,
T, C, G, N and six special tokens. Chromosome 21 is val, chromosome 22 is test, and the others, with
X and Y, are train. Other records (the mitochondrion, patches, unplaced pieces) are skipped, and so
is what follows the last whole window of a chromosome.

Windows always begin at the same letters, whereas the Nucleotide Transformer starts each chunk
at a random one of its first 200 letters. Our format holds tokens, and a random start would need a
tokenizer in the training loop. The paper's 100,000 steps of 64 rows therefore see the same tokens
12.8 times. Whether PoPE's authors drew the start at random is unknown.

Windows with N are truncated. A row is <bos> and the first 1000 tokens of a window, for
block_size=1000. A window without N has exactly 1000, so rows need neither padding nor a mask. A
window with N has more, and the rest is dropped, because the Nucleotide Transformer also truncates
its input. The paper does not say what it did with N. A model predicts N with almost no loss, so
losses can be compared only at the same fraction of N.

splits   train: 498,444 rows, val: 7,784, test: 8,469

This takes a few minutes. If it is interrupted, it starts over.
"""
import gzip
import itertools
import re
import zlib
from pathlib import Path

import numpy as np

from config import Mistake
from data import command, download
from data.shards import Writer

URL = ("https://ftp.ncbi.nlm.nih.gov/genomes/all/GCF/000/001/405/GCF_000001405.40_GRCh38.p14/"
       "GCF_000001405.40_GRCh38.p14_genomic.fna.gz")
WINDOW = 6000  # letters
TOKENS = 1000  # kept of each window
SIX_MERS = map("".join, itertools.product("ATCG", repeat=6))
SYMBOLS = ["<unk>", "<pad>", "<mask>", "<cls>", *SIX_MERS, *"ATCGN", "<eos>", "<bos>"]
IDS = {symbol.encode(): i for i, symbol in enumerate(SYMBOLS)}
BOS = IDS[b"<bos>"]
# the split of each chromosome, by NCBI's names; 23 is X and 24 is Y
SPLIT = {f"NC_{i:06}": "train" for i in range(1, 25)}
SPLIT["NC_000021"] = "val"
SPLIT["NC_000022"] = "test"

# what becomes of each byte: A, C, G and T are in upper case, and any other is N
LETTERS = bytes(i & ~32 if chr(i) in "ACGTacgt" else ord("N") for i in range(256))
TOKEN = re.compile(b"[ACGT]{6}|.")

def records(file, block=1 << 24):
    """Yields the records of a FASTA file in segments of about `block` letters: the name without its
    version, such as "NC_000021" of NC_000021.9, and the segment, bytes of A, C, G, T, N. A record
    is a line that begins with > and the name, and then lines of letters."""
    name = None
    while text := file.read(block):
        text += file.readline()  # so that no line is cut
        # with a newline in front, each header follows one, and splitting finds all of them
        segment, *others = (b"\n" + text).split(b"\n>")
        yield name, letters_of(segment)  # this continues the last record of the previous block
        for record in others:
            header, _, segment = record.partition(b"\n")
            name = header.partition(b".")[0].decode(errors="replace")
            yield name, letters_of(segment)

def letters_of(segment):
    return segment.translate(LETTERS, b"\r\n")  # the second argument is what is deleted

def whole_windows(records):
    """Yields (name, letters), where the letters are the next whole windows of a chromosome. What
    follows its last whole window is dropped."""
    current = None
    rest = b""  # the letters of `current` that do not fill a window yet
    for name, segment in records:
        if name != current:
            current = name
            rest = b""
        if name in SPLIT:
            rest += segment
            end = len(rest) // WINDOW * WINDOW
            yield name, rest[:end]
            rest = rest[end:]

def tokenize(sequence):
    """Returns the rows, uint16 (windows, 1 + TOKENS), of the whole windows of a sequence, bytes of
    A, C, G, T, N."""
    rows = np.full((len(sequence) // WINDOW, 1 + TOKENS), BOS, dtype=np.uint16)
    for i, row in enumerate(rows):
        words = TOKEN.findall(sequence, i * WINDOW, (i + 1) * WINDOW)
        row[1:] = [IDS[word] for word in words[:TOKENS]]
    return rows

def prepare(
    folder,
    source: str = None,  # the file, whose records have NCBI's names, such as NC_000021.9
):
    path = Path(source) if source else download(URL)
    missing = set(SPLIT)
    with Writer(folder, len(SYMBOLS), {"symbols": SYMBOLS}, separator=BOS) as writer:
        with open(path, "rb") as raw:
            is_packed = raw.peek(2)[:2] == b"\x1f\x8b"
            file = gzip.open(raw) if is_packed else raw
            try:
                for name, letters in whole_windows(records(file)):
                    writer.write(SPLIT[name], tokenize(letters))
                    if letters:
                        missing.discard(name)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise Mistake(f"{path} is damaged ({error}); delete it and download it "
                              "again") from None
        if missing:
            raise Mistake(f"{path} holds no window of {', '.join(sorted(missing))}; give the whole "
                          f"genome, such as {URL}")

if __name__ == "__main__":
    command(prepare, __doc__)
