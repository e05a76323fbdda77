"""
Children's Book Test: 20 sentences of a book, a 21st with a word left out (XXXXX in the data), ten
candidates for it. cbt.yaml names the data.

The candidates are compared by the mean log-likelihood per token of the candidate and the rest of its
sentence, given all that comes before; the score is the mean accuracy over the kinds of words: common
nouns, named entities, prepositions, verbs. The PoPE paper gives the mean over the kinds (section 4) and
not the rule, which is that of an author's earlier code for the same six tasks
(github.com/RobertCsordas/moeut_training_code); GPT-2's paper (section 3.2) compares sums. As there, the
spaces and quotes that the data's tokeniser put in are taken out.
"""
import re

QUOTES = (("`` ", '"'), (" ''", '"'), ("` ", "'"), ("-LRB- ", "("), (" -RRB-", ")"))


def plain(text):
    for tokenised, written in QUOTES:
        text = text.replace(tokenised, written)
    return re.sub(r" (?=[.,:;!?']|n't\b)", "", text)


def questions(rows):
    """A datasets.Dataset of sentences, question, options, answer -> context, endings and the
    number of the right one."""

    def question(row):
        before, _, after = row["question"].partition("XXXXX")
        options = [option for option in row["options"] if option]
        context = plain(" ".join([*row["sentences"], before]))
        endings = [plain(option + after) for option in options]
        return dict(context=context, endings=endings, answer=options.index(row["answer"]))

    return rows.map(question, remove_columns=rows.column_names)


def accuracy(doc, results):
    means = [score[0] / score.tokens for score in results]
    return {"acc": float(means.index(max(means)) == doc["answer"])}
