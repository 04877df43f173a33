"""The codec besides streaming: spelling of single tokens, markers for parsers, opened thoughts, options, infilling."""

from __future__ import annotations

import pytest
from tiny_tokenizer import TEMPLATE, byte_fallback, byte_level
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from deployments.text.detokenizer import Detokenizer
from deployments.text.logprobs import TokenName
from deployments.text.tokenizer import TextCodec
from engine.errors import ConfigError, InvalidRequest

THOUGHT_TEMPLATE = TEMPLATE + "{# <think> </think> #}"


def codec_of(
    *special: str, template: str | None = TEMPLATE, use_window: bool = False, generic_tools: bool = False
) -> TextCodec:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(name, special=True) for name in special], special_tokens=True)
    tokenizer.chat_template = template
    return TextCodec(
        tokenizer, eos_token_ids=[tokenizer.eos_token_id], use_window=use_window, generic_tools=generic_tools
    )


def fallback() -> TextCodec:
    return TextCodec(byte_fallback(), eos_token_ids=[1])


@pytest.mark.parametrize("use_window", [False, True], ids=["table", "window"])
def test_tokens_are_spelt_by_their_own_text_and_bytes(use_window: bool) -> None:
    codec = codec_of(use_window=use_window)
    (eos,) = codec.eos_token_ids
    (start,) = codec.encode("<|start|>")
    (added,) = codec.encode("<tool é>")
    assert codec.name_of(codec.encode("a")[0]) == TokenName("a", b"a")
    assert codec.name_of(codec.encode(" ")[0]) == TokenName(" ", b" ")
    assert codec.name_of(eos) == TokenName("<|end|>", None)
    assert codec.name_of(start) == TokenName("<|start|>", None)
    assert codec.name_of(added) == TokenName("<tool é>", "<tool é>".encode())
    assert codec.name_of(codec.vocab_size) == TokenName(f"token_id:{codec.vocab_size}", None)
    assert codec.name_of(eos) is codec.name_of(eos), "each token is decoded once"


def test_a_byte_that_is_no_text_is_spelt_by_its_byte() -> None:
    first, *_ = codec_of().encode("é中")
    assert codec_of().name_of(codec_of().encode("中")[0]) == TokenName("\ufffd", "中".encode()[:1])
    assert codec_of().name_of(first).raw is not None
    codec = fallback()
    assert codec.name_of(2 + 0xE4) == TokenName("\ufffd", b"\xe4")
    assert codec.name_of(2 + 0x41) == TokenName("A", b"A")


def test_a_word_keeps_its_leading_space() -> None:
    codec = fallback()
    space, *_ = codec.encode("a")
    assert codec.name_of(space) == TokenName(" ", b" ")
    assert codec.name_of(codec.encode("a")[-1]) == TokenName("a", b"a")


def shown(detokenizer: Detokenizer, token_ids: tuple[int, ...]) -> str:
    return "".join(detokenizer.push((i,)) for i in token_ids) + detokenizer.finish()


@pytest.mark.parametrize("use_window", [False, True], ids=["table", "window"])
def test_markers_are_shown_to_parsers_only(use_window: bool) -> None:
    codec = codec_of("<tool_call>", "</tool_call>", "<think>", "<other>", use_window=use_window)
    ids = codec.encode("a<think>b <other><tool_call>c</tool_call>")
    assert shown(codec.detokenizer(shows_markers=True), ids) == "a<think>b <tool_call>c</tool_call>"
    assert shown(codec.detokenizer(), ids) == "ab c"
    assert codec.decode(ids) == "ab c"


def test_a_marker_that_is_no_special_token_is_decoded_with_the_text_around_it() -> None:
    """Decoding before and after it apart would lose the spaces there."""
    tokenizer = byte_fallback()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    codec = TextCodec(tokenizer, eos_token_ids=[1])
    assert shown(codec.detokenizer(shows_markers=True), codec.encode("a <tool_call> b")) == "a <tool_call> b"


def test_the_end_of_a_prompt_opens_or_closes_thoughts() -> None:
    codec = codec_of("<think>", "</think>", template=THOUGHT_TEMPLATE)
    assert codec.has_thoughts
    assert not codec_of().has_thoughts
    cases = {
        "a": (False, False),
        "a<think>": (True, False),
        "a<think>\n": (True, False),
        "a<think>b": (False, False),
        "<think></think>\n\n": (False, True),
        "<think></think> a": (False, False),
        "<think>" + "\n" * 15: (True, False),
        "<think>" + "\n" * 16: (False, False),
    }
    for text, expected in cases.items():
        prompt = tuple(i for char in text.partition("<think>") for i in codec.encode(char))
        if text.endswith("\n" * 15):
            (think,), newline = codec.encode("<think>"), codec.encode("\n")
            prompt = (think, *newline * (len(text) - len("<think>")))
        assert (codec.opens_thoughts(prompt), codec.closes_thoughts(prompt)) == expected, text


def test_markers_that_are_plain_text_are_found_as_well() -> None:
    codec = codec_of(template=THOUGHT_TEMPLATE)
    assert codec.opens_thoughts(codec.encode("a <think>\n"))
    assert codec.closes_thoughts(codec.encode("a </think>\n"))


@pytest.mark.parametrize(
    ("template", "generic_tools", "form"),
    [
        (TEMPLATE, False, None),
        (TEMPLATE, True, "generic"),
        (None, True, None),
        (TEMPLATE + "{# tools <tool_call> #}", True, "hermes"),
    ],
)
def test_the_tool_form_is_that_of_the_template_or_generic_where_allowed(
    template: str | None, generic_tools: bool, form: str | None
) -> None:
    assert codec_of(template=template, generic_tools=generic_tools).tool_form == form


def test_options_reach_the_template_and_may_not_replace_its_own_variables() -> None:
    codec = codec_of(template=TEMPLATE + "{{ mood }}{% if tools %}{{ tools | length }}{% endif %}")
    turn = [{"role": "user", "content": "go"}]
    text = "<|start|>user\ngo<|end|>\n"
    assert codec.reads_option("mood")
    assert not codec.reads_option("colour")
    assert codec.encode_chat(turn, options={"mood": "one"}) == codec.encode(text + "<|start|>assistant\none")
    assert codec.encode_chat(turn, begins_turn=False) == codec.encode(text)
    assert codec.encode_chat(turn, tools=[{}, {}], begins_turn=False) == codec.encode(text + "2")
    answer = [*turn, {"role": "assistant", "content": "stop"}]
    assert codec.encode_chat(answer, begins_turn=False, continues_last=True) == codec.encode(
        text + "<|start|>assistant\nstop"
    )
    for name in ("messages", "tools", "add_generation_prompt", "conversation"):
        with pytest.raises(InvalidRequest, match=f"must not hold '{name}'") as caught:
            codec.encode_chat(turn, options={"mood": "one", name: 1})
        assert caught.value.field == "chat_template_kwargs"


@pytest.mark.parametrize(
    "names",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ],
)
def test_infilling_in_the_tokens_of_each_family(names: tuple[str, str, str]) -> None:
    before, after, middle = names
    codec = codec_of(*names)
    assert codec.encode_infill(codec.encode("go"), "stop") == codec.encode(f"{before}go{after}stop{middle}")
    assert codec_of(*names[:2]).encode_infill((5,), "stop") is None


def test_a_tokenizer_without_a_fast_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="its tokenizer object has no fast"):
        TextCodec(object(), eos_token_ids=[])


def test_sizes_and_end_tokens() -> None:
    tokenizer = byte_level()
    codec = TextCodec(tokenizer, eos_token_ids=[7, 1, 7])
    assert codec.eos_token_ids == (1, 7)
    assert codec.vocab_size == len(tokenizer)
    assert codec.encode("a" * 1000) == codec.encode("a") * 1000 or len(codec.encode("a" * 1000)) > 100


def test_special_tokens_around_a_text_are_added_unless_the_caller_has_them() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 0)]
    )
    codec = TextCodec(tokenizer, eos_token_ids=[1])
    assert codec.encode("go") == (0, *codec.encode("go", add_special_tokens=False))
    assert codec.encode_chat([{"role": "user", "content": "go"}], begins_turn=False)[:2] != (0, 0)
