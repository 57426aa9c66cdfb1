"""RequestState: what the front knows of a running request, and the RequestOutput it makes of that.

New tokens are only appended here; an output is made when somebody takes it. So a slow reader costs nothing,
and what it missed comes merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxserve.engine.input_processor import ProcessedRequest
from jaxserve.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.step import EngineCoreOutput, FinishReason, TokenLogprobs
from jaxserve.tokenizer.detokenizer import make_detokenizer
from jaxserve.tokenizer.pieces import ProtocolPieces, TokenPieces
from jaxserve.tokenizer.stop_checker import StopChecker

if TYPE_CHECKING:
    from jaxserve.engine.output_queue import RequestOutputQueue

Pieces = TokenPieces | ProtocolPieces


class CompletionState:
    """One completion: its tokens, text and log probabilities, those not yet taken apart from the rest."""

    __slots__ = (
        "_cumulative_logprob", "_detokenizer", "_ids", "_include_stop", "_logprobs", "_min_tokens",
        "_new_ids", "_new_logprobs", "_new_text", "_pieces", "_stop", "_text", "_wants_logprobs", "core_id",
        "finish_reason", "index", "last_token_time", "num_tokens", "plain", "request", "stop_reason", "taken",
    )  # fmt: skip

    def __init__(self, request: RequestState, index: int, core_id: str, pieces: Pieces | None) -> None:
        params = request.sampling_params
        self.request = request
        self.index = index
        self.core_id = core_id
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.last_token_time = 0.0
        self.taken = True
        """Whether all there is has been taken."""
        self._pieces = pieces if params.detokenize else None
        self._detokenizer = None
        if self._pieces is not None:
            self._detokenizer = make_detokenizer(
                self._pieces,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                shown_special_tokens=params.shown_special_tokens or (),
            )
        self._include_stop = params.include_stop_str_in_output
        self._stop = StopChecker(params.stop, self._include_stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._wants_logprobs = params.logprobs is not None
        self.plain = self._stop is None and not self._wants_logprobs
        """Whether tokens that do not end it are taken as they come: nothing is searched in them or told of them."""
        self._cumulative_logprob = 0.0
        self._ids: list[int] = []
        self._text = ""
        self._logprobs: list[PositionLogprobs] = []
        self._new_ids: list[int] = []
        self._new_text: list[str] = []
        self._new_logprobs: list[PositionLogprobs] = []

    def append(self, output: EngineCoreOutput) -> bool:
        """Take what a step added.

        Returns:
            Whether a stop string ended the completion while the core would go on with it.
        """
        ids = output.new_token_ids
        self.taken = False
        self._new_ids += ids
        detokenizer = self._detokenizer
        finish = output.finish_reason
        found: str | None = None
        if detokenizer is None:
            self.num_tokens += len(ids)
            if output.new_logprobs and self._wants_logprobs:
                self._add_logprobs(output.new_logprobs, [b""] * len(ids))
        elif finish is None and self.plain:
            self.num_tokens += len(ids)
            text = detokenizer.update(ids)
            if text:
                self._new_text.append(text)
            return False
        else:
            # A stop token's text is not part of the output, unless asked for.
            drop_last = finish is FinishReason.STOP and not self._include_stop
            found = self._append_one_by_one(output, len(ids) - 1 if drop_last else len(ids))
        if found is None and finish is not None:
            found = self._flush()
            self.finish_reason, self.stop_reason = finish.value, output.stop_reason
        if found is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP.value, found
        return found is not None and finish is None

    def append_plain(self, ids: list[int]) -> None:
        """``append`` of tokens that do not end a ``plain`` completion."""
        self.taken = False
        self._new_ids += ids
        self.num_tokens += len(ids)
        if self._detokenizer is not None and (text := self._detokenizer.update(ids)):
            self._new_text.append(text)

    def abort(self) -> None:
        """End it early; the text that was held back is shown."""
        self._flush()
        self.taken = False
        self.finish_reason = FinishReason.ABORT.value

    def take(self, delta: bool) -> CompletionOutput:
        """The output so far, or what is new since the last call."""
        self.taken = True
        text, ids, logprobs = "".join(self._new_text), self._new_ids, self._new_logprobs
        self._new_text, self._new_ids, self._new_logprobs = [], [], []
        if not delta:
            self._text += text
            self._ids += ids
            self._logprobs += logprobs
            text, ids, logprobs = self._text, self._ids.copy(), self._logprobs.copy()
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=ids,
            cumulative_logprob=self._cumulative_logprob if self._wants_logprobs else None,
            logprobs=logprobs if self._wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _append_one_by_one(self, output: EngineCoreOutput, num_with_text: int) -> str | None:
        """Text, stop strings and log probabilities token by token; the stop string found, if any."""
        detokenizer = self._detokenizer
        assert detokenizer is not None
        found: str | None = None
        pending: list[bytes] = []
        for index, token_id in enumerate(output.new_token_ids):
            pending.append(detokenizer.pending)
            self.num_tokens += 1
            if index < num_with_text and found is None:
                found = self._show(detokenizer.update([token_id]), self.num_tokens > self._min_tokens)
            if found is not None:
                del self._new_ids[len(self._new_ids) - (len(output.new_token_ids) - 1 - index) :]
                break  # what a step brought beyond it is not part of the output
        if output.new_logprobs and self._wants_logprobs:
            self._add_logprobs(output.new_logprobs, pending)
        return found

    def _show(self, text: str, search: bool) -> str | None:
        found: str | None = None
        if self._stop is not None:
            text, found = self._stop.feed(text, search=search)
        if text:
            self._new_text.append(text)
        return found

    def _flush(self) -> str | None:
        """Show what was held back; it may end with a stop string still."""
        if self._detokenizer is None:
            return None
        found = self._show(self._detokenizer.flush(), self.num_tokens > self._min_tokens)
        if self._stop is not None and found is None:
            self._new_text.append(self._stop.flush())
        return found

    def _add_logprobs(self, entries: Sequence[TokenLogprobs], pending: Sequence[bytes]) -> None:
        for entry, waiting in zip(entries, pending):
            self._cumulative_logprob += entry.logprobs[0]
            self._new_logprobs.append(position_logprobs(entry, self._pieces, waiting))


class RequestState:
    """One request with its completions."""

    __slots__ = (
        "_kind", "_pieces", "_prompt_logprobs", "_wants_prompt_logprobs", "changed", "completions", "metrics",
        "num_cached_tokens", "num_running", "parent_trace", "prompt", "prompt_token_ids", "queue", "request_id",
        "sampling_params", "streams",
    )  # fmt: skip

    def __init__(
        self, request: ProcessedRequest, pieces: Pieces | None, queue: RequestOutputQueue | None
    ) -> None:
        self.request_id = request.request_id
        self.prompt = request.prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.sampling_params: SamplingParams = request.sampling_params
        self.queue = queue
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.parent_trace: Mapping[str, str] | None = None
        """The client's trace headers, where requests are traced."""
        self.num_cached_tokens = 0
        self.changed = False
        """Whether there is an output to take."""
        self._kind = self.sampling_params.output_kind
        self.streams = self._kind is not RequestOutputKind.FINAL_ONLY
        """Whether outputs are wanted before the request has finished."""
        self._pieces = pieces if self.sampling_params.detokenize else None
        self._wants_prompt_logprobs = self.sampling_params.prompt_logprobs is not None
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.completions = [
            CompletionState(self, index, core.request_id, pieces)
            for index, core in enumerate(request.core_requests)
        ]
        self.num_running = len(self.completions)

    @property
    def finished(self) -> bool:
        return self.num_running == 0

    def add_prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        """Take the next prompt positions; the first position has none."""
        if not self._wants_prompt_logprobs:
            return
        if self._prompt_logprobs is None:
            self._prompt_logprobs = [None]
        scored = self._prompt_logprobs
        for entry in entries:
            pending = b""
            if isinstance(self._pieces, TokenPieces):
                before = self.prompt_token_ids[max(0, len(scored) - 4) : len(scored)]
                pending = self._pieces.pending_after(before, skip_special=False)
            scored.append(position_logprobs(entry, self._pieces, pending))

    def take(self) -> RequestOutput:
        """The output that is due: with DELTA what is new, else all."""
        self.changed = False
        delta = self._kind is RequestOutputKind.DELTA
        outputs = [c.take(delta) for c in self.completions if not (delta and c.taken)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._take_prompt_logprobs(delta),
            outputs=outputs,
            finished=self.num_running == 0,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )

    def _take_prompt_logprobs(self, delta: bool) -> list[PositionLogprobs | None] | None:
        if not self._wants_prompt_logprobs:
            return None
        if self._prompt_logprobs is None and len(self.prompt_token_ids) == 1:
            self._prompt_logprobs = [None]
        scored = self._prompt_logprobs
        if delta and scored is not None:
            self._wants_prompt_logprobs = False
        return scored


def position_logprobs(entry: TokenLogprobs, pieces: Pieces | None, pending: bytes) -> PositionLogprobs:
    """One position as the user sees it: the chosen token first, then the most likely ones in order.

    Args:
        entry: the position's log probabilities.
        pieces: None leaves the texts out.
        pending: the incomplete character before this position.
    """
    result: PositionLogprobs = {}
    for rank, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs)):
        if token_id not in result:
            text = None if pieces is None else pieces.text_of(token_id, pending)
            result[token_id] = Logprob(logprob, rank or entry.rank, text)
    return result
