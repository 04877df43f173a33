"""Structured output: which grammar a request sets, its limits, and whether it can be enforced.

Owns the fields that set one (`response_format`, `structured_outputs`, `guided_*`), of which a request may use one, and
grammars that begin after the model's thoughts. Parsing is behind `CheckGrammar`: it takes milliseconds and may ask
another process, so a check belongs in a thread. Does not know how the engine applies a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from deployments.openai.fields import Body, field_error, value_error
from deployments.text.reasoning import END_THINK, THINK
from engine.errors import InvalidRequest
from engine.messages import CheckGrammar, GrammarKind, GrammarSpec

MAX_GRAMMAR_LEN = 65_536
"""Most characters of a schema, EBNF or list of choices."""
MAX_REGEX_LEN = 4096
MAX_CHOICE_STRINGS = 256
MAX_DEPTH = 64
"""Deepest nesting of brackets in a schema's JSON."""


_CLOSED = f'thought partial* "{END_THINK}" [ \\t\\r\\n]{{0,4}}'
_THOUGHT_RULES = (
    "thought ::= ([^<] | partial* ended)*\n"
    f"partial ::= {' | '.join(json.dumps(END_THINK[:n]) for n in range(1, len(END_THINK)))}\n"
    f"ended ::= {' | '.join(f'{json.dumps(END_THINK[:n])} [^<{END_THINK[n]}]' for n in range(1, len(END_THINK)))}\n"
)
"""Text without END_THINK: each beginning of END_THINK is followed by another beginning or by a wrong character."""


class JsonSchemaFormat(Body):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None
    """It changes nothing: the schema is always enforced."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_fits_the_type(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            needed = "is required with" if self.type == "json_schema" else "is only allowed with"
            raise field_error("json_schema", f"{needed} type 'json_schema'")
        return self


def _parse_guided_json(value: Any) -> str | None:
    """A schema, as an object or as JSON text."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise value_error("must be a JSON Schema, as an object or as its JSON text")
    return json.dumps(value, ensure_ascii=False)


def _parse_choice(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise value_error("must be a list of non-empty strings")
    if not 1 <= len(value) <= MAX_CHOICE_STRINGS:
        raise value_error(f"holds {len(value)} strings; allowed are 1 to {MAX_CHOICE_STRINGS}")
    return tuple(dict.fromkeys(value))


GuidedJson = Annotated[
    str | None, PlainValidator(_parse_guided_json), WithJsonSchema({"type": ["object", "string", "null"]})
]
GuidedChoice = Annotated[
    tuple[str, ...] | None,
    PlainValidator(_parse_choice),
    WithJsonSchema(
        {
            "type": ["array", "null"],
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": MAX_CHOICE_STRINGS,
        }
    ),
]
GuidedText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LEN)]


class StructuredOutputs(Body):
    """One grammar, under the names of vLLM's newer interface."""

    json_: Annotated[GuidedJson, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX_LEN)] | None = None
    choice: GuidedChoice = None
    grammar: GuidedText | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _has_one_grammar(self) -> Self:
        names = [field for field, _ in self.grammars()]
        if len(names) != 1:
            raise value_error("must have exactly one of json, regex, choice, grammar and json_object")
        return self

    def grammars(self) -> Iterator[tuple[str, GrammarSpec]]:
        """Each grammar that is set, with the name of its field."""
        if self.json_ is not None:
            yield "structured_outputs.json", GrammarSpec(kind="json_schema", text=self.json_)
        if self.regex is not None:
            yield "structured_outputs.regex", GrammarSpec(kind="regex", text=self.regex)
        if self.grammar is not None:
            yield "structured_outputs.grammar", GrammarSpec(kind="ebnf", text=self.grammar)
        if self.choice is not None:
            text = json.dumps(self.choice, ensure_ascii=False)
            yield "structured_outputs.choice", GrammarSpec(kind="choice", text=text)
        if self.json_object:
            yield "structured_outputs.json_object", GrammarSpec(kind="json_object")


class GuidedFields(Body):
    """Structured output under vLLM's names, for both generation routes."""

    structured_outputs: StructuredOutputs | None = None

    guided_json: GuidedJson = None
    guided_regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX_LEN)] | None = None
    guided_grammar: GuidedText | None = None
    """EBNF whose start rule is `root`."""
    guided_choice: GuidedChoice = None

    def grammars(self) -> Iterator[tuple[str, GrammarSpec]]:
        """Each grammar that is set, with the name of its field."""
        if self.structured_outputs is not None:
            yield from self.structured_outputs.grammars()
        if self.guided_json is not None:
            yield "guided_json", GrammarSpec(kind="json_schema", text=self.guided_json)
        kinds: tuple[tuple[str, GrammarKind], ...] = (("guided_regex", "regex"), ("guided_grammar", "ebnf"))
        for field, kind in kinds:
            text = getattr(self, field)
            if text is not None:
                yield field, GrammarSpec(kind=kind, text=text)
        if self.guided_choice is not None:
            yield "guided_choice", GrammarSpec(kind="choice", text=json.dumps(self.guided_choice, ensure_ascii=False))


def response_grammar(response_format: ResponseFormat | None) -> GrammarSpec | None:
    """The grammar of a `response_format`; None for plain text."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None:
        return GrammarSpec(kind="json_object")
    return GrammarSpec(kind="json_schema", text=json.dumps(response_format.json_schema.schema_, ensure_ascii=False))


def check_grammar(spec: GrammarSpec, field: str, check: CheckGrammar) -> str:
    """Refuse a grammar that is too large or too deep, does not parse, or cannot be enforced exactly.

    Args:
        spec: the grammar.
        field: name of the request's field that sets it.
        check: the engine's check.

    Returns:
        The grammar in EBNF.

    Raises:
        EngineUnavailable: there is no engine to check it.
        InvalidRequest: naming `field`.
    """
    if len(spec.text) > MAX_GRAMMAR_LEN:
        raise InvalidRequest(
            f"{field} has {len(spec.text)} characters; at most {MAX_GRAMMAR_LEN} are allowed", field=field
        )
    if spec.kind == "json_schema" and _depth(spec.text) > MAX_DEPTH:
        raise InvalidRequest(f"{field} is nested deeper than {MAX_DEPTH} levels", field=field)
    found = check(spec)
    if found.problem is not None:
        raise InvalidRequest(f"{field}: {found.problem}", field=field)
    return found.ebnf


def after_thoughts(spec: GrammarSpec, *, is_open: bool, check: CheckGrammar) -> GrammarSpec:
    """A grammar whose text may follow the model's thoughts.

    Args:
        spec: grammar of the text, checked.
        is_open: the prompt has begun the thoughts, so the response continues and closes them.
        check: the engine's check, which also combines grammars.
    """
    rules = f"root ::= {_CLOSED}\n" if is_open else f'root ::= "" | "{THINK}" {_CLOSED}\n'
    return GrammarSpec(kind="ebnf", text=check(spec, rules + _THOUGHT_RULES).ebnf)


def _depth(text: str) -> int:
    """How deep brackets are nested in JSON text. Brackets in strings count too, so the result may be too high."""
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest
