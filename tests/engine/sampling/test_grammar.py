"""Every finished response matches its grammar, with every drafter and every schema.

SmolLM2 responds to schemas, patterns and lists through the whole engine; `jsonschema` validates. On a toy, the mask is
compared with the set of all texts in tests/engine/sampling/test_sampling.py; random schemas are in
tests/engine/sampling/test_json_schema.py.
"""

from __future__ import annotations

import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import xgrammar
from buffer_children import eventually
from byte_grammar import BYTE_VOCAB, END, allowed, byte_grammars
from cut_draft import cut_draft
from fakes import FixedPacer, RandomPacer, ToyEngine, ToyModel
from hypothesis import given, settings
from hypothesis import strategies as st
from local_engine import LocalEngine
from transformers import AutoTokenizer

from engine.checkpoint.store import resolve_model
from engine.core.drafter import NoDrafter
from engine.draft.first_of import FirstOf
from engine.draft.grammar import GrammarDrafter
from engine.errors import InvalidRequest
from engine.messages import GrammarKind, GrammarSpec, SamplingParams, Submit
from engine.sampling.grammar import Grammars, Matcher, validate_grammar
from engine.sampling.vocabulary import load_tokenizer_info


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "("),
        ("regex", "[a"),
        ("ebnf", "root ::= missing"),
        ("ebnf", "start ::= 'a"),
        ("choice", "[]"),
        ("choice", '["a", ""]'),
        ("choice", "nonsense"),
        ("json_schema", "{"),
        ("regex", "a" * (1 << 18)),
    ],
)
def test_what_is_no_grammar_is_refused(kind: GrammarKind, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{kind}: "):
        validate_grammar(GrammarSpec(kind=kind, text=text))


def test_each_kind_allows_what_it_says() -> None:
    grammars = byte_grammars()
    cases: list[tuple[GrammarSpec, list[str], list[str]]] = [
        (GrammarSpec(kind="json_object"), ["{}", '{"a": [1, null]}'], ["[]", "1", '"a"']),
        (GrammarSpec(kind="regex", text="[0-9]{3}|x"), ["123", "x"], ["12", "1234", ""]),
        (GrammarSpec(kind="ebnf", text='root ::= "a" root | "b"'), ["b", "aab"], ["a", "ba"]),
        (GrammarSpec(kind="choice", text='["a\\"b", "é\\n", "no"]'), ['a"b', "é\n", "no"], ["n", "nono"]),
    ]
    for spec, good, bad in cases:
        validate_grammar(spec)
        compiled = grammars.compile(spec)
        for text in good + bad:
            matcher = Matcher(compiled, ())
            ok = all(matcher.push(byte) for byte in text.encode()) and END in allowed(matcher)
            assert ok == (text in good), (spec, text)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_a_matcher_that_goes_back_is_where_it_was(seed: int) -> None:
    rng = random.Random(seed)
    spec = GrammarSpec(kind="ebnf", text='root ::= "[" (root ("," root)*)? "]" | "12" | "true"')
    matcher = Matcher(byte_grammars().compile(spec), (END, ord("2")))
    masks = [allowed(matcher)]
    for _ in range(60):
        if len(masks) > 1 and rng.random() < 0.4:
            matcher.pop()
            masks.pop()
        else:
            token = rng.choice(masks[-1]) if rng.random() < 0.9 else rng.randrange(END + 1)
            went_on = matcher.push(token)
            # Where no token is allowed, the mask has the stop tokens, since it must not be empty.
            is_dead_end = not matcher.is_complete and set(masks[-1]) == matcher.stop_token_ids
            assert went_on == (token in masks[-1]) or matcher.has_ended or is_dead_end
            if went_on:
                masks.append(allowed(matcher))
        assert allowed(matcher) == masks[-1]


def test_stop_tokens_are_possible_exactly_where_the_text_is_complete() -> None:
    compiled = byte_grammars().compile(GrammarSpec(kind="regex", text="ab*"))
    matcher = Matcher(compiled, (END, ord("b")))
    assert allowed(matcher) == [ord("a")]
    assert not matcher.push(END)
    assert matcher.push(ord("a"))
    assert allowed(matcher) == [ord("b"), END]
    assert allowed(matcher, forbid_stop=True) == [ord("b"), END], "nothing else is possible, so min_tokens gives way"
    assert matcher.push(ord("b"))
    assert matcher.has_ended


def test_compiled_grammars_are_kept_but_not_for_ever() -> None:
    grammars = byte_grammars(max_entries=2)
    specs = [GrammarSpec(kind="regex", text=text) for text in ("a", "b", "c")]
    first = grammars.compile(specs[0])
    assert grammars.compile(specs[0]) is first
    grammars.compile(specs[1])
    assert grammars.find(specs[0]) is first
    grammars.compile(specs[2])
    assert grammars.find(specs[1]) is None, "the one used longest ago has gone"
    assert grammars.find(specs[0]) is first


def test_polling_compiles_aside_and_tells_a_refusal() -> None:
    grammars = byte_grammars()

    def settled(spec: GrammarSpec) -> bool:
        try:
            return grammars.poll(spec) is not None
        except InvalidRequest as error:
            return "parenthesis" in str(error)

    for spec in (GrammarSpec(kind="regex", text="a+"), GrammarSpec(kind="regex", text="(")):
        assert eventually(lambda: settled(spec), 60)  # noqa: B023  called before the next turn
    with pytest.raises(InvalidRequest):
        grammars.poll(spec)


def test_the_longest_grammar() -> None:
    validate_grammar(GrammarSpec(kind="json_object", text=" " * 2**17))
    with pytest.raises(InvalidRequest, match="131073 characters given, at most 131072 are allowed"):
        validate_grammar(GrammarSpec(kind="json_object", text=" " * (2**17 + 1)))


@pytest.mark.parametrize(
    ("field", "start"), [(None, "json_schema: not well-formed: "), ("guided_json", "guided_json: not well-formed: ")]
)
def test_a_refusal_names_the_field_or_the_kind(field: str | None, start: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_grammar(GrammarSpec(kind="json_schema", text='{"type": {"a": 1}}'), field=field)
    assert caught.value.field == field
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize(("kind", "text"), [("regex", "(a{40}){40}"), ("ebnf", 'root ::= ("a"{40}){40}')])
def test_repetitions_inside_repetitions_are_bounded(kind: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{kind}: repetitions inside repetitions allow 1600 in total; at most"):
        validate_grammar(GrammarSpec(kind=kind, text=text))


def test_a_refusal_is_one_line_without_the_compiler_s_source_location() -> None:
    for kind, text in (("ebnf", "root ::= missing"), ("regex", "(")):
        with pytest.raises(InvalidRequest) as caught:
            validate_grammar(GrammarSpec(kind=kind, text=text), field="f")  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        assert ".cc" not in str(caught.value)
        assert not str(caught.value).startswith("f: [")


def test_strings_of_bounded_length_hold_no_raw_control_characters() -> None:
    for schema in ({"type": "string", "maxLength": 3}, {"type": "string"}):
        matcher = Matcher(byte_grammars().compile(GrammarSpec(kind="json_schema", text=json.dumps(schema))), ())
        assert matcher.push(ord('"'))
        tokens = allowed(matcher)
        assert ord("a") in tokens
        assert not any(token < 0x20 for token in tokens)


def test_a_refused_grammar_is_remembered_for_a_while_and_compiled_once() -> None:
    grammars = byte_grammars(max_entries=1)
    bad = [GrammarSpec(kind="regex", text=text) for text in ("(", "[")]

    def is_refused(spec: GrammarSpec) -> bool:
        try:
            return grammars.poll(spec) is not None
        except InvalidRequest:
            return True

    assert not is_refused(bad[0]), "it is compiled in the background"
    assert eventually(lambda: is_refused(bad[0]), 60)
    assert eventually(lambda: is_refused(bad[1]), 60)
    assert not is_refused(bad[0]), "only one refusal is kept"


def test_a_grammar_that_is_polled_twice_is_compiled_once() -> None:
    grammars = HeldGrammars()
    spec = GrammarSpec(kind="regex", text="a")
    assert grammars.poll(spec) is None
    assert grammars.poll(spec) is None
    grammars.go.set()
    assert eventually(lambda: grammars.poll(spec) is not None, 60)
    assert grammars.num_compiled == 1


def test_a_failure_of_any_kind_refuses_the_grammar_that_waits() -> None:
    def load() -> xgrammar.TokenizerInfo:
        raise OSError("no such disk")

    grammars = Grammars(load)
    found: list[InvalidRequest | None] = []
    grammars.prepare(GrammarSpec(kind="regex", text="a"), found.append)
    grammars.prepare(GrammarSpec(kind="regex", text="("), found.append)
    assert eventually(lambda: len(found) == 2, 60)
    assert [str(error).partition(":")[0] for error in found] == ["regex", "regex"]
    assert str(found[0]) == "regex: OSError: no such disk"


def test_without_stop_tokens_those_of_the_tokenizer_end_a_text() -> None:
    compiled = byte_grammars().compile(GrammarSpec(kind="regex", text="a"))
    assert Matcher(compiled, (5, 0)).stop_token_ids == {0, 5}
    matcher = Matcher(compiled, ())
    assert matcher.stop_token_ids == {END}
    assert matcher.num_words == -(-(END + 1) // 32)


def test_an_ended_text_allows_stop_tokens_only_and_can_go_back() -> None:
    matcher = Matcher(byte_grammars().compile(GrammarSpec(kind="regex", text="a")), (END,))
    assert not matcher.is_complete
    assert matcher.push(ord("a"))
    assert matcher.is_complete
    assert matcher.push(END)
    assert (matcher.has_ended, matcher.is_complete, matcher.push(END), allowed(matcher)) == (True, True, False, [END])
    matcher.pop()
    assert not matcher.has_ended
    matcher.pop()
    assert allowed(matcher) == [ord("a")]


def test_a_mask_has_every_byte_that_may_begin_a_character_and_nothing_beyond_the_vocabulary() -> None:
    matcher = Matcher(byte_grammars().compile(GrammarSpec(kind="regex", text="[^a]{1,3}")), (END,))
    tokens = allowed(matcher)
    assert ord("a") not in tokens
    assert {0x20, 0x7E, 0xC3, 0xE4, 0xF0, 0xF4} <= set(tokens)
    assert max(tokens) <= END


def test_foreseen_tokens_are_those_that_the_grammar_forces() -> None:
    compiled = byte_grammars().compile(GrammarSpec(kind="regex", text="xyz[ab]"))
    matcher = Matcher(compiled, (END,))
    forced = tuple(b"xyz")
    assert [matcher.foreseen(most) for most in (0, 1, 2, 3, 9)] == [forced[:most] for most in (0, 1, 2, 3, 3)]
    for token in (*b"xyza",):
        assert matcher.push(token)
    assert matcher.foreseen(9) == ()


# Through the loop.


def byte_engine(pacer: FixedPacer | RandomPacer, grammars: Grammars | None, **limits: int) -> ToyEngine:
    target = ToyModel(vocab_size=END + 1, order=1, num_blocks=200, block_size=8)
    return ToyEngine(
        target,
        FirstOf(GrammarDrafter(), NoDrafter(), source="grammar"),
        pacer,
        num_blocks=200,
        max_model_len=400,
        grammars=grammars,
        **limits,
    )


def test_forced_tokens_are_drafted_for_free() -> None:
    schema = {"type": "object", "properties": {"first_name": {"const": "Ada"}, "year": {"enum": [1815]}}}
    schema["required"] = list(schema["properties"])
    spec = GrammarSpec(kind="json_schema", text=json.dumps(schema))
    steps, texts = [], []
    for k in (0, 4):
        pacer = FixedPacer(k)
        engine = byte_engine(pacer, byte_grammars())
        sampling = SamplingParams(temperature=0.0, max_tokens=100, grammar=spec)
        tokens = engine.run([Submit(request_id="r", prompt=(1,), sampling=sampling)])["r"]
        last = engine.deltas["r"][-1]
        assert last.finish_reason == "stop"
        texts.append(json.loads(b"".join(BYTE_VOCAB[token] for token in tokens)))
        steps.append(len(pacer.stats))
    assert texts == [{"first_name": "Ada", "year": 1815}] * 2
    assert steps[1] < 0.7 * steps[0]


def test_a_bad_grammar_ends_its_own_request_only() -> None:
    engine = byte_engine(FixedPacer(2), byte_grammars())
    plain = SamplingParams(temperature=0.0, max_tokens=8)
    bad = SamplingParams(temperature=0.0, max_tokens=8, grammar=GrammarSpec(kind="regex", text="("))
    engine.run([Submit(request_id=name, prompt=(1,), sampling=s) for name, s in (("ok", plain), ("bad", bad))])
    assert [delta.finish_reason for delta in engine.deltas["bad"]] == ["error"]
    assert "parenthesis" in (engine.deltas["bad"][0].error or "")
    assert len(engine.tokens_of("ok")) == 8
    no_tokenizer = byte_engine(FixedPacer(2), None)
    no_tokenizer.run([Submit(request_id="r", prompt=(1,), sampling=bad)])
    assert "no tokenizer" in (no_tokenizer.deltas["r"][0].error or "")


class HeldGrammars(Grammars):
    """Compiles only after `go` is set."""

    def __init__(self) -> None:
        super().__init__(lambda: xgrammar.TokenizerInfo(BYTE_VOCAB, vocab_size=END + 1, stop_token_ids=[END]))
        self.go = threading.Event()
        self.num_compiled = 0

    def compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        assert self.go.wait(60)
        self.num_compiled += 1
        return super().compile(spec)


def test_compiling_holds_nobody_up_and_can_be_aborted() -> None:
    grammars = HeldGrammars()
    engine = byte_engine(FixedPacer(0), grammars)
    spec = GrammarSpec(kind="regex", text="[ab]{3}")
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    guided = SamplingParams(temperature=0.0, max_tokens=8, grammar=spec)
    for name, s in (("guided", guided), ("aborted", guided), ("plain", sampling)):
        engine.engine.submit(Submit(request_id=name, prompt=(1,), sampling=s))
    engine.engine.abort("aborted")
    for _ in range(8):
        engine.step()
    assert len(engine.tokens_of("plain")) == 8
    assert [delta.finish_reason for delta in engine.deltas["aborted"]] == ["abort"]
    assert "guided" not in engine.deltas
    grammars.go.set()
    engine.run([])
    assert len(engine.deltas["aborted"]) == 1
    assert re.fullmatch(rb"[ab]{3}", b"".join(BYTE_VOCAB[token] for token in engine.tokens_of("guided")))


# With a model.

SCHEMAS: list[Any] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
    },
    {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}, "minItems": 2, "maxItems": 3},
    {
        "$defs": {
            "pair": {
                "type": "object",
                "properties": {"k": {"type": "string", "maxLength": 5}, "v": {"type": "boolean"}},
                "required": ["k", "v"],
            }
        },
        "type": "object",
        "properties": {
            "left": {"$ref": "#/$defs/pair"},
            "right": {"anyOf": [{"$ref": "#/$defs/pair"}, {"type": "null"}]},
        },
        "required": ["left", "right"],
    },
    {"type": "string", "format": "date"},
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2")


def test_special_tokens_never_spell_text(folder: Path) -> None:
    grammars = Grammars(lambda: load_tokenizer_info(folder, 49152, (2,)))
    matcher = Matcher(grammars.compile(GrammarSpec(kind="regex", text="[^x]*")), (2,))
    tokens = allowed(matcher)
    assert len(tokens) > 40_000
    assert set(range(17)) & set(tokens) == {2}


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_smollm2_answers_as_its_grammar_says(method: str, folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tuple(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Describe a person as data."}], add_generation_prompt=True, return_dict=False
        )
    )
    specs = [GrammarSpec(kind="json_schema", text=json.dumps(schema)) for schema in SCHEMAS]
    specs += [
        GrammarSpec(kind="regex", text="[A-Z][a-z]{2,6}( [A-Z][a-z]{2,6})?"),
        GrammarSpec(kind="choice", text='["yes, certainly", "no", "perhaps"]'),
    ]
    submits = [
        Submit(
            request_id=f"{index}/{temperature}",
            prompt=prompt,
            sampling=SamplingParams(
                temperature=temperature, top_p=0.95, max_tokens=90, seed=index, stop_token_ids=(2,), grammar=spec
            ),
        )
        for index, spec in enumerate(specs)
        for temperature in (0.0, 1.0)
    ]
    draft_folder = cut_draft(folder, tmp_path / "draft") if method == "draft_model" else None
    speculative = {"none": {"method": "none"}, "ngram": {"method": "ngram"}, "draft_model": {}}[method]
    pacer = RandomPacer(4, max_k=0 if method == "none" else 5)
    with LocalEngine(folder, draft_folder=draft_folder, pacer=pacer, speculative=speculative) as engine:
        result = engine.generate(submits)
        finished = [s for s in submits if engine.last[s.request_id].finish_reason == "stop"]
        assert all(engine.last[s.request_id].finish_reason in ("stop", "length") for s in submits)
        if method != "none":
            assert sum(stats.num_accepted for stats in engine.stats) > 20
    assert len(finished) >= len(submits) // 2
    for submit in finished:
        text = tokenizer.decode(result[submit.request_id][:-1])
        spec = submit.sampling.grammar
        assert spec is not None
        if spec.kind == "json_schema":
            jsonschema.validate(json.loads(text), json.loads(spec.text), cls=jsonschema.Draft202012Validator)
        elif spec.kind == "regex":
            assert re.fullmatch(spec.text, text)
        else:
            assert text in json.loads(spec.text)
