"""Where a request ends, and which text may be streamed before."""

import pytest

from service.core import FinishReason, HiddenTokens, Prompt, Sampling, Source
from service.engine.request import Request, TextStream


class LetterDetokenizer:
    """A detokenizer with one letter per token."""

    def __init__(self) -> None:
        self.text = ""

    def add_token(self, token: int) -> None:
        self.text += chr(token)

    def finalize(self) -> None:
        self.text += "."


class HoldingDetokenizer:
    """A detokenizer of a few words that holds a single space back, as mlx-lm's do."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.text, self.held = words, "", ""

    def add_token(self, token: int) -> None:
        word = self.words[token] if token < len(self.words) else ""
        self.text, self.held = self.text + (self.held + word).rstrip(" "), " " if word == " " else ""

    def finalize(self) -> None:
        self.text += self.held


def streamed(text: str, *stop: str) -> tuple[list[str], bool]:
    stream = TextStream(LetterDetokenizer(), stop)
    pieces: list[str] = []
    for letter in text:
        stopped = stream.add(ord(letter))
        pieces.append(stream.delta())
        if stopped:
            return pieces, True
    assert not stream.finish()
    return [*pieces, stream.delta()], False


def test_a_stop_string_across_tokens_never_shows() -> None:
    pieces, stopped = streamed("one END two", "END")
    assert stopped and "".join(pieces) == "one "
    assert all("E" not in piece for piece in pieces)


@pytest.mark.parametrize(("text", "stop"), [("xaab", "aab"), ("ababac", "abac"), ("xnnnny", "nnny")])
def test_the_longest_beginning_of_a_stop_string_is_withheld(text: str, stop: str) -> None:
    """Shorter ones that the text also ends in would let the first letters out."""
    pieces, stopped = streamed(text, stop)
    assert stopped
    assert "".join(pieces) == text[: text.index(stop)]


def test_text_withheld_for_a_possible_stop_string_is_shown_later() -> None:
    pieces, stopped = streamed("an ENvelope", "END")
    assert not stopped and "".join(pieces) == "an ENvelope."


def test_the_earliest_of_several_stop_strings_wins() -> None:
    pieces, stopped = streamed("ab##cd", "cd", "##")
    assert stopped and "".join(pieces) == "ab"


def row(max_tokens: int) -> Request:
    return Request("r", Prompt((1, 2), Sampling(max_tokens=max_tokens)), frozenset({9}), None)


def test_a_round_that_passes_the_end_token_is_cut_there() -> None:
    request = row(max_tokens=10)
    delta = request.append_round([4, 9, 5], [4, 9], Source.DRAFT, adapter=3)
    assert request.finish is FinishReason.STOP and request.output == [4, 9]
    assert delta.tokens == (4, 9) and delta.drafted == (True, True)
    (done,) = request.rounds
    assert (done.drafted, done.accepted, done.emitted) == (2, 2, 2), "never more accepted than emitted"


@pytest.mark.parametrize(
    ("tokens", "drafted", "counted"),
    [
        ([4, 9, 5, 6], [4, 9, 5], (2, 2)),
        ([9, 5, 6, 7], [9, 5, 6], (1, 1)),
        ([4, 9], [4, 8, 5], (2, 1)),
        ([9], [8, 5, 6], (1, 0)),
        ([4, 5, 6, 9], [4, 5, 6], (3, 3)),
        ([4, 5], [4, 8, 6], (3, 1)),
    ],
    ids=["in the middle", "at once", "corrected", "corrected at once", "the bonus token", "no end"],
)
def test_positions_behind_the_end_are_not_counted(
    tokens: list[int], drafted: list[int], counted: tuple[int, int]
) -> None:
    """It is unknown whether they would have been accepted."""
    request = row(max_tokens=10)
    request.append_round(tokens, drafted, Source.DRAFT, adapter=3)
    (done,) = request.rounds
    assert (done.drafted, done.accepted) == counted
    timings = request.finished().timings
    assert (timings.draft_n, timings.draft_n_accepted) == counted


def test_positions_behind_a_stop_string_are_not_counted() -> None:
    request = Request(
        "r", Prompt((1, 2), Sampling(stop=("ab",))), frozenset(), TextStream(LetterDetokenizer(), ("ab",))
    )
    request.append_round([*b"xabyz"], [*b"xaby"], Source.LOOKUP, adapter=3)
    assert request.finish is FinishReason.STOP
    assert [(done.drafted, done.accepted, done.emitted) for done in request.rounds] == [(3, 3, 3)]


@pytest.mark.parametrize("end", [9, 3])
def test_a_stop_string_whose_last_character_is_held_back_ends_the_text(end: int) -> None:
    """The detokenizer holds a space back until the next token; here none comes."""
    words = HoldingDetokenizer(["one", " two", " ", ""])
    sampling = Sampling(stop=("two ",), max_tokens=3 if end == 9 else 9)
    request = Request("r", Prompt((0,), sampling), frozenset({end}), TextStream(words, sampling.stop))
    delta = request.append_round([0, 1, 2, *([end] if end == 3 else [])], [0, 1, 2], Source.DRAFT, adapter=0)
    assert (delta.text, request.finish) == ("one ", FinishReason.STOP)
    assert request.text is not None and request.text.stopped_by == "two "


def test_a_round_that_passes_max_tokens_is_cut_there() -> None:
    request = row(max_tokens=2)
    request.append_round([4, 5, 6, 7], [4, 5, 6], Source.DRAFT, adapter=0)
    assert request.finish is FinishReason.LENGTH and request.output == [4, 5]
    timings = request.finished().timings
    assert (timings.draft_n, timings.draft_n_accepted, timings.predicted_n) == (2, 2, 2)


def test_every_adapter_that_drafted_is_named_once_in_order() -> None:
    request = row(max_tokens=20)
    for adapter in (2, 2, 5, 2):
        request.append_round([4, 5], [4], Source.DRAFT, adapter=adapter)
    request.append_round([4], [], Source.DRAFT, adapter=7)
    assert request.finished().timings.adapters == (2, 5)


@pytest.mark.parametrize(
    ("said", "start", "end", "text"),
    [
        ("aPbQ", "", "", "ab"),
        ("PQ", "", "", ""),
        ("aP(bQ)cP", "(", ")", "a(bQ)c"),
        ("P(bQ)(cPdQ", "(", ")", "(bQ)(cPdQ"),
        ("P(bQ)cQ", "(", "", "(bQ)cQ"),
    ],
)
def test_hidden_tokens_are_no_text_but_in_calls(said: str, start: str, end: str, text: str) -> None:
    hidden = HiddenTokens(frozenset(map(ord, "PQ")), start, end)
    request = Request("r", Prompt((1, 2), Sampling(), hidden=hidden), frozenset(), TextStream(LetterDetokenizer(), ()))
    shown: list[bool] = []
    for at in range(0, len(said), 2):
        request.append_round([ord(letter) for letter in said[at : at + 2]], [], Source.DRAFT, 0)
        shown += request.newest_shown
    assert request.text is not None and request.text.detokenizer.text == text
    assert "".join(letter for letter, is_shown in zip(said, shown, strict=True) if is_shown) == text
    assert request.emitted == len(said)


def test_rounds_with_proposals_are_counted_by_what_was_accepted_of_them() -> None:
    request = row(max_tokens=20)
    for tokens, drafted in (([4, 5, 6], [4, 5]), ([4], []), ([8], [4, 5]), ([4, 8], [4, 5]), ([9], [5])):
        request.append_round(tokens, drafted, Source.DRAFT, adapter=0)
    timings = request.finished().timings
    assert timings.accepted_rounds == (2, 1, 1) and sum(timings.accepted_rounds) == timings.draft_rounds
    assert sum(j * count for j, count in enumerate(timings.accepted_rounds)) == timings.draft_n_accepted
    plain = row(max_tokens=20)
    plain.append_round([4], [], Source.DRAFT, adapter=0)
    none = plain.finished().timings
    assert none.accepted_rounds == ()
    assert type(timings).combined([timings, none, timings], 1).accepted_rounds == (4, 2, 2)
