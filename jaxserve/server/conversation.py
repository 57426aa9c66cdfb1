"""A conversation of any protocol on its way to the engine, and the model's answer on its way back.

Protocols translate their bodies into a Conversation (messages, tools and choices in the form of OpenAI's chat)
and render the deltas that a Reply reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import InvalidRequestError, QueueFullError
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.parsers import OutputDelta, OutputParser
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.generation import GenerationService, Submission
from jaxserve.server.openai.chat_prompt import chat_prompt
from jaxserve.server.openai.tool_output import THINKING_SWITCHES, OutputPlan, plan_output
from jaxserve.server.openai.tools import ToolChoice
from jaxserve.tokenizer import chat_template


@dataclass
class Conversation:
    """What the model is to answer.

    Args:
        messages: in the form of OpenAI's chat.
        tools: checked functions, in that form, too.
        tool_choice: None is ``auto`` with tools.
        parallel_tool_calls: False allows one call at most.
        reasoning_effort: ``none`` to ``max``; None leaves it to the template.
        thinking_token_budget: tokens of reasoning at most.
        continue_final_message: go on with the last message instead of beginning a new one.
        template_kwargs: further variables of the chat template.
        names: how the protocol spells parameters that chat completions spell otherwise: errors name those.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] | None = None
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    @contextlib.contextmanager
    def errors_by_name(self) -> Generator[None, None, None]:
        """Errors raised in here name the protocol's own parameters."""
        try:
            yield
        except InvalidRequestError as error:
            name = self.names.get(error.param or "")
            if name is None or error.param is None:
                raise
            message = error.message.replace(error.param, name)
            raise type(error)(message, param=name, code=error.code) from None


def thinking_switches(service: GenerationService) -> list[str]:
    """The variables by which the model's template turns thinking on and off."""
    text = chat_template.template_text(service.tokenizer, service.chat_template, has_tools=False)
    names = chat_template.variables(text)
    return [name for name in THINKING_SWITCHES if name in names]


async def render(service: GenerationService, conversation: Conversation) -> tuple[OutputPlan, str]:
    """How the answer is sampled and read, and the prompt.

    Raises:
        InvalidRequestError: there is no template, it refuses this conversation, or the model has no such tools.
    """
    with conversation.errors_by_name():
        plan = plan_output(
            service,
            conversation.messages,
            tools=conversation.tools or None,
            tool_choice=conversation.tool_choice,
            parallel_tool_calls=conversation.parallel_tool_calls,
            reasoning_effort=conversation.reasoning_effort,
            thinking_token_budget=conversation.thinking_token_budget,
            template_kwargs=conversation.template_kwargs,
            continue_final_message=conversation.continue_final_message,
        )
    prompt = await chat_prompt(
        service,
        plan.messages,
        add_generation_prompt=None,
        continue_final_message=conversation.continue_final_message,
        tools=plan.tools,
        kwargs=plan.template_kwargs or None,
    )
    return plan, prompt


async def submit(
    service: GenerationService,
    conversation: Conversation,
    params: SamplingParams,
    *,
    request_id: str,
    priority: int = 0,
    cache_salt: str | None = None,
) -> Reply:
    """Admit the conversation.

    Raises:
        InvalidRequestError: the request's own mistake.
        QueueFullError: too many requests wait, or the server is shutting down.
        EngineDeadError: the engine core died.
    """
    plan, prompt = await render(service, conversation)
    with conversation.errors_by_name():
        params = plan.sampling_params(params, prompt)
    submission = await service.submit(
        request_id,
        [prompt],
        params,
        priority=priority,
        cache_salt=cache_salt,
        add_special_tokens=False,  # the template writes them itself
    )
    return Reply(submission, plan.parser(prompt, params))


class Reply:
    """The model's answer to one conversation."""

    def __init__(self, submission: Submission, parser: OutputParser) -> None:
        self._submission = submission
        self._parser = parser
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self.finish_reason: str | None = None
        """``stop``, ``length`` or ``repetition`` once it has ended."""
        self.stop_reason: int | str | None = None
        """The stop string or token id that ended it."""

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return self._parser.num_calls

    async def read(self) -> AsyncGenerator[tuple[CompletionOutput, list[OutputDelta]]]:
        """Every output of the engine, and what it decides; the last one comes with all that was held back.

        Raises:
            RequestFailedError: a step failed while the request was in it.
            QueueFullError: the server is shutting down and aborted it.
            EngineDeadError: the engine core died.
        """
        async for _, output in self._submission.outputs():
            choice = output.outputs[0]
            self._count(output, choice)
            deltas = self._parser.feed(choice.text, choice.token_ids)
            if choice.finish_reason is not None:
                deltas += self._parser.finish()
                self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason
            yield choice, deltas
        if self.finish_reason == "abort":
            # Only the end of the server aborts a request that somebody still reads.
            raise QueueFullError("The server is shutting down; the answer is incomplete.")

    async def aclose(self) -> None:
        """Leave; what has not finished is aborted."""
        await self._submission.aclose()

    def _count(self, output: RequestOutput, choice: CompletionOutput) -> None:
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_cached_tokens = output.num_cached_tokens
        self.num_tokens += len(choice.token_ids)
