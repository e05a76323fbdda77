"""Scores on downstream tasks, by EleutherAI's lm-evaluation-harness: sample.py RUN --tasks=piqa"""
import difflib
import os

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from data.text import tokenizer
from eval import results

try:
    import lm_eval.tasks
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import make_table
    from tqdm import tqdm
except ImportError:
    raise ImportError("downstream tasks need one more package: pip install lm-eval") from None

BATCH = 8192  # tokens per forward pass


def score_tasks(runs, names, limit, fewshot):
    """Print the harness's table of scores for each run, and append them to RUN/results.jsonl.

    names: of tasks, or yaml files; limit: only the first questions of each, 0: all; fewshot: solved
    examples before each question, 0: as many as the task's own file says."""
    manager = lm_eval.tasks.TaskManager(include_path=os.path.dirname(os.path.abspath(__file__)))
    for name in names:
        if name not in manager.all_tasks and not os.path.isfile(name):
            near = difflib.get_close_matches(name, manager.all_tasks, 1)
            mend = f"did you mean {near[0]!r}?" if near else "`lm-eval ls tasks` lists them"
            raise ValueError(f"tasks={name!r} is neither a task of the harness nor a yaml file; "
                             + mend)
    models = {run: Model(run.model, run.meta) for run in runs}
    for run, model in models.items():
        found = lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, log_samples=False,
                                        num_fewshot=fewshot or None, limit=limit or None)
        print(f"{run.name}\n{make_table(found)}", flush=True)
        for task, scores in found["results"].items():
            shots = found["n-shot"].get(task)
            name = task if shots is None else f"{task}, {shots}-shot"  # a group has none
            name += f", the first {limit}" if limit else ""
            row = dict(split=name, trained=model.longest, length=model.longest)
            numbers = {key: value for key, value in scores.items() if isinstance(value, float)}
            results.append(run, row, numbers)


class Score(tuple):
    """The pair that the harness wants of a continuation: its log-likelihood, and whether greedy
    decoding would write it. cbt.py also takes the number of its `tokens`."""


class Model(TemplateLM):
    """A GPT as the harness wants it. TemplateLM cuts texts into tokens and asks for their
    log-likelihoods.

    No more than block_size tokens are read at once (RUN@block_size=n: more than in training). Of a
    longer context the last ones are read, as by the harness's own adapters. A longer continuation
    is scored block_size targets at a time. The separator stands in for an empty context."""

    def __init__(self, model, meta):
        super().__init__()
        if meta["separator"] is None:
            raise ValueError("downstream tasks need a model of text, this one's data set has no "
                             "separator between documents; train on text")
        self.model, self.text, self.separator = model, tokenizer(meta), meta["separator"]
        self.longest = model.cfg.block_size
        self._device = model.wte.weight.device  # what LM.device gives

    @property
    def eot_token_id(self):
        return self.separator

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.text.encode(string)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """requests: [(_, context tokens, target tokens)]. Returns a Score for each."""
        windows = []  # (number of its request, tokens, how many of the last ones are targets)
        for i, (_, context, targets) in enumerate(requests):
            tokens = (context or [self.separator]) + targets
            for begin in range(len(tokens) - len(targets), len(tokens), self.longest):
                end = min(begin + self.longest, len(tokens))
                window = torch.tensor(tokens[max(0, end - self.longest - 1) : end])
                windows.append((i, window, end - begin))
        windows.sort(key=lambda window: -len(window[1]))  # equal lengths together: little padding
        logps, greedy = [0.0] * len(requests), [True] * len(requests)
        bar = tqdm(total=len(windows), desc="log-likelihoods", disable=disable_tqdm)
        while windows:
            rows = max(1, BATCH // len(windows[0][1]))
            batch, windows = windows[:rows], windows[rows:]
            # padding goes to the right, where no token sees it, and -1 is no target
            x = pad_sequence([w[:-1] for _, w, _ in batch], True, 0).to(self.device)
            y = [F.pad(w[-n:], (len(w) - 1 - n, 0), value=-1) for _, w, n in batch]
            y = pad_sequence(y, True, -1).to(self.device)
            logits = self.model(x, y)[0].mT.float()  # (B, V, T)
            losses = F.cross_entropy(logits, y, ignore_index=-1, reduction="none")  # (B, T)
            wrong = (logits.argmax(1) != y) & (y != -1)
            sums = losses.cpu().double().sum(1).tolist()
            for (i, _, _), loss, miss in zip(batch, sums, wrong.any(1).tolist()):
                logps[i] -= loss
                greedy[i] &= not miss
            bar.update(len(batch))
        bar.close()
        found = list(map(Score, zip(logps, greedy)))
        for score, (_, _, targets) in zip(found, requests):
            score.tokens = len(targets)
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        texts = [self.text.encode(request.args[0]) for request in requests]
        requests = [(None, [self.separator], text) for text in texts]
        return [score[0] for score in self._loglikelihood_tokens(requests, disable_tqdm)]

    def generate_until(self, requests, disable_tqdm=False):
        raise ValueError("this task asks the model to write its answers; only tasks that compare "
                         "log-likelihoods are scored here")
