"""The Children's Book Test as questions and scores. cbt.yaml says how it is done."""
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
