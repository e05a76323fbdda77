"""The Children's Book Test as questions and scores. cbt.yaml describes the task and its rule."""
import re

QUOTES = (("`` ", '"'), (" ''", '"'), ("` ", "'"), ("-LRB- ", "("), (" -RRB-", ")"))

def plain(text):
    """Undoes the tokenisation of the data, which puts spaces between words and the quotes,
    brackets, punctuation and contractions (such as n't) beside them."""
    for tokenised, written in QUOTES:
        text = text.replace(tokenised, written)
    return re.sub(r" (?=[.,:;!?']|n't\b)", "", text)

def questions(rows):
    """Turns a datasets.Dataset with the columns sentences, question, options and answer into one
    with the columns context, endings and answer, the index of the right ending."""
    def question(row):
        before, _, after = row["question"].partition("XXXXX")
        options = [option for option in row["options"] if option]
        context = plain(" ".join([*row["sentences"], before]))
        endings = [plain(option + after) for option in options]
        return dict(context=context, endings=endings, answer=options.index(row["answer"]))

    return rows.map(question, remove_columns=rows.column_names)

def accuracy(doc, results):
    """Returns whether the right ending has the highest mean log-likelihood per token. results has a
    Score for each ending."""
    means = [score[0] / score.tokens for score in results]
    return {"acc": float(means.index(max(means)) == doc["answer"])}
