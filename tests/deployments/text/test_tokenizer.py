"""Streamed text equals one pass, no character is split, and stop strings do not depend on how tokens were cut."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from call_count import counted_calls
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tiny_tokenizer import byte_fallback, byte_level
from transformers import AutoTokenizer

from deployments.openai.choice_stream import ChoiceStream
from deployments.text.detokenizer import REPLACEMENT, ByteDetokenizer, StopChecker, TextStream, WindowDetokenizer
from deployments.text.tokenizer import TextCodec, load_tokenizer
from engine.checkpoint.store import resolve_model
from engine.errors import ConfigError, InvalidRequest
from engine.messages import Delta

TOKENIZER = byte_level()
EOS = TOKENIZER.eos_token_id
FAST = TextCodec(TOKENIZER, eos_token_ids=[EOS])
SLOW = TextCodec(TOKENIZER, eos_token_ids=[EOS], use_window=True)
FALLBACK = TextCodec(byte_fallback(), eos_token_ids=[1])
CODECS = {"table": FAST, "window": SLOW}
A = FAST.encode("a")[0]

texts = st.text(st.sampled_from("abst op\n🙂👩‍👩‍👧é中\ufffd"), max_size=40)
token_ids = st.lists(st.integers(0, FAST.vocab_size - 1), max_size=60)


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, length), max_size=length + 2))
    return [0, *sorted(inner), length]


def stream(codec: TextCodec, ids: list[int], edges: list[int]) -> list[str]:
    detokenizer = codec.detokenizer()
    pieces = [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None, max_examples=200)
@given(data=st.data(), ids=token_ids.map(lambda ids: [*ids, A]))
def test_pieces_equal_one_pass_for_any_tokens_and_cuts(name: str, data: st.DataObject, ids: list[int]) -> None:
    pieces = stream(CODECS[name], ids, data.draw(cuts(len(ids))))
    assert "".join(pieces) == FAST.decode(ids)


@pytest.mark.parametrize("codec", [FAST, SLOW, FALLBACK], ids=["table", "window", "fallback"])
@settings(deadline=None, max_examples=100)
@given(text=texts.filter(lambda text: REPLACEMENT not in text))
def test_text_survives_token_by_token_without_half_characters(codec: TextCodec, text: str) -> None:
    ids = list(codec.encode(text))
    pieces = stream(codec, ids, list(range(len(ids) + 1)))
    assert "".join(pieces) == codec.decode(ids) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("codec", [FAST, SLOW, FALLBACK], ids=["table", "window", "fallback"])
@pytest.mark.parametrize("text", ["go 🙂", "中", "go é"])
def test_an_end_inside_a_character_shows_nothing_of_it(codec: TextCodec, text: str) -> None:
    """Whatever ends the response, max_tokens or a stop token: neither a stream nor a whole response ends in U+FFFD."""
    ids = list(codec.encode(text))
    for end in range(len(ids)):
        shown = "".join(stream(codec, ids[:end], list(range(end + 1))))
        assert text.startswith(shown)
        text_stream = TextStream(codec.detokenizer(), ["never"])
        assert text_stream.push(ids[:end], is_last=True).text == shown


def test_the_fast_codec_is_fast_and_the_slow_twin_is_selectable() -> None:
    assert isinstance(FAST.detokenizer(), ByteDetokenizer)
    assert isinstance(SLOW.detokenizer(), WindowDetokenizer)
    assert isinstance(FALLBACK.detokenizer(), WindowDetokenizer)


@pytest.mark.parametrize("text", ["a", REPLACEMENT, "<|start|>"])
def test_window_decoding_time_is_linear_even_when_everything_is_held_back(text: str) -> None:
    """Decoded ids grow linearly: twice the tokens, about twice the work (quadratic would be four times)."""

    def work(num_repeats: int) -> int:
        count = 0

        def decode(ids: object) -> str:
            nonlocal count
            count += len(ids)
            return SLOW.decode(ids)

        detokenizer = WindowDetokenizer(decode)
        for token_id in list(SLOW.encode(text)) * num_repeats:
            detokenizer.push((token_id,))
        return count

    assert work(2000) < 2.6 * work(1000)


def test_special_tokens_and_eos_are_not_shown_but_added_tokens_are() -> None:
    ids = [*FAST.encode("a<tool é>b"), *FAST.encode("<|start|>"), EOS]
    assert FAST.decode(ids) == "a<tool é>b"
    assert "".join(stream(FAST, ids, list(range(len(ids) + 1)))) == "a<tool é>b"


@pytest.mark.parametrize("use_window", [False, True])
def test_eos_is_hidden_also_where_the_tokenizer_does_not_call_it_special(use_window: bool) -> None:
    a, b = FAST.encode("a")[0], FAST.encode("b")[0]
    codec = TextCodec(TOKENIZER, eos_token_ids=[b], use_window=use_window)
    assert codec.decode([a, b]) == "".join(stream(codec, [a, b], [0, 1, 2])) == "a"


def test_ids_beyond_the_tokenizer_show_nothing() -> None:
    """A model's vocabulary may be padded beyond its tokenizer's."""
    assert stream(FAST, [*FAST.encode("a"), 10**6], [0, 2]) == ["a", ""]


def first_stop(text: str, stops: list[str]) -> str:
    """The rule, computed the slow way: the shortest prefix that ends in a stop string, without the longest such one."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))]
    return text


@st.composite
def texts_and_stops(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Few letters and long stop strings, so that a match often fails late and overlaps the next."""
    text = draw(st.text("ab", max_size=40) | st.text("abc", max_size=40))
    stops = draw(st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=3))
    start = draw(st.integers(0, len(text)))
    cut_out = text[start : start + draw(st.integers(3, 7))]
    return text, [cut_out] if cut_out and draw(st.booleans()) else stops


@settings(max_examples=500)
@example(data=None, case=("aaab", ["aab"]))
@example(data=None, case=("abababc", ["ababc", "bb"]))
@example(data=None, case=("aabaaabaaac", ["aabaaac"]))
@given(data=st.data(), case=texts_and_stops())
def test_stop_strings_cut_at_the_same_place_for_any_cuts(
    data: st.DataObject | None, case: tuple[str, list[str]]
) -> None:
    text, stops = case
    edges = data.draw(cuts(len(text))) if data else list(range(len(text) + 1))
    checker = StopChecker(stops)
    shown = ""
    for a, b in pairwise(edges):
        shown += checker.push(text[a:b])
        seen = text[:b]
        assert seen.startswith(shown)
        if not checker.is_stopped:
            held = seen[len(shown) :]
            assert held == "" or any(stop.startswith(held) for stop in stops), "held back without need"
    shown += checker.finish()
    assert shown == first_stop(text, stops)
    assert checker.is_stopped == (first_stop(text, stops) != text or any(stop in text for stop in stops))


@settings(deadline=None, max_examples=200)
@given(data=st.data(), text=texts, stops=st.lists(st.text("stop 🙂", min_size=1, max_size=4), min_size=1, max_size=4))
def test_stopped_streams_count_tokens_up_to_the_one_that_completes(
    data: st.DataObject, text: str, stops: list[str]
) -> None:
    ids = list(FAST.encode(text))
    edges = data.draw(cuts(len(ids)))
    stream = TextStream(FAST.detokenizer(), stops)
    shown, num_tokens, is_stopped = "", 0, False
    for index, (a, b) in enumerate(pairwise(edges)):
        piece = stream.push(ids[a:b], is_last=index == len(edges) - 2)
        shown, num_tokens, is_stopped = shown + piece.text, num_tokens + piece.num_tokens, piece.is_stopped
        if is_stopped:
            break
    assert shown == first_stop(text, stops)
    expected = next((n for n in range(len(ids) + 1) if any(stop in FAST.decode(ids[:n]) for stop in stops)), len(ids))
    assert num_tokens == expected
    assert is_stopped == any(stop in text for stop in stops)


@settings(deadline=None)
@given(data=st.data(), ids=token_ids, stops=st.lists(st.sampled_from(["a", "st", "op\n", "b s"]), max_size=2))
def test_an_answer_of_text_alone_is_that_of_the_path_for_everything(
    data: st.DataObject, ids: list[int], stops: list[str]
) -> None:
    """Most deltas take the fast path. The slow path is its twin; a trace selects it here."""
    edges = data.draw(cuts(len(ids)))
    short = ChoiceStream(TextStream(FAST.detokenizer(), stops))
    long = ChoiceStream(TextStream(FAST.detokenizer(), stops), has_trace=True)
    for start, end in pairwise(edges):
        delta = Delta(
            request_id="r", token_ids=tuple(ids[start:end]), finish_reason="length" if end == len(ids) else None
        )
        (mine,), (other,) = short.push(delta), long.push(delta)
        assert mine == replace(other, trace=None)
        if mine.finish_reason is not None:
            break


def test_a_stop_string_that_never_completes_is_shown_in_the_end() -> None:
    stream = TextStream(FAST.detokenizer(), ["stopped"])
    pieces = [stream.push(FAST.encode("go, sto"), is_last=False), stream.push((), is_last=True)]
    assert [piece.text for piece in pieces] == ["go, ", "sto"]


@pytest.mark.parametrize("stops", [(), ("stopped",)], ids=["no stop string", "a stop string"])
def test_characters_are_counted_as_they_are_decoded_even_where_they_are_held_back(stops: tuple[str, ...]) -> None:
    stream = TextStream(FAST.detokenizer(), stops)
    assert stream.num_decoded == 0
    stream.push(FAST.encode("go, sto"), is_last=False)
    assert stream.num_decoded == 7
    stream.push(FAST.encode("p"), is_last=True)
    assert stream.num_decoded == 8


def test_streaming_a_token_costs_the_same_at_any_length() -> None:
    """Counted in function calls: with four stop strings about 65, in a long text as in a short one."""
    ids = FAST.encode("the quick brown fox jumps over the lazy dog " * 50)
    stream = TextStream(FAST.detokenizer(), ["nowhere", "to be", "found", "at all"])
    after = []
    with counted_calls() as calls:
        for token_id in ids:
            stream.push((token_id,), is_last=False)
            after.append(calls.num)
    half = len(ids) // 2
    assert after[-1] - after[half] <= 1.05 * after[half]
    assert after[-1] / len(ids) < 100


def test_from_folder_reads_eos_of_generation_config_and_tokenizer(tmp_path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    assert TextCodec.from_folder(tmp_path).eos_token_ids == (EOS,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "model_type": "llama"}))
    assert TextCodec.from_folder(tmp_path).eos_token_ids == tuple(sorted({7, EOS}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert TextCodec.from_folder(tmp_path).eos_token_ids == tuple(sorted({8, 9, EOS}))


@pytest.fixture(scope="module")
def smollm2() -> TextCodec:
    return TextCodec.from_folder(resolve_model("smollm2", progress=False))


def test_the_default_model_s_pieces_equal_one_pass(smollm2: TextCodec) -> None:
    """The same promise on a real vocabulary, where tokens cut emoji in many ways."""
    rng = random.Random(0)
    assert isinstance(smollm2.detokenizer(), ByteDetokenizer)
    for _ in range(100):
        ids = [*(rng.randrange(smollm2.vocab_size) for _ in range(80)), *smollm2.encode("a")]
        assert "".join(stream(smollm2, ids, list(range(len(ids) + 1)))) == smollm2.decode(ids)
    text = "Paris 🙂 中文 naïve\n\n👩‍👩‍👧"
    assert smollm2.decode(smollm2.encode(text)) == text


def test_the_default_model_s_chat_ends_where_the_assistant_begins(smollm2: TextCodec) -> None:
    ids = smollm2.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert len(smollm2.eos_token_ids) == 1
    assert smollm2.eos_token_ids[0] in ids
    assert smollm2.decode(ids).endswith("What is the capital of France?\nassistant\n")


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        TextCodec.from_folder(tmp_path)


def test_chat_is_rendered_by_the_template_and_its_refusals_name_messages() -> None:
    ids = FAST.encode_chat([{"role": "user", "content": "go"}])
    assert ids == FAST.encode("<|start|>user\ngo<|end|>\n<|start|>assistant\n")
    with pytest.raises(InvalidRequest, match="system must come first") as caught:
        FAST.encode_chat([{"role": "user", "content": "go"}, {"role": "system", "content": "no"}])
    assert caught.value.field == "messages"
    with pytest.raises(InvalidRequest, match="no chat template"):
        FALLBACK.encode_chat([{"role": "user", "content": "go"}])


TEXTS = ("go", " naïve  café\n\n🙂 12345", "<|im_start|>user\n<|im_end|>", "中 def f(x):\n\treturn x")
CHATS: list[list[dict[str, object]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
]


@pytest.mark.parametrize("folder", ["smollm2", "qwen2", "llama"])
def test_the_tokenizer_without_torch_equals_the_model_s_own_class(tmp_path: Path, folder: str) -> None:
    """A chat template renders the same, and a text has the same ids, BOS included."""
    if folder == "smollm2":
        path = resolve_model("smollm2", progress=False)
    else:
        path = tmp_path
        byte_level().save_pretrained(path)
        config = json.loads((path / "tokenizer_config.json").read_text())
        config["tokenizer_class"] = {"qwen2": "Qwen2TokenizerFast", "llama": "PreTrainedTokenizerFast"}[folder]
        if folder == "qwen2":
            config |= {"unk_token": "<|start|>", "pad_token": "<|end|>"}
        if folder == "llama":
            config |= {"bos_token": "<|start|>", "add_bos_token": True}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        (path / "config.json").write_text(json.dumps({"model_type": folder}))
    ours = load_tokenizer(path)
    theirs = AutoTokenizer.from_pretrained(path)
    assert ours.get_vocab() == theirs.get_vocab()
    assert (ours.eos_token_id, ours.special_tokens_map) == (theirs.eos_token_id, theirs.special_tokens_map)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    for chat in CHATS:
        for begins_turn in (False, True):
            assert ours.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=begins_turn
            ) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=begins_turn)
