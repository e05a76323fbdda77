"""Scores on downstream tasks, by EleutherAI's lm-evaluation-harness: sample.py RUN --tasks=piqa"""
import os
import zlib

import lm_eval.tasks
import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.utils import make_table

from data.tokenizer import tokenizer
from eval import losses, results


def score_tasks(runs, names, fewshot):
    """Prints the harness's table of scores for each run, and appends them to RUN/results.jsonl."""
    manager = lm_eval.tasks.TaskManager(include_path=os.path.dirname(os.path.abspath(__file__)))
    for name in names:
        if name not in manager.all_tasks and not os.path.isfile(name):
            raise ValueError(f"tasks={name!r} is neither a task of the harness nor a yaml file; "
                             "`lm-eval ls tasks` lists the tasks")
    for run in runs:
        model = Model(run.model, run.meta)
        found = lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, log_samples=False,
                                        num_fewshot=fewshot or None)
        print(f"{run.name}\n{make_table(found)}", flush=True)
        for task, scores in found["results"].items():
            name = task
            shots = found["n-shot"].get(task, fewshot or None)
            if shots is not None:  # a group of tasks may have none
                name += f", {shots}-shot"
            about = found["versions"].get(task), found["n-samples"].get(task)
            results.append(run, {**scores, "split": name, "length": model.longest,
                                 "data": zlib.crc32(repr(about).encode())})

class Score(list):
    """The pair that the harness expects for a continuation: its log-likelihood, and whether greedy
    decoding would produce it. cbt.py also reads `tokens`, the number of tokens in it."""

class Model(TemplateLM):
    """A GPT behind the harness's interface. It reads at most block_size tokens at once, which
    RUN@block_size=n changes. Of a longer context, it reads only the last tokens, as the harness's
    own adapters do. A longer continuation is scored block_size targets at a time. An empty context
    is replaced by the separator."""
    def __init__(self, model, meta):
        super().__init__()
        if meta["separator"] is None:
            raise ValueError("downstream tasks need a model of text, but this one's data set has "
                             "no separator between documents; train on text")
        self.model = model
        self.codec = tokenizer(meta)
        self.separator = meta["separator"]
        self.longest = model.cfg.block_size
        self._device = model.wte.weight.device  # LM.device returns it

    @property
    def eot_token_id(self):
        return self.separator

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.codec.encode(string)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """Returns a Score for each request, which is (_, context tokens, target tokens)."""
        scores = []
        windows = []  # (the request's score, tokens, how many of them at the end are targets)
        for _, context, targets in requests:
            score = Score((0.0, True))
            score.tokens = len(targets)
            scores.append(score)
            tokens = (context or [self.separator]) + targets
            for begin in range(len(tokens) - len(targets), len(tokens), self.longest):
                end = min(begin + self.longest, len(tokens))
                windows.append((score, tokens[max(0, end - self.longest - 1) : end], end - begin))
        for part in losses.batches(windows, lambda window: len(window[1])):
            tokens = torch.tensor([tokens for _, tokens, _ in part], device=self.device)
            y = tokens[:, 1:].clone()
            for row, (_, _, n) in zip(y, part):
                row[:-n] = -1  # no target
            logits = self.model(tokens[:, :-1], y)[0].mT.float()  # (B, V, T)
            loss = F.cross_entropy(logits, y, ignore_index=-1, reduction="none").cpu().double()
            right = ((logits.argmax(1) == y) | (y == -1)).all(1)
            for (score, _, _), nats, all_right in zip(part, loss.sum(1).tolist(), right.tolist()):
                score[0] -= nats
                score[1] &= all_right
        return scores

    def generate_until(self, requests, disable_tqdm=False):
        raise ValueError("this task needs generated text or the likelihood of whole documents, but "
                         "only tasks with given answers are scored here")

    loglikelihood_rolling = generate_until
