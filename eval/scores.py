"""
Measures trained models on whole splits: the loss and, on a task, the percentage of wrong answers.

    python -m eval.scores RUN ... --splits=val,sparse
    python -m eval.scores RUN ...                        all splits but train

Of a stream of text, it reads as many windows of the trained length as fit. The scores are also
appended to RUN/results.jsonl, from which eval/report.py makes tables.
"""
import config
from config import runs
from data.shards import split_of
from sample import at_once, loss_and_perplexity
from train import score_sums, scores


def main(words):
    parser = config.Parser(__doc__)
    runs.add_run_options(parser)
    parser.add_argument("--splits", type=config.comma_separated,
                        help="such as val,sparse [all but train]")
    parser.add_argument("--data", type=config.text,
                        help="a data set or folder to read [the run's own]")
    args = parser.parse_intermixed_args(words)
    trained = [runs.TrainedRun(name, args.device, args.data) for name in args.runs]
    opened = [[run.open_split(name) for name in args.splits or all_splits(run)] for run in trained]
    for run, splits in zip(trained, opened):
        for split in splits:
            measure(run, split)

def all_splits(run):
    """Returns the names of the splits of a run's data but train, in the order in which they were
    written."""
    meta = run.open_split().meta
    names = [*meta["row_length"], *map(split_of, meta["shards"])]  # a stream has no row_length
    return [name for name in dict.fromkeys(names) if name != "train"]

def measure(run, split):
    """Prints and records the scores of a run over a whole split."""
    length = run.length(split)
    if length > run.model.limit:
        print(f"{run.name}, {split.split}: {length} tokens are more than its {run.model.limit} "
              "positions")
        return
    starts = split.windows(length)
    found = scores(score_sums(run.model, split, starts, length, at_once(length)))
    line = f"{run.name}, {split.split}: loss {loss_and_perplexity(found['loss'])}"
    if "token_error" in found:
        line += (f", {found['token_error']:.2f}% of the targets are wrong, in "
                 f"{found['sequence_error']:.2f}% of the rows")
    print(line, flush=True)
    run.record(found, run.data, split.split, split.fingerprint, length)

if __name__ == "__main__":
    config.run(main)
