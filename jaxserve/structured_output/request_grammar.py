"""RequestGrammar: one request's way through its grammar, as the scheduler walks it and the runner reads its masks.

Masks of many requests are filled together, in a thread of the MaskFiller, as soon as the tokens before them are
known; whoever needs one waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from jaxserve.sampling_params import SamplingParams
from jaxserve.structured_output.compiler import GrammarCompiler, refused, result_of
from jaxserve.structured_output.interface import CompiledGrammar, GrammarError, Matcher

logger = logging.getLogger(__name__)


class RequestGrammar:
    """Used by the step loop's thread alone.

    Args:
        compiler: where the grammar is being compiled from now on.
        params: of the request, with ``structured_outputs``.
    """

    def __init__(self, compiler: GrammarCompiler, params: SamplingParams) -> None:
        assert params.structured_outputs is not None
        self.params = params.structured_outputs
        self.future: Future[CompiledGrammar] = compiler.submit(self.params)
        # Tokens may be skipped over only where no other restriction and no log probability needs their logits.
        self._jumps = params.logprobs is None and params.allowed_token_ids is None and not params.bad_words
        self._ignore_eos = params.ignore_eos
        self._compiler = compiler
        self._deadline = time.monotonic() + compiler.seconds
        self._matcher: Matcher | None = None
        self._mask: tuple[Future[np.ndarray], int] | None = None
        self.ended = False
        """Whether the output is complete: nothing may follow."""

    @property
    def ready(self) -> bool:
        """Whether ``start`` will not wait."""
        return self.future.done() or time.monotonic() > self._deadline

    def start(self) -> None:
        """Begin at the start of the grammar; once, when ``ready``.

        Raises:
            InvalidRequestError: the grammar is wrong, or took too long.
        """
        self._matcher = result_of(self.future, self.params, 0.0 if self.future.done() else 1e-3).start()

    def accept(self, token_id: int) -> list[int]:
        """Go on by a sampled token.

        Returns:
            Tokens that must follow it: they are accepted, too, and need not be sampled. The end-of-sequence token is
            the last of them where nothing else may follow.

        Raises:
            InvalidRequestError: the grammar became too complex.
        """
        matcher, eos_token_ids = self._settled(), self._compiler.backend.eos_token_ids
        try:
            matcher.accept(token_id)
            self.ended = token_id in eos_token_ids
            if self.ended or not self._jumps:
                return []
            forced = matcher.forced_tokens()
            for forced_id in forced:
                matcher.accept(forced_id)
        except GrammarError as error:
            raise refused(self.params, str(error)) from None
        except Exception:  # nothing that a grammar does may end the step loop
            logger.exception("A grammar failed")
            raise refused(self.params, "could not be followed.") from None
        if matcher.ended:
            forced.append(eos_token_ids[0])
            self.ended = True
        return forced

    @property
    def matcher(self) -> Matcher:
        """Started."""
        assert self._matcher is not None
        return self._matcher

    @property
    def has_mask(self) -> bool:
        """Whether the mask of the next token is known, or being filled."""
        return self._mask is not None

    def set_mask(self, masks: Future[np.ndarray], index: int) -> None:
        """The mask of the next token will be row ``index``."""
        self._mask = masks, index

    def words(self) -> np.ndarray:
        """The mask of the next token, int32[W]: bit v % 32 of word v // 32 is 1 where token v is allowed."""
        assert self._mask is not None
        masks, index = self._mask
        words = masks.result()[index]
        return self._without_eos(words) if self._ignore_eos else words

    def _without_eos(self, words: np.ndarray) -> np.ndarray:
        """The output goes on as long as the grammar lets it."""
        others = words.view(np.uint32).copy()
        for token_id in self._compiler.backend.eos_token_ids:
            others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return others.view(np.int32) if others.any() else words

    def _settled(self) -> Matcher:
        """The matcher, once no thread is at it."""
        if self._mask is not None:
            self._mask[0].exception()
            self._mask = None
        return self.matcher


class MaskFiller:
    """Fills masks in a thread of its own (and that of the backend's), while the step loop goes on."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def start(self, grammars: Sequence[RequestGrammar]) -> None:
        """Begin to fill the next masks of those that have none."""
        due = [grammar for grammar in grammars if not grammar.has_mask]
        if not due:
            return
        future = self._executor.submit(self._fill, [grammar.matcher for grammar in due])
        for index, grammar in enumerate(due):
            grammar.set_mask(future, index)

    def _fill(self, matchers: list[Matcher]) -> np.ndarray:
        masks = np.zeros((len(matchers), self._compiler.backend.num_words), np.int32)
        try:
            self._compiler.fill_masks(matchers, masks)
        except Exception:  # nothing is allowed then: these requests fail, and no others of their step
            logger.exception("Token masks could not be filled")
            masks[:] = 0
        return masks

    def close(self) -> None:
        """Let the thread end."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def wait_for_any(grammars: Sequence[RequestGrammar], seconds: float) -> None:
    """Sleep until one of the grammars is compiled, ``seconds`` at most."""
    wait([grammar.future for grammar in grammars], seconds, FIRST_COMPLETED)
