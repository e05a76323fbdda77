"""
Scores models of text on tasks of EleutherAI's lm-evaluation-harness (pip install "lm-eval[hf]"):

    python -m eval.tasks RUN ... --tasks=lambada_openai,blimp,cbt

The scores are printed and appended to RUN/results.jsonl. A model reads at most as many tokens at
once as in training, or as --length says. `cbt` is defined in this folder, and `lm-eval ls tasks`
lists the others.
"""
import os
import sys
import zlib

import torch

import config
from config import Mistake, runs

try:
    lm_eval = config.optional("lm_eval", "lm-eval[hf]")
except Mistake as mistake:
    sys.exit(f"tasks.py: error: {mistake}")

import lm_eval.tasks
from lm_eval.api.model import TemplateLM
from lm_eval.utils import make_table

from data.tokenizer import tokenizer
from sample import batches


def main(words):
    parser = config.Parser(__doc__)
    runs.add_run_options(parser)
    parser.add_argument("--tasks", type=config.comma_separated, required=True,
                        help="tasks of the harness, or yaml files that define one")
    parser.add_argument("--fewshot", type=config.integer, metavar="N",
                        help="solved examples before each question [as the task's file says]")
    parser.add_argument("--length", type=config.count, metavar="N",
                        help="tokens that a model reads at most [the trained length]")
    args = parser.parse_intermixed_args(words)

    here = os.path.dirname(os.path.abspath(__file__))
    manager = lm_eval.tasks.TaskManager(include_path=here)
    for name in args.tasks:
        if name not in manager.all_tasks and not os.path.isfile(name):
            raise Mistake(f"{name!r} is neither a task of the harness nor a yaml file; "
                          "`lm-eval ls tasks` lists the tasks")
    for name in args.runs:
        run = runs.TrainedRun(name, args.device)
        length = args.length or run.trained
        model = Model(run.model, run.meta, length)
        found = lm_eval.simple_evaluate(model, tasks=args.tasks, task_manager=manager,
                                        num_fewshot=args.fewshot, log_samples=False)
        print(f"{run.name}\n{make_table(found)}", flush=True)
        record(run, found, args.fewshot, length)

def record(run, found, fewshot, length):
    """Appends the harness's results for a run to RUN/results.jsonl. The harness has no checksum of
    the data, so the checksum is that of the task's version and its number of questions."""
    for task, values in found["results"].items():
        numbers = {metric: value for metric, value in values.items() if isinstance(value, float)}
        shots = found["n-shot"].get(task, fewshot)  # a group of tasks may have none
        about = found["versions"].get(task), found["n-samples"].get(task)
        run.record(numbers, data=task, split="" if shots is None else f"{shots}-shot",
                   fingerprint=zlib.crc32(repr(about).encode()), length=length)

class Score(list):
    """The pair that the harness expects for a continuation: its log-likelihood, and whether greedy
    decoding would produce it. cbt.py also reads `tokens`, the number of tokens in it."""

class Model(TemplateLM):
    """A GPT behind the harness's interface. Of a context that is longer than `longest`, it reads
    only the last tokens, as the harness's own adapters do. A longer continuation is scored
    `longest` targets at a time. An empty context is replaced by the separator."""

    def __init__(self, model, meta, longest):
        super().__init__()
        if meta["separator"] is None:
            raise Mistake("downstream tasks need a model of text, but this one's data set has no "
                          "separator between documents; train on text")
        self.model = model
        self.longest = longest
        self.codec = tokenizer(meta["tokenizer"])
        self.separator = meta["separator"]
        self._device = model.wte.weight.device  # LM.device returns it

    @property
    def eot_token_id(self):
        return self.separator

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.codec.encode(string)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """Returns a Score for each request, which is (_, context tokens, target tokens)."""
        scores = []
        windows = {}  # {length: [(the request's score, tokens, how many at the end are targets)]}
        for _, context, targets in requests:
            score = Score((0.0, True))
            score.tokens = len(targets)
            scores.append(score)
            tokens = (context or [self.separator]) + targets
            for begin in range(len(tokens) - len(targets), len(tokens), self.longest):
                end = min(begin + self.longest, len(tokens))
                window = tokens[max(0, end - self.longest - 1) : end]
                windows.setdefault(len(window), []).append((score, window, end - begin))
        for length, same_length in windows.items():
            for part in batches(same_length, length):
                self.add_to_scores(part)
        return scores

    @torch.no_grad()
    def add_to_scores(self, part):
        """Adds the log-likelihoods of some windows of one length to their requests' scores."""
        tokens = torch.tensor([window for _, window, _ in part], device=self.device)  # (B, T + 1)
        y = tokens[:, 1:].clone()
        for row, (_, _, n) in zip(y, part):
            row[:-n] = -1  # the context has no targets
        logits, loss = self.model(tokens[:, :-1], y, reduction="none")
        loss = loss.cpu().double().sum(1)
        is_right = ((logits.argmax(-1) == y) | (y == -1)).all(1)
        for (score, _, _), nats, right in zip(part, loss.tolist(), is_right.tolist()):
            score[0] -= nats
            score[1] &= right

    def generate_until(self, requests, disable_tqdm=False):
        raise Mistake("this task needs generated text or the likelihood of whole documents, but "
                      "only tasks with given answers are scored here")

    loglikelihood_rolling = generate_until

if __name__ == "__main__":
    config.run(main)
