"""What a step's results mean for a request: whether a token ends it, and which prompt log probabilities are
new."""

from __future__ import annotations

from jaxserve.request import Request
from jaxserve.scheduler.step_plan import StepPlan
from jaxserve.step import FinishReason, ModelRunnerOutput, TokenLogprobs


def check_stop(request: Request, token_id: int) -> FinishReason | None:
    """Whether the request ends with ``token_id``, its last known token; notes the stop token of the
    user's."""
    if token_id in request.stop_token_ids and request.num_output_tokens >= request.sampling_params.min_tokens:
        if token_id not in request.eos_token_ids:
            request.stop_reason = token_id
        return FinishReason.STOP
    if request.num_output_tokens >= request.max_tokens:
        return FinishReason.LENGTH
    repetition = request.sampling_params.repetition_detection
    may_end = request.num_output_tokens >= request.sampling_params.min_tokens
    if (
        repetition is not None
        and may_end
        and repetition.found_in(request.all_token_ids, request.num_output_tokens)
    ):
        return FinishReason.REPETITION
    return None


def new_prompt_logprobs(step: StepPlan, output: ModelRunnerOutput) -> dict[str, list[TokenLogprobs]]:
    """Prompt log probabilities that were not sent before, per live request that got any.

    A step that starts at position p scores the prompt's positions from p + 1. After a preemption the prompt
    is computed again, and what was sent already is dropped.
    """
    new: dict[str, list[TokenLogprobs]] = {}
    for request, start in step.scoring_rows:
        scored = output.prompt_logprobs.get(request.request_id)
        if request.finished or not scored:
            continue
        unsent = scored[request.num_sent_logprobs - start :] if request.num_sent_logprobs > start else scored
        if unsent:
            request.num_sent_logprobs = start + len(scored)
            new[request.request_id] = unsent
    return new
