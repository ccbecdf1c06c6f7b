"""examples/question_answering.py: rows of long contexts, the best span over the rows of a question, F1 and exact match,
against words counted by hand."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from question_answering import Windows, best, f1, measures, plain, said

LENGTH, STRIDE = 16, 3


def tokenizer() -> object:
    """One token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] + [f"{kind}{i}" for kind in "qw" for i in range(80)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]")


def question(asked: int, words: int, answer: tuple[int, int]) -> tuple[str, str, list[str], int]:
    """The answer: of these words, the first and the last."""
    context = [f"w{i}" for i in range(words)]
    text = " ".join(context[answer[0] : answer[1] + 1])
    return " ".join(context), " ".join(f"q{i}" for i in range(asked)), [text], len(" ".join(context[: answer[0]])) + (answer[0] > 0)


QUESTIONS = [((4, 40), (0, 1)), ((4, 40), (7, 9)), ((4, 40), (39, 39)), ((2, 11), (10, 10)), ((3, 5), (1, 2)), ((30, 21), (12, 14)), ((4, 40), (2, 30))]


def by_hand(asked: int, words: int) -> list[tuple[int, int]]:
    """Which words of the context each row has: from, to."""
    room, at, rows = LENGTH - 3 - min(asked, LENGTH // 2), 0, []
    while True:
        rows.append((at, min(at + room, words)))
        if at + room >= words:
            return rows
        at += room - STRIDE


def windows() -> Windows:
    return Windows(tokenizer(), [question(*size, answer) for size, answer in QUESTIONS], LENGTH, STRIDE)


def test_rows_cover_the_context_and_mark_answers_that_they_have() -> None:
    ours = windows()
    want = [(i, k, *words) for i, (size, _) in enumerate(QUESTIONS) for k, words in enumerate(by_hand(*size))]
    assert ours.rows == [(i, k) for i, k, _, _ in want] and len(ours.rows) > len(QUESTIONS) + 10
    order = torch.randperm(len(want), generator=torch.Generator().manual_seed(0)).tolist()  # of several questions, any rows of each
    given, places = ours.batch([ours.rows[n] for n in order])
    vocabulary = ours.tokenizer.get_vocab()
    for row, n in enumerate(order):
        i, _, begin, end = want[n]
        (asked, _), (first, last) = QUESTIONS[i]
        text = ["[CLS]", *(f"q{j}" for j in range(min(asked, LENGTH // 2))), "[SEP]", *(f"w{j}" for j in range(begin, end)), "[SEP]"]
        text += ["[PAD]"] * (LENGTH - len(text))
        assert given["input_ids"][row].tolist() == [vocabulary[t] for t in text]
        assert given["attention_mask"][row].tolist() == [int(t != "[PAD]") for t in text]
        inside = begin <= first and last < end
        assert (given["start_positions"][row], given["end_positions"][row]) == ((text.index(f"w{first}"), text.index(f"w{last}")) if inside else (0, 0))
        for (a, b), t in zip(places[row].tolist(), text, strict=True):
            assert ours.questions[i][0][a:b] == t if t[0] == "w" else (a, b) == (-1, -1)

    with pytest.raises(ValueError, match="--stride must be less"):
        Windows(tokenizer(), ours.questions, LENGTH, 5)


def test_the_answer_is_the_best_span_of_all_rows() -> None:
    ours, random = windows(), torch.Generator().manual_seed(1)
    scores = {row: torch.randn(2, LENGTH, generator=random) for row in ours.rows}
    asked: list[tuple[int, int]] = []

    def model(**given: torch.Tensor) -> SimpleNamespace:
        rows = ours.rows[len(asked) : len(asked) + len(given["input_ids"])]
        asked.extend(rows)
        both = torch.stack([scores[row] for row in rows], 1)
        return SimpleNamespace(start_logits=both[0], end_logits=both[1])

    answers = said(model, ours, 4)
    assert asked == ours.rows
    for i, (size, _) in enumerate(QUESTIONS):
        found = []
        for k, (begin, end) in enumerate(by_hand(*size)):
            start, last = (s.tolist() for s in scores[i, k])
            shift = min(size[0], LENGTH // 2) + 2 - begin
            found += [(start[a + shift] + last[b + shift], a, b) for a in range(begin, end) for b in range(a, end)]
        _, a, b = max(found)
        assert answers[i] == " ".join(f"w{j}" for j in range(a, b + 1))


def test_spans_are_of_the_context_and_no_longer_than_asked_for() -> None:
    place = torch.tensor([[-1, -1], [0, 2], [3, 5], [6, 8], [-1, -1]])
    start, end = torch.tensor([9.0, 1, 0, 0, 9]), torch.tensor([9.0, 0, 0, 1, 9])
    assert best(start, end, place) == (2.0, 0, 8)
    assert best(start, end, place, 2) == (1.0, 0, 2)
    assert best(torch.tensor([0.0, 0, 0, 5, 0]), torch.tensor([0.0, 5, 0, 0, 0]), place)[0] == 5.0  # the last is not before the first


def test_measures() -> None:
    """As the script says: precision and recall of words, after lower case, punctuation and articles; the best over the answers."""
    assert plain("The  Cat's, a HAT -- an owl!") == ["cats", "hat", "owl"] and plain("theatre another") == ["theatre", "another"]
    for ours, truth, same in (("the cat sat", "Cat sat down.", 2), ("a b b c", "b b b", 2), ("x", "y", 0), ("New York", "new york", 2)):
        precision, recall = Fraction(same, len(plain(ours))), Fraction(same, len(plain(truth)))
        assert f1(ours, truth) == pytest.approx(float(2 * precision * recall / (precision + recall)) if same else 0.0)
    questions = [("", "", ["1066", "in the year 1066"], 0), ("", "", ["Norman"], 0)]
    assert measures(["year 1066", "norman"], questions) == {"exact_match": 50.0, "f1": pytest.approx(50 * (0.8 + 1))}
