"""The loop: schedule, run, sample, until every request is finished."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from hisparse.engine.batch import Batch, DecodeBatch, PrefillChunk
from hisparse.engine.detokenizer import detokenizer_of
from hisparse.engine.logprobs import chosen_logprob
from hisparse.engine.request import FinishReason, Request, RequestState, SamplingParams
from hisparse.engine.runner import Runner, nothing
from hisparse.engine.sampler import NO_TOKEN, Sampler
from hisparse.engine.scheduler import Scheduler
from hisparse.engine.text_stream import TextStream
from hisparse.errors import ModelOutputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Observer(Protocol):
    """Sees every forward and every end of a request. It must not raise."""

    def ran(self, batch: Batch, logits: Tensor | None) -> None:
        """A forward was done; `logits` are [b, vocab], None for a chunk in the middle of a prompt."""

    def finished(self, request_id: int) -> None:
        """A request is gone."""


class Engine:
    """Generates text for several requests at once.

    Args:
        runner: executes the model.
        scheduler: over the same runner.
        tokenizer: turns tokens into text.
        stop_token_ids: tokens that end any request's text.
        max_context: the model's longest context, in tokens.
        observers: see every forward.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        stop_token_ids: Sequence[int],
        max_context: int,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.observers = list(observers)
        self._sampler = Sampler()
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_context = max_context
        self._requests: dict[int, Request] = {}
        self._next_id = 0

    def submit(self, prompt: Sequence[int], params: SamplingParams, priority: int = 0) -> Request:
        """Queue a prompt.

        Args:
            prompt: tokens, at least one.
            params: max_tokens is cut to what the model's context leaves.
            priority: the lower number is served first, and may have requests of higher numbers retracted.

        Raises:
            ValueError: an empty prompt, or one that fills or exceeds the model's context.
            NeverFitsError: a prompt that can never fit the cache, with the numbers.
        """
        check_prompt(prompt, self._max_context)
        room = self._max_context - len(prompt)
        params = replace(params, max_tokens=min(params.max_tokens, room))
        stream = TextStream(detokenizer_of(self.tokenizer), params.stop)
        request = Request(self._next_id, list(prompt), params, stream, priority)
        self.scheduler.add(request)
        self._requests[request.id] = request
        self._next_id += 1
        return request

    def step(self, meanwhile: Callable[[], None] = nothing) -> list[Request]:
        """One step: the forwards that the scheduler chose. The requests that got a token, each once.

        Args:
            meanwhile: what the host can do while a GPU is busy with the step, about what came of the steps before. It
                is called once, with the first forward, and must not raise or change anything of the engine.

        Raises:
            ModelOutputError: a request's logits cannot be sampled from, and it has ended; or the forward itself found
                that the model's values are none, and all its requests have ended. Stepping on is safe.
            HiSparseError: there are requests, and none can ever run.
        """
        stepped: list[Request] = []
        for number, batch in enumerate(self.scheduler.schedule()):
            stepped += self._run(batch, nothing if number else meanwhile)
        failed = [request for request in stepped if request.finish_reason is FinishReason.ERROR]
        if failed:
            raise _no_output(failed[0])
        return stepped

    def run(self, on_step: Callable[[list[Request]], None] | None = None) -> None:
        """Step until every request is finished."""
        while not self.scheduler.is_idle:
            stepped = self.step()
            if on_step is not None:
                on_step(stepped)

    def retract(self, request: Request) -> None:
        """Take a running request off the device; it goes on, unchanged, when there is room."""
        self.scheduler.retract(request)

    def cancel(self, request: Request) -> None:
        """End a request now, whatever it is doing, and free all it held."""
        if request.state is not RequestState.FINISHED:
            self._finish(request, FinishReason.CANCELLED)

    def _run(self, batch: Batch, meanwhile: Callable[[], None]) -> list[Request]:
        """One forward; the requests that got a token from it."""
        requests = [self._requests[request_id] for request_id in batch.request_ids]
        try:
            logits, tokens = self._forward(batch, requests, meanwhile)
        except ModelOutputError:  # it does not say whose fault it is, and trying again would not help
            for request in requests:
                self._finish(request, FinishReason.ERROR)
            raise
        if isinstance(batch, PrefillChunk):
            requests[0].num_prefilled = batch.start + len(batch.tokens)
        self._tell(batch, logits)
        return [] if logits is None else self._take_tokens(logits, tokens, requests)

    def _forward(
        self, batch: Batch, requests: list[Request], meanwhile: Callable[[], None]
    ) -> tuple[Tensor | None, list[int]]:
        """Logits, and a token for each of their rows."""

        def choose(logits: Tensor) -> Tensor:
            return self._sampler.choose(logits, requests)

        if isinstance(batch, DecodeBatch):
            return self.runner.decode(batch, choose, meanwhile)
        meanwhile()
        logits = self.runner.prefill(batch)
        return logits, [] if logits is None else choose(logits).tolist()

    def _take_tokens(self, logits: Tensor, tokens: list[int], requests: list[Request]) -> list[Request]:
        for line, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if token == NO_TOKEN:
                self._finish(request, FinishReason.ERROR)
            else:
                self._take_token(request, token, logits, line)
        return requests

    def _take_token(self, request: Request, token: int, logits: Tensor, line: int) -> None:
        request.state = RequestState.DECODING
        request.output.append(token)
        is_eos = token in self._stop_token_ids and not request.params.ignore_eos
        is_stop_token = is_eos or token in request.params.stop_token_ids
        if not is_stop_token:
            if request.params.logprobs is not None:
                offset = len(request.stream.text)
                request.logprobs.append(chosen_logprob(logits[line], token, request.params.logprobs, offset))
            request.stream.add(token)
        if is_stop_token or request.stream.stopped:
            self._finish(request, FinishReason.STOP)
        elif len(request.output) == request.params.max_tokens:
            self._finish(request, FinishReason.LENGTH)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.stream.finish()
        completed = request.stream.stopped and reason is FinishReason.LENGTH  # the last token's text was held back
        request.finish_reason = FinishReason.STOP if completed else reason
        self._remove(request)

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        self._sampler.forget(request)
        del self._requests[request.id]
        for observer in self.observers:
            observer.finished(request.id)

    def _tell(self, batch: Batch, logits: Tensor | None) -> None:
        for observer in self.observers:
            observer.ran(batch, logits)


def _no_output(request: Request) -> ModelOutputError:
    position = len(request.prompt) + len(request.output)
    return ModelOutputError(
        f"the model produced NaN or infinite logits for request {request.id} at position {position}: "
        f"the checkpoint is damaged, or its dtype overflows (try float32)"
    )


def check_prompt(prompt: Sequence[int], max_context: int) -> None:
    """Raise `ValueError` unless the prompt has tokens and leaves room for an answer in the model's context."""
    if not prompt:
        raise ValueError("the prompt is empty: give it at least one token")
    if len(prompt) >= max_context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, the model's context {max_context}, and the answer needs room: "
            f"shorten it by at least {len(prompt) - max_context + 1} tokens"
        )
