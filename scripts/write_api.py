"""Write docs/api.md, the endpoints and the fields of their requests, from the request classes.

python scripts/write_api.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel  # noqa: E402

from jaxserve.sampling_params import SamplingParams  # noqa: E402
from jaxserve.server.anthropic.requests import UNSUPPORTED as NOT_IN_MESSAGES  # noqa: E402
from jaxserve.server.anthropic.requests import MessageRequest  # noqa: E402
from jaxserve.server.openai.generate import GenerateRequest  # noqa: E402
from jaxserve.server.openai.requests import ChatCompletionRequest, CompletionRequest  # noqa: E402
from jaxserve.server.openai.responses_api.requests import UNSUPPORTED as NOT_IN_RESPONSES  # noqa: E402
from jaxserve.server.openai.responses_api.requests import ResponseRequest  # noqa: E402
from jaxserve.server.openai.tokenize import DetokenizeRequest, TokenizeRequest  # noqa: E402
from jaxserve.server.openai.unsupported import UNSUPPORTED  # noqa: E402

HEAD = """# HTTP API

Written by `python scripts/write_api.py` from the request classes; do not edit it by hand. `/docs` of a running server
shows the same as OpenAPI.

A field is *honoured*, *accepted* (it is for a provider's bookkeeping and changes nothing about generation), or
*refused* by name with 400 unless its value asks for nothing. Unknown fields are refused too. Null is not given.
Defaults: the request's value, then `--override-generation-config`, then the model's `generation_config.json`, then
OpenAI's.

## Endpoints

| path | what it does |
|---|---|
| `POST /v1/chat/completions` | answers a conversation |
| `POST /v1/chat/completions/batch` | answers several (`messages` is a list of conversations); choices are numbered on |
| `POST /v1/completions` | completes one prompt or several: text or token ids |
| `POST /v1/responses` | OpenAI's responses: text or items in, items out, streamed or in the background |
| `GET` or `DELETE /v1/responses/{id}`, `POST …/cancel`, `GET …/input_items` | a stored response |
| `POST /v1/messages`, `POST /v1/messages/count_tokens` | Anthropic's protocol |
| `POST /inference/v1/generate` | token ids in, token ids out |
| `POST /invocations` | one of chat, completions and generate, by the body's shape (SageMaker) |
| `POST /tokenize`, `POST /detokenize` | text or messages to token ids and back |
| `GET /v1/models`, `GET /v1/models/{name}` | the names under which the model is served |
| `GET /health`, `GET` or `POST /ping` | 200 while the engine lives, else 503; open without an API key |
| `GET /metrics`, `GET /version`, `GET /load` | for operators |
| `POST /start_profile`, `POST /stop_profile` | a JAX profile of the engine, into its `--profiler-dir` |
| `GET /server_info`, `POST /reset_prefix_cache` | in development mode only (`--enable-dev-mode`) |

`jaxserve run-batch -i in.jsonl -o out.jsonl` answers OpenAI batch files (chat and completions) without a server.

Errors are `{"error": {"message", "type", "param", "code"}}` with `code` the HTTP status: 400 wrong or refused, 401 no
key, 404 unknown model or path, 413 body too large, 500 a step failed, 503 queue full (with `Retry-After`), shutting
down or engine dead. An error after a stream began is its last event before `[DONE]`. On Anthropic's paths errors are
`{"type": "error", "error": {"type", "message"}, "request_id"}`. A key comes as `Authorization: Bearer` or `X-API-Key`.

With `use_beam_search` the `n` most likely outputs are found as transformers' `generate(num_beams=n)` finds them. Beside
it only `n`, `max_tokens`, `length_penalty`, `ignore_eos`, `logprobs`, `truncate_prompt_tokens`, `truncation_side`,
`skip_special_tokens` and `include_stop_str_in_output` count; others are refused.

"""
BOOKKEEPING = frozenset(
    {
        "user", "metadata", "store", "service_tier", "session_id", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "cache_control", "max_tool_calls",
    }
)  # fmt: skip
MEANINGS = {
    "add_generation_prompt": "end the prompt with what begins the assistant's answer (default true)",
    "add_special_tokens": "let the tokenizer add its special tokens (default: completions true, chat false)",
    "cache_salt": "separates prefix cache entries; 1 to 128 characters",
    "chat_template": "a template instead of the model's; needs `--trust-request-chat-template`",
    "chat_template_kwargs": "further variables of the template",
    "continue_final_message": "go on with the last message",
    "documents": "documents for the template",
    "echo": "begin the answer with the prompt (chat: with the message that is continued)",
    "include_reasoning": "send the reasoning (default true)",
    "length_penalty": "beam search: scores are divided by length to this power",
    "logprobs": "log probabilities: a number (completions), whether at all (chat)",
    "max_completion_tokens": "output tokens at most; wins over max_tokens",
    "max_tokens": "output tokens at most (default: completions 16, chat the rest of the context)",
    "messages": "the conversation, or for /tokenize one to render",
    "model": "one of the served names; default: the first",
    "parallel_tool_calls": "false allows one call at most",
    "priority": "lower runs first, with `--scheduling-policy priority`",
    "prompt": "text, token ids, or a list of either (1,024 at most)",
    "reasoning_effort": "how much to think, for templates that take it; none switches thinking off where possible",
    "request_id": "part of the answer's id",
    "response_format": "text, json_object, json_schema or structural_tag",
    "return_prompt_text": "send the rendered prompt as `prompt_text` (not streamed)",
    "return_token_ids": "send token ids of prompt and output",
    "return_token_strs": "send the tokens' texts too",
    "return_tokens_as_token_ids": "spell tokens in logprobs as `token_id:5`",
    "sampling_params": "the sampling fields below",
    "stream": "send events as tokens come",
    "stream_options": "include_usage, continuous_usage_stats",
    "thinking_token_budget": "tokens of reasoning at most",
    "token_ids": "the prompt",
    "tokens": "token ids",
    "tool_choice": "none, auto, required or a named function",
    "tools": "functions that the model may call",
    "top_logprobs": "most likely tokens listed at each position (`--max-logprobs` at most)",
    "use_beam_search": "find the `n` most likely outputs",
}
"""Of the fields that are no sampling parameters."""
IN_RESPONSES = {
    "background": "answer later: poll, stream or cancel it by its id",
    "include": "`message.output_text.logprobs`; others are refused",
    "input": "text, or items: message (text parts), function_call, function_call_output, reasoning, item_reference",
    "instructions": "a system message before everything; not part of what a later response goes on from",
    "max_output_tokens": "output tokens at most (default: the rest of the context)",
    "metadata": "returned with the response; 16 pairs at most",
    "previous_response_id": "go on from a stored response",
    "reasoning": "effort; a summary is never made (`auto` is accepted, others are refused)",
    "request_id": "the response's id is `resp_` and this",
    "store": "keep the response (default true, see `--response-store-bytes` and `--response-store-ttl`)",
    "stream_options": "include_obfuscation: only false",
    "text": "format: text, json_object or json_schema; verbosity: only medium",
    "tool_choice": "none, auto, required, a function, or allowed_tools",
    "tools": "functions; tools that run on OpenAI's servers are refused",
    "top_logprobs": "most likely tokens listed at each position, 0 to 20",
    "truncation": "only disabled: a prompt that is too long is an error",
}
IN_MESSAGES = {
    "max_tokens": "output tokens at most; required",
    "messages": "blocks of the types text, tool_use, tool_result and thinking; a last message of the assistant's is"
    " the beginning of the answer",
    "output_config": "effort, and format json_schema",
    "request_id": "the message's id is `msg_` and this",
    "stop_sequences": "strings that end the output",
    "system": "text, or text blocks",
    "thinking": "enabled (with budget_tokens), adaptive or disabled; display omitted leaves the blocks out",
    "tool_choice": "auto, any, tool or none, with disable_parallel_tool_use",
    "tools": "custom tools; tools that run on Anthropic's servers are refused",
}


def sampling_meanings() -> dict[str, str]:
    """The meanings that SamplingParams' docstring gives."""
    entries = re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", SamplingParams.__doc__ or "", re.MULTILINE)
    entries += re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", SamplingParams.__doc__ or "", re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for name, text in entries}


def field_table(model: type[BaseModel], unsupported: Mapping[str, object], own: Mapping[str, str]) -> str:
    """All fields of a request class, and those that it refuses; ``own`` are meanings that others do not share."""
    known = {**sampling_meanings(), **MEANINGS, **own}
    rows = ["| field | | meaning |", "|---|---|---|"]
    for name in sorted({*model.model_fields, *unsupported}):
        if name not in model.model_fields:
            rows.append(f"| `{name}` | refused | |")
        elif name in BOOKKEEPING and name not in own:
            rows.append(f"| `{name}` | accepted | |")
        else:
            rows.append(f"| `{name}` | honoured | {known[name].replace('|', BAR)} |")
    return "\n".join(rows)


BAR = "\\|"
TABLES: list[tuple[str, type[BaseModel], Mapping[str, object], Mapping[str, str]]] = [
    ("POST /v1/chat/completions", ChatCompletionRequest, UNSUPPORTED, {}),
    ("POST /v1/completions", CompletionRequest, UNSUPPORTED, {}),
    ("POST /v1/responses", ResponseRequest, NOT_IN_RESPONSES, IN_RESPONSES),
    ("POST /v1/messages", MessageRequest, NOT_IN_MESSAGES, IN_MESSAGES),
    ("POST /inference/v1/generate", GenerateRequest, {}, {}),
    ("POST /tokenize", TokenizeRequest, {}, {}),
    ("POST /detokenize", DetokenizeRequest, {}, {}),
]


def api_page() -> str:
    """The page's text."""
    parts = [
        f"## {title}\n\n{field_table(model, unsupported, own)}\n" for title, model, unsupported, own in TABLES
    ]
    return HEAD + "\n".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(api_page(), encoding="utf-8")
