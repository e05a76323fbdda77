"""
Writes the tables of results into documents, so that a new result changes them by a command:

    python -m eval.tables eval/README.md

In a document, a table stands between two comments. The first one has options of eval/report.py,
which choose the table:

    <!-- table --only=quickstart --metrics=loss --rows=rope,pope -->
    <!-- end of table -->
"""
import contextlib
import io
import re
import shlex

import config
from config import ROOT
from eval import report
from eval.records import read

TABLE = re.compile(r"(<!-- table (.*?) -->\n)(.*?)(<!-- end of table -->)", re.S)

def main(words):
    parser = config.Parser(__doc__)
    parser.add_argument("documents", nargs="+", metavar="FILE", help="a document, in Markdown")
    parser.add_argument("--results", default=ROOT / "eval" / "results.jsonl", metavar="FILE",
                        help="the results to show [eval/results.jsonl]")
    args = parser.parse_args(words)
    lines = read([args.results])
    for path in args.documents:
        with open(path, encoding="utf-8") as file:
            before = file.read()
        after = with_tables(before, lines)
        if after != before:
            with open(path, "w", encoding="utf-8") as file:
                file.write(after)
        print(f"{path}: {len(TABLE.findall(before))} tables, "
              f"{'changed' if after != before else 'as before'}")

def with_tables(text, lines):
    """Returns the text of a document with its tables as these lines make them."""
    def write(match):
        opening, options, _, closing = match.groups()
        return f"{opening}{table(options, lines)}{closing}"

    return TABLE.sub(write, text)

def table(options, lines):
    """Returns the table that these options of eval/report.py choose, without its heading."""
    parser = config.Parser("")
    report.add_choices(parser)
    args = parser.parse_args(shlex.split(options))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        report.print_tables(report.chosen(lines, args), args)
    rows = [line for line in printed.getvalue().splitlines() if line.startswith("|")]
    return "".join(f"{row}\n" for row in rows)

if __name__ == "__main__":
    config.run(main)
