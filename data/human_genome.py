"""The human reference genome, GRCh38.p14, in 6-mers (PoPE section 4, appendix B.1).

    python -m data.human_genome                                                       # downloads 1 GB
    python -m data.human_genome --source=/path/GRCh38.fna.gz --out=data/human_genome  # or plain

The preparation is the Nucleotide Transformer's, which the paper follows. Letters other than A, C,
G, T become N, chromosomes are cut into windows of 6,000 nucleotides, and a token is six letters
in a row; where the next six hold an N or pass the window's end, it is one letter. The vocabulary
of 4107, with that model's ids, is 4096 6-mers, A, T, C, G, N and six special tokens. Chromosome
21 is val, 22 is test, the others, X and Y are train. Records of other names (mitochondrion,
patches, unplaced pieces) are passed over, and so is what follows a chromosome's last whole
window.

A row is <bos> and the first 1000 tokens of a window, for block_size=1000. A window without N has
exactly 1000, so rows need no pads and no mask, and an epoch sees each window once. Of a window
with N the rest is cut off, as that model cuts its input. A stream would keep it, and then two
thirds of chromosome 22's tokens would be N; in rows it is a quarter. The paper leaves open what
it did with them. They cost a model next to nothing, so losses compare only at the same share of
N, which is printed.

splits   train: 498,444 rows, val: 7,784, test: 8,469
options  source: the file; its records are named as at NCBI (NC_000021.9), UCSC (chr21) or
         Ensembl (21)

It takes a few minutes on one core. A second start after an interruption begins anew and writes
the same bytes.
"""
import gzip
import itertools
import re
import zlib
from pathlib import Path

import numpy as np

from data.shards import Writer, command
from data.text import Progress, download

DOWNLOAD = True
URL = ("https://ftp.ncbi.nlm.nih.gov/genomes/all/GCF/000/001/405/GCF_000001405.40_GRCh38.p14/"
       "GCF_000001405.40_GRCh38.p14_genomic.fna.gz")
WINDOW, TOKENS = 6000, 1000  # nucleotides, and tokens kept of them
SIX_MERS = map("".join, itertools.product("ATCG", repeat=6))
SYMBOLS = ["<unk>", "<pad>", "<mask>", "<cls>", *SIX_MERS, *"ATCGN", "<eos>", "<bos>"]
IDS = {symbol.encode(): i for i, symbol in enumerate(SYMBOLS)}
BOS, N = IDS[b"<bos>"], IDS[b"N"]
OF_TRAIN = [*map(str, range(1, 21)), "X", "Y"]
SPLIT = dict.fromkeys(OF_TRAIN, "train") | {"21": "val", "22": "test"}  # by chromosome

LETTERS = bytes(i & ~32 if chr(i) in "ACGTacgt" else ord("N") for i in range(256))  # upper case
TOKEN = re.compile(b"[ACGT]{6}|.")  # a regex does 25 million nucleotides a second
NAME = re.compile(rb"(?:NC_0000|chr)?0?(\d+|X|Y)(?:\.\d+)?\s")


def records(file, block=1 << 24):
    """A FASTA file -> pairs of a record's chromosome ("1" to "22", "X", "Y"; None: no such) and a
    part of its sequence, bytes of A, C, G, T, N, in order. A part is some `block` bytes at most,
    so that memory stays bounded."""
    name = None
    while text := file.read(block):
        text = b"\n" + text + file.readline()  # whole lines
        for i, part in enumerate(text.split(b"\n>")):
            if i:  # the part before the first > belongs to the last block's record
                header, _, part = part.partition(b"\n")
                known = NAME.match(header + b"\n")
                name = known[1].decode() if known else None
                name = {"23": "X", "24": "Y"}.get(name, name)  # as NCBI counts
            yield name, part.translate(LETTERS, b"\r\n")


def tokenise(sequence):
    """Whole windows, bytes of A, C, G, T, N -> uint16 (windows, 1 + TOKENS)."""
    rows = np.full((len(sequence) // WINDOW, 1 + TOKENS), BOS, dtype=np.uint16)
    for i, row in enumerate(rows):
        words = TOKEN.findall(sequence, i * WINDOW, (i + 1) * WINDOW)
        row[1:] = [IDS[word] for word in words[:TOKENS]]
    return rows


def prepare(folder, source: str = None):
    """Write the set into `folder`. Raises ValueError for a file that is broken or lacks a
    chromosome, or a failed download."""
    path = Path(source) if source else download(URL, Path(folder) / URL.rpartition("/")[2])
    if not path.is_file():
        raise ValueError(f"source={source!r} is no file; give a FASTA file of the whole genome")
    size, current, rest, nucleotides = path.stat().st_size, None, b"", 0
    # of each chromosome: tokens, and N among them
    counts = {name: np.zeros(2, dtype=np.int64) for name in SPLIT}
    with open(path, "rb") as raw:
        writer, progress = Writer(folder, source=path), Progress()
        file = gzip.open(raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
        try:
            for name, part in records(file):
                if name != current:
                    current, rest = name, b""
                if name in SPLIT:
                    rest += part
                    whole = len(rest) // WINDOW * WINDOW
                    rows = tokenise(rest[:whole])
                    writer.write(SPLIT[name], rows)
                    counts[name] += rows[:, 1:].size, (rows == N).sum()
                    rest, nucleotides = rest[whole:], nucleotides + whole
                    progress.show(raw.tell() / size, nucleotides, "nucleotides")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is broken ({error}); fetch it again") from None
    missing = [name for name in SPLIT if not counts[name][0]]
    if missing:
        raise ValueError(f"{path} holds no window of chromosome {', '.join(missing)}; "
                         f"give the whole genome, such as {URL}")
    writer.finish(len(SYMBOLS), {"symbols": SYMBOLS}, separator=BOS)
    sizes = []
    for split in ("train", "val", "test"):
        tokens, unknown = sum(counts[name] for name in SPLIT if SPLIT[name] == split)
        sizes.append(f"{tokens // TOKENS:,} {split} rows ({100 * unknown / tokens:.1f}% N)")
    print(f"\r{folder}: " + ", ".join(sizes))


if __name__ == "__main__":
    command(prepare, __doc__)
