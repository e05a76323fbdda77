"""
Draws curves of one or more runs (this needs matplotlib):

    python -m eval.curves training RUN ...            every quantity in log.jsonl, over steps
    python -m eval.curves loss_by_position RUN ...    the loss far beyond the trained length

Runs that differ only in the seed form one curve, which is their mean, in a band from the lowest to
the highest. The pictures are out/training.png and out/loss_by_position.png.
"""
import math
import os

import config
from config import require, runs
from eval import draw
from eval.records import labelled, logged

EVAL_TOKENS = 131072  # that loss_by_position reads
LONGEST = 8  # loss_by_position reads segments of this many times the trained length
POINTS = 32  # and averages their positions in this many groups, because single ones are noisy

def main(words):
    parser = config.Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("training", description=__doc__)
    training.add_argument("runs", nargs="+", type=config.text, metavar="RUN",
                          help="run directory")
    training.set_defaults(draw=draw_training)
    loss = commands.add_parser("loss_by_position", description=__doc__)
    runs.add_run_options(loss)
    runs.add_data_options(loss)
    loss.add_argument("--eval_tokens", type=config.count, default=EVAL_TOKENS, metavar="N",
                      help=f"tokens to read in all segments together [{EVAL_TOKENS}]")
    loss.set_defaults(draw=draw_loss_by_position)
    for name, command in commands.choices.items():
        command.add_argument("--out", type=config.text, default=f"out/{name}.png", metavar="FILE",
                             help=f"the picture to write [out/{name}.png]")
    args = parser.parse_args(words)
    args.draw(args)

def draw_training(args):
    """Draws each quantity in the runs' log.jsonl over steps."""
    lines = []
    for folder in dict.fromkeys(os.path.normpath(folder) for folder in args.runs):
        lines += logged(folder)
    require(lines, "these runs have logged no steps yet")
    metrics = dict.fromkeys(metric for line in lines for metric in line["values"])
    lines = labelled(lines)
    figure, axes = draw.panels(len(metrics), 2, 6, 3)
    for ax, metric in zip(axes, metrics):
        draw.curves(ax, lines, metric, draw.colors_of(lines))
        draw.name_curves(ax, 3)
        ax.set(xlabel="step", ylabel=draw.says(metric))
        if metric.endswith("loss"):  # the first steps would hide the rest
            low, high = ax.dataLim.intervaly
            ax.set_ylim(top=min(high, max(1.7 * low, low + 0.5)))
    draw.save(figure, args.out)

def draw_loss_by_position(args):
    """Draws the mean loss at each position of long segments of text, which are spread evenly over
    the split. A model whose positions end earlier reads only their beginnings."""
    import torch  # the other picture needs no PyTorch

    from sample import token_losses

    trained = [runs.TrainedRun(name, args.device, args.data) for name in args.runs]
    splits = [run.open_split(args.split) for run in trained]
    context = LONGEST * max(run.trained for run in trained)
    for split in splits:
        require(not split.rows and not split.masks,
                f"{split.folder} is a task, but this needs a stream of text")
        context = min(context, args.eval_tokens, split.tokens - 1)  # the last is only a target
    size = math.ceil(context / POINTS)
    lines = []
    for run, split in zip(trained, splits):
        length = min(context, run.model.limit)
        starts = split.windows(context, args.eval_tokens // context).tolist()
        found = token_losses(run, split, [(start, start + length) for start in starts])
        losses = torch.stack(list(found.values())).double().mean(0)  # (length,)
        positions = torch.arange(1.0, length + 1)
        for loss, position in zip(losses.split(size), positions.split(size)):
            lines.append({**run.about(), "at": position.mean().item(), "loss": loss.mean().item()})
    lines = labelled(lines)
    unit = "byte" if trained[0].meta["tokenizer"] == "bytes" else "token"
    figure, (ax,) = draw.panels(1, 1, 9, 4)
    draw.curves(ax, lines, "loss", draw.colors_of(lines))
    draw.name_curves(ax, 4)
    step = max(run.trained for run in trained)
    ax.set_xticks(range(0, context + step, step))
    ax.set_xlabel(f"position in {splits[0].split}, {unit}s; each point is a mean over {size}; "
                  "dashed: as trained")
    ax.set_ylabel(draw.says("loss", unit))
    draw.save(figure, args.out)

if __name__ == "__main__":
    config.run(main)
