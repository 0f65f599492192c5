"""Stop strings: the earliest match, wherever pieces are cut, and nothing held back for longer."""

from __future__ import annotations

import time
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_tokenizers import TEXTS, byte_level_tokenizer, sentence_piece_tokenizer
from unisono.launcher.answering import Answer, Piece, Request, answer_all
from unisono.launcher.text.stop_strings import StopStrings
from unisono.launcher.text.tokenizer import Tokenizer
from unisono.runtime.protocol import Delta, Finished, SamplingParams, Tokens

TOKENIZERS = {
    "byte-level": Tokenizer(byte_level_tokenizer(), special_tokens={}, templates={}),
    "sentence-piece": Tokenizer(sentence_piece_tokenizer(), special_tokens={}, templates={}),
}


def first_match(text: str, stops: tuple[str, ...]) -> tuple[int, int] | None:
    """Start and end of the match that is complete first, of those the longest; by trying all."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


def held_back(text: str, stops: tuple[str, ...]) -> str:
    """The longest suffix of `text` that is a proper prefix of some stop string; by trying all."""
    sizes = range(len(text), 0, -1)
    suffixes = [text[-size:] for size in sizes]
    return next((s for s in suffixes for stop in stops if stop != s and stop.startswith(s)), "")


@settings(max_examples=500)
@given(
    text=st.text("abc👋한", max_size=40),
    stops=st.lists(st.text("abc👋한", min_size=1, max_size=5), max_size=5).map(tuple),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5),
)
def test_any_pieces_give_the_text_before_the_first_match(text, stops, sizes):
    search = StopStrings(stops).search()
    match = first_match(text, stops)
    shown, seen = "", 0
    while seen < len(text) and not search.found:
        size = sizes[seen % len(sizes)]
        shown += search.push(text[seen : seen + size])
        seen += len(text[seen : seen + size])
        if not search.found:
            assert shown + held_back(text[:seen], stops) == text[:seen]
    shown += search.flush()
    assert search.found == (match is not None)
    assert shown == (text if match is None else text[: match[0]])
    assert match is None or seen - size < match[1] <= seen


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (("late", "early"), "so early, then late", "so "),
        (("bc", "abcd"), "xabcd", "xa"),
        (("c", "bc", "abc"), "xabc", "x"),
        (("aab",), "aaaab", "aa"),
        (("\n\n",), "a\n\nb", "a"),
        (("x",), "x", ""),
    ],
)
def test_the_earliest_match_wins_over_list_order(stops, text, shown):
    """B63: also a stop of one character."""
    for order in (stops, stops[::-1]):
        search = StopStrings(order).search()
        assert (search.push(text), search.found, search.flush()) == (shown, True, "")


def test_only_a_real_prefix_is_held_back():
    """B68: what cannot become a match is shown at once."""
    search = StopStrings(("</end>",)).search()
    assert [search.push(piece) for piece in ("a <", "b </e", "n", "x")] == [
        "a ",
        "<b ",
        "",
        "</enx",
    ]
    assert (search.push("<"), search.flush()) == ("", "<")


def test_time_is_linear_in_text_and_strings():
    """Quadratic work would take minutes here."""
    stops = StopStrings(tuple("a" * size + "b" for size in range(1, 200)))
    search = stops.search()
    start = time.process_time()
    for _ in range(200_000):
        search.push("a")
    assert len(search.flush()) == 199
    assert time.process_time() - start < 10


class OneAnswer:
    """An engine that answers with given tokens in deltas of given sizes."""

    def __init__(self, ids: list[int], sizes: list[int]) -> None:
        self.ids, self.sizes = ids, sizes
        self.aborted: list[int] = []
        self.num_sent = 0
        self._deltas = 0

    def submit(self, prompt_ids, params, priority=0):
        return 1

    def abort(self, request_id):
        self.aborted.append(request_id)

    def poll(self, timeout_s):
        if self.num_sent == len(self.ids):
            return [
                Finished(
                    request_id=1,
                    reason="length",
                    num_prompt_tokens=1,
                    num_tokens=len(self.ids),
                    first_token_s=0.1,
                    total_s=0.2,
                )
            ]
        size = self.sizes[self._deltas % len(self.sizes)]
        self._deltas += 1
        new = self.ids[self.num_sent : self.num_sent + size]
        self.num_sent += len(new)
        if len(new) == 1 and self._deltas > 1:
            return [Tokens(request_ids=array("q", [1]), token_ids=array("i", new))]
        return [Delta(request_id=1, token_ids=array("i", new))]


def answered(kind, ids, sizes, stops=()):
    engine = OneAnswer(ids, sizes)
    request = Request(index=0, prompt="p", prompt_ids=(1,))
    events = list(answer_all(engine, TOKENIZERS[kind], [request], SamplingParams(stop=stops)))
    *pieces, answer = events
    assert isinstance(answer, Answer)
    [whole] = answer_all(
        OneAnswer(ids, sizes), TOKENIZERS[kind], [request], SamplingParams(stop=stops), whole=True
    )
    for name in ("text", "token_ids", "finish_reason"):
        assert getattr(whole, name) == getattr(answer, name), "pieces change no answer"
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert all(piece.text for piece in pieces), "no empty deltas"
    assert "".join(piece.text for piece in pieces) == answer.text
    carried = sum((piece.token_ids for piece in pieces), ())
    assert answer.token_ids[: len(carried)] == carried
    return answer, engine


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=250)
@given(data=st.data())
def test_streams_equal_the_whole_text_cut_where_it_stops(kind, data):
    tokenizer = TOKENIZERS[kind]
    pieces = data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3))
    ids = tokenizer.encode("".join(pieces), add_special_tokens=False)
    start = data.draw(st.integers(0, max(0, len(ids) - 1)))
    ids = ids[start : start + 60]
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    whole = tokenizer.decode(ids)
    plain, engine = answered(kind, ids, sizes)
    assert (plain.text, plain.token_ids, engine.aborted) == (whole, tuple(ids), [])

    if not whole:
        return
    at = data.draw(st.integers(0, len(whole) - 1))
    wanted = whole[at : at + data.draw(st.integers(1, 6))]
    stops = (*data.draw(st.lists(st.text("ab \n한", min_size=1, max_size=3), max_size=3)), wanted)
    cut, engine = answered(kind, ids, sizes, stops)
    match = first_match(whole, stops)
    assert match is not None
    assert (cut.text, cut.finish_reason) == (whole[: match[0]], "stop")
    # The last token kept is the first with which the whole match was out.
    stream, out, count = tokenizer.stream(), 0, 0
    for token in ids:
        count += 1
        out += len(stream.push([token]))
        if out >= match[1]:
            break
    assert cut.token_ids == tuple(ids[:count])
    assert engine.aborted == ([1] if out >= match[1] else [])


def test_seven_drafts_and_a_stop_in_the_first_accepted_token():
    """B62, B63: text and ids end there, and nothing behind it is shown."""
    ids = TOKENIZERS["byte-level"].encode("ab.cdefghij", add_special_tokens=False)
    answer, engine = answered("byte-level", ids, [2, 8], (".",))
    assert (answer.text, answer.finish_reason) == ("ab", "stop")
    assert answer.token_ids == tuple(ids[:3])
    assert (engine.aborted, engine.num_sent) == ([1], 10)
    assert 0 <= answer.first_token_s <= answer.total_s


def test_thousands_of_broken_characters_come_in_time():
    """B75: each of the 4,000 tokens is an invalid byte; no window is decoded again and again."""
    broken = byte_level_tokenizer().encode("é").ids[1]
    start = time.process_time()
    answer, _ = answered("byte-level", [broken] * 4000, [1], ("never",))
    assert answer.text == "\ufffd" * 4000
    assert time.process_time() - start < 5
