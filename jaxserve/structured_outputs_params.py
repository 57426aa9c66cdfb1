"""StructuredOutputsParams: the form that a request's output must have, checked as far as that needs no grammar.

Names and meanings are vLLM's. The form itself is compiled later (``jaxserve.structured_output``).
"""

from __future__ import annotations

import json as json_text
from typing import Any, cast

import msgspec

from jaxserve.errors import InvalidRequestError

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Of these a request names exactly one."""
MAX_SPEC_CHARACTERS = 1 << 18
"""Characters of a schema, regex, grammar, or of all choices together."""
MAX_NESTING = 64
"""Objects and arrays inside each other in a schema or structural tag."""
MAX_CHOICES = 4096


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Exactly one constraint on the output.

    Args:
        json: a JSON schema, as text or as a dict (kept as text). The output is one document that fits it.
        regex: a regular expression (Rust's syntax) that the whole output matches.
        choice: the output is one of these strings.
        grammar: a Lark or GBNF (EBNF) grammar; its rule ``start`` (GBNF: ``root``) is the output.
        json_object: any JSON object.
        structural_tag: free text in which tagged parts follow a schema; JSON text or a dict (kept as text):
            ``{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": […]}``.
        disable_any_whitespace: JSON without optional white space.
        disable_additional_properties: objects of the schema have only the properties that it lists, unless it says
            something about others.
        whitespace_pattern: a regular expression for the optional white space in JSON.
        param: how the request spelt this parameter: errors name it.

    Raises:
        InvalidRequestError: with the parameter's name.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    param: str = "structured_outputs"

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            named = f"{', '.join(given)} are given" if given else "none is given"
            raise InvalidRequestError(
                f"{self.param} needs exactly one of {', '.join(CONSTRAINTS)}; {named}.", param=self.param
            )
        if self.json is not None:
            self.json = self._json_text("json", self.json)
        if self.structural_tag is not None:
            self.structural_tag = self._json_text("structural_tag", self.structural_tag)
        self._check_texts()
        self._check_choice()
        self._check_options(given[0])

    @property
    def kind(self) -> str:
        """The name of the constraint given."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    @property
    def spec(self) -> str:
        """The constraint as text: with ``kind`` and the options it says all that the output depends on."""
        value = getattr(self, self.kind)
        return json_text.dumps(value) if isinstance(value, (list, bool)) else cast(str, value)

    def param_of(self, name: str) -> str:
        """How errors name ``name``: ``structured_outputs.json``, but just ``response_format``."""
        return f"{self.param}.{name}" if self.param == "structured_outputs" else self.param

    def _error(self, name: str, message: str) -> InvalidRequestError:
        param = self.param_of(name)
        return InvalidRequestError(f"{param} {message}", param=param)

    def _json_text(self, name: str, value: object) -> str:
        """A JSON object as compact text; keys stay in order, since properties are written in that order."""
        try:
            parsed: object = json_text.loads(value) if isinstance(value, str) else value
            text = json_text.dumps(parsed, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
            text.encode()
        except RecursionError:
            raise self._error(name, f"is nested deeper than {MAX_NESTING} levels.") from None
        except (TypeError, ValueError) as error:
            raise self._error(name, f"is not valid JSON: {str(error)[:200]}") from None
        if not isinstance(parsed, dict):
            raise self._error(name, f"must be a JSON object, got {text[:40]}.")
        if _nesting_exceeds(parsed, MAX_NESTING):
            raise self._error(name, f"is nested deeper than {MAX_NESTING} levels.")
        self._check_size(name, len(text))
        return text

    def _check_texts(self) -> None:
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is None:
                continue
            self._check_text(name, value)
            if name == "grammar" and not value.strip():
                raise self._error(name, "is empty: it describes no output.")
            if name == "regex" and not value:
                raise self._error(name, "is empty: the output could hold nothing.")

    def _check_text(self, name: str, value: object) -> None:
        if not isinstance(value, str):
            raise self._error(name, f"must be a string, got {str(value)[:40]!r}.")
        if "\0" in value:
            raise self._error(name, "holds a NUL character.")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self._error(name, "holds an unpaired surrogate: it is not valid Unicode.") from None
        self._check_size(name, len(value))

    def _check_size(self, name: str, num_characters: int) -> None:
        if num_characters > MAX_SPEC_CHARACTERS:
            raise self._error(
                name, f"has {num_characters} characters; at most {MAX_SPEC_CHARACTERS} are allowed."
            )

    def _check_choice(self) -> None:
        choices = cast(Any, self.choice)
        if choices is None:
            return
        if not isinstance(choices, (list, tuple)) or not choices:
            raise self._error("choice", "must be a list of at least one string.")
        if len(choices) > MAX_CHOICES:
            raise self._error("choice", f"has {len(choices)} entries; at most {MAX_CHOICES} are allowed.")
        for choice in choices:
            self._check_text("choice", choice)
            if not choice:
                raise self._error("choice", "holds an empty string.")
        self._check_size("choice", sum(map(len, choices)))
        self.choice = list(choices)

    def _check_options(self, kind: str) -> None:
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise self._error(name, f"must be true or false, got {str(value)[:40]!r}.")
        of_json = {"disable_any_whitespace": self.disable_any_whitespace,
                   "disable_additional_properties": self.disable_additional_properties,
                   "whitespace_pattern": self.whitespace_pattern is not None}  # fmt: skip
        for name, given in of_json.items():
            if given and kind not in ("json", "json_object"):
                raise self._error(name, f"applies to json and json_object, not to {kind}.")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise self._error("whitespace_pattern", "contradicts disable_any_whitespace; give one of them.")


def json_schema_output(schema: dict[str, Any], *, param: str) -> StructuredOutputsParams:
    """The constraint to one JSON document that fits ``schema``.

    Args:
        schema: a JSON schema.
        param: the request's parameter that brought it (``response_format``, ``text.format``, ``tools``): errors name
            it.

    Raises:
        InvalidRequestError: the schema is too large, too deep, or not JSON.
    """
    return StructuredOutputsParams(json=schema, param=param)


def _nesting_exceeds(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit + 1):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += cast("dict[str, object]", item).values()
            elif isinstance(item, list):
                inner += cast("list[object]", item)
        if not inner:
            return False
        level = inner
    return True
