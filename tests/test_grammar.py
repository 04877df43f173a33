"""Answers match what was asked for: every finished one, whatever drafts it and however the schema looks.

Random schemas are walked token by token with random choices on a vocabulary of bytes and words, and answered by
SmolLM2 through the whole engine; `jsonschema` judges. On a toy, the mask is compared with the set of all texts in
tests/test_sampling.py.
"""

from __future__ import annotations

import codecs
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import xgrammar
from cut_draft import cut_draft
from fakes import FixedPacer, RandomPacer, ToyEngine, ToyModel
from hypothesis import given, settings
from hypothesis import strategies as st
from local_engine import LocalEngine
from transformers import AutoTokenizer

from engine.drafter import NoDrafter
from engine.drafters.forced import ForcedDrafter
from engine.errors import InvalidRequest
from engine.grammar import Grammars, Matcher, validate_grammar
from engine.model_store import resolve_model
from engine.request import GrammarKind, GrammarSpec, SamplingParams, Submit
from engine.tokenizer_info import load_tokenizer_info

WORDS = ['{"', '":', '", "', '"}', "name", "12", ", ", "true", "null", '\\"', "\\u00", "é", "[]", "{}", '"a']
BYTE_VOCAB = [bytes([i]) for i in range(256)] + [word.encode() for word in WORDS] + [b""]
END = len(BYTE_VOCAB) - 1


def byte_grammars(**options: Any) -> Grammars:
    return Grammars(lambda: xgrammar.TokenizerInfo(BYTE_VOCAB, vocab_size=END + 1, stop_token_ids=[END]), **options)


def allowed(matcher: Matcher, *, forbid_stop: bool = False) -> list[int]:
    mask = torch.zeros(1, matcher.num_words, dtype=torch.int32)
    matcher.fill(mask, 0, forbid_stop=forbid_stop)
    bits = (mask[0].unsqueeze(-1) >> torch.arange(32)) & 1
    tokens: list[int] = bits.flatten().nonzero().flatten().tolist()
    return tokens


def walk(matcher: Matcher, rng: random.Random, most: int) -> str | None:
    """A text of random choices that are UTF-8; None when it is not complete after `most` tokens."""
    text = b""
    for _ in range(most):
        tokens = [token for token in allowed(matcher) if token == END or _is_utf8(text + BYTE_VOCAB[token])]
        if not tokens:
            return None
        # Ends are taken when they are offered, or most texts of an open schema would never end.
        closing = [token for token in tokens if token == END or BYTE_VOCAB[token] in (b'"', b"}", b"]", b'"}')]
        token = rng.choice(closing if closing and rng.random() < 0.6 else tokens)
        assert matcher.push(token)
        if token == END:
            return text.decode()
        text += BYTE_VOCAB[token]
    return None


def _is_utf8(text: bytes) -> bool:
    """Whether it is the beginning of some text."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text)
    except UnicodeDecodeError:
        return False
    return True


names = st.sampled_from(["a", "b", "name", "é", "long name", 'q"'])


def schemas() -> st.SearchStrategy[Any]:
    """Of the kind that is promised, all keywords of it."""
    number = st.integers(-20, 20)
    ordered = st.tuples(number, number).map(sorted)
    small = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted)
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.just({"type": ["integer", "null"]}),
        ordered.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[1]}),
        number.map(lambda b: {"type": "integer", "exclusiveMinimum": b}),
        st.integers(1, 9).map(lambda b: {"type": "integer", "multipleOf": b}),
        ordered.map(lambda b: {"type": "number", "minimum": b[0], "maximum": b[1] + 1}),
        number.map(lambda b: {"type": "number", "exclusiveMaximum": b}),
        small.map(lambda b: {"type": "string", "minLength": b[0], "maxLength": b[1]}),
        st.sampled_from(["^a+b?$", "^[0-9]{2,4}$", "^(foo|bar)$", '^[^"\\\\]{1,3}$', "^.x$"]).map(
            lambda p: {"type": "string", "pattern": p}
        ),
        st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(
            lambda f: {"type": "string", "format": f}
        ),
        st.lists(st.one_of(number, names, st.booleans(), st.none()), min_size=1, max_size=3).map(lambda v: {"enum": v}),
        st.one_of(number, names, st.just([1, "x"]), st.just({"k": 1.5})).map(lambda v: {"const": v}),
    )

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        properties = st.dictionaries(names, inner, min_size=1, max_size=3)
        return st.one_of(
            st.tuples(properties, st.data()).map(lambda p: _object(p[0])),
            properties.map(lambda p: {"type": "object", "properties": p, "additionalProperties": False}),
            inner.map(lambda s: {"type": "object", "additionalProperties": s, "maxProperties": 2}),
            inner.map(lambda s: {"type": "object", "patternProperties": {"^x[a-z]$": s}}),
            st.tuples(inner, small).map(
                lambda p: {"type": "array", "items": p[0], "minItems": p[1][0], "maxItems": p[1][1]}
            ),
            st.lists(inner, min_size=1, max_size=2).map(
                lambda p: {"type": "array", "prefixItems": p, "items": False, "minItems": len(p)}
            ),
            st.lists(inner, min_size=1, max_size=3).map(lambda p: {"anyOf": p}),
            inner.map(lambda s: {"allOf": [s]}),
            inner.map(lambda s: {"$defs": {"s": s}, "type": "array", "items": {"$ref": "#/$defs/s"}, "maxItems": 2}),
        )

    return st.recursive(leaves, grow, max_leaves=6)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": sorted(properties)[: 1 + len(properties) // 2]}


def _rooted(schema: Any) -> Any:
    """Definitions belong at the root, where references look for them."""
    return json.loads(re.sub(r'"\$ref": "#/\$defs/s"', '"type": "boolean"', json.dumps(schema)))


@settings(max_examples=250, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_every_text_that_ends_is_valid_under_its_schema(schema: Any, seed: int) -> None:
    schema = _rooted(schema)
    rng = random.Random(seed)
    compiled = byte_grammars().compile(GrammarSpec(kind="json_schema", text=json.dumps(schema)))
    for _ in range(3):
        text = walk(Matcher(compiled, ()), rng, 300)
        if text is not None:
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, r"\$.uniqueItems: is not supported"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, r"\$.properties.a.not: is not supported"),
        ({"if": {}, "then": {}}, r"\$.if: is not supported"),
        ({"minimum": 3}, r"\$.minimum: needs a matching type"),
        ({"type": "string", "minimum": 3}, r"\$.minimum: needs a matching type"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern together with maxLength"),
        ({"type": "string", "pattern": 'a"b'}, "pattern: '\"' is not supported"),
        ({"type": "string", "pattern": "^[a-z]+\\n$"}, "is not supported outside of"),
        ({"type": "string", "pattern": "a(?=b)"}, "is not supported outside of"),
        ({"type": "string", "format": "colour"}, "'colour' given, allowed are date"),
        ({"type": "objec"}, "'objec' given, allowed are integer"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3, "type": "integer"}]}, "2 schemas given, allowed is 1"),
        ({"anyOf": [{"type": "integer"}], "minimum": 3}, "minimum beside anyOf cannot be enforced"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may overlap"),
        ({"type": "string", "enum": ["a", 1]}, "type beside enum"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "'a' is not among the properties"),
        ({"type": "object", "minProperties": 2}, "minProperties: needs properties"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "integer", "minimum": "three"}, "must be a number"),
        ({"type": {"a": 1}}, "not well-formed"),
        ([], r"\$: \[\] given"),
    ],
)
def test_a_schema_that_cannot_be_promised_is_refused_with_the_place(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        validate_grammar(GrammarSpec(kind="json_schema", text=json.dumps(schema)), field="response_format")
    assert caught.value.field == "response_format"
    assert str(caught.value).startswith("response_format: ")


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


@settings(max_examples=60, deadline=None)
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
            # Where no token can stand the mask names the stop tokens, for want of others.
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
    good, bad = GrammarSpec(kind="regex", text="a+"), GrammarSpec(kind="regex", text="(")
    deadline = time.monotonic() + 10
    while grammars.poll(good) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    grammars.poll(bad)
    grammars.compile(good)  # waits for the one before
    time.sleep(0.05)
    with pytest.raises(InvalidRequest, match="parenthesis"):
        grammars.poll(bad)


# Through the loop.


def byte_engine(pacer: FixedPacer | RandomPacer, grammars: Grammars | None, **limits: int) -> ToyEngine:
    target = ToyModel(vocab_size=END + 1, order=1, num_blocks=200, block_size=8)
    return ToyEngine(
        target, ForcedDrafter(NoDrafter()), pacer, num_blocks=200, max_model_len=400, grammars=grammars, **limits
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


class SlowGrammars(Grammars):
    def compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        time.sleep(0.2)
        return super().compile(spec)


def test_compiling_holds_nobody_up_and_can_be_aborted() -> None:
    grammars = SlowGrammars(lambda: xgrammar.TokenizerInfo(BYTE_VOCAB, vocab_size=END + 1, stop_token_ids=[END]))
    engine = byte_engine(FixedPacer(0), grammars)
    spec = GrammarSpec(kind="regex", text="[ab]{3}")
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    guided = SamplingParams(temperature=0.0, max_tokens=8, grammar=spec)
    for name, s in (("guided", guided), ("aborted", guided), ("plain", sampling)):
        engine.engine.submit(Submit(request_id=name, prompt=(1,), sampling=s))
    engine.engine.abort("aborted")
    begin = time.monotonic()
    for _ in range(8):
        engine.step()
    assert time.monotonic() - begin < 0.15
    assert len(engine.tokens_of("plain")) == 8
    assert [delta.finish_reason for delta in engine.deltas["aborted"]] == ["abort"]
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
    grammars = Grammars(lambda: load_tokenizer_info(folder, 49152))
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
