"""Runs an engine on a thread of its own, so that asyncio callers can wait for text without holding anyone up.

Everything that touches the engine happens on that thread. Callers put commands into an inbox, which is emptied
before every step; with nothing to run, the thread sleeps in the inbox. News go back to each caller's asyncio loop,
together once a step, when the next one has begun.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from hisparse.engine import Engine, FinishReason
from hisparse.errors import HiSparseError, ModelOutputError
from hisparse.server.errors import NotServingError, QueueFullError
from hisparse.server.generation import Answers, Generation, Job, News

Letter = tuple[Answers, News]


class Watch(Protocol):
    """Sees what the loop does, on the engine's thread. It must not raise."""

    def stepped(self, engine: Engine) -> None:
        """A step was done, or nothing is left to do."""

    def got_first_token(self, generation: Generation) -> None:
        """A text has begun."""

    def ended(self, generation: Generation, reason: FinishReason) -> None:
        """A text has ended, whatever the reason."""


class EngineLoop:
    """An engine at work.

    Args:
        engine: nobody else may touch it from now on.
        max_waiting: requests that may wait, beyond those that can be on the device at once.
        watches: see what happens.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 256, watches: Sequence[Watch] = ()) -> None:
        if max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, got {max_waiting}")
        self.engine = engine
        self.max_unfinished = max_waiting + engine.runner.cache.layout.max_requests
        self.watches = list(watches)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._mail: defaultdict[asyncio.AbstractEventLoop, list[Letter]] = defaultdict(list)
        self._thread = threading.Thread(target=self._run, name="hisparse-engine", daemon=True)
        self._deadline: float | None = None  # for what still runs, once the loop is to stop
        # Shared by threads, under the lock:
        self._lock = threading.Lock()
        self._unfinished: dict[Generation, None] = {}  # in the order of their coming
        self._refusal: NotServingError | None = None  # why nothing new is accepted

    # Called from any thread

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def num_unfinished(self) -> int:
        """Texts that were asked for and are not finished."""
        with self._lock:
            return len(self._unfinished)

    @property
    def refusal(self) -> NotServingError | None:
        """Why nothing new is accepted; None while the loop serves."""
        with self._lock:
            return self._refusal

    def check_open(self, num_texts: int = 1) -> None:
        """Raise what `submit` would raise for so many texts, before work is put into them.

        Raises:
            ValueError: more than can ever wait.
            QueueFullError: too many wait already.
            NotServingError: the loop is stopping, or has failed.
        """
        with self._lock:
            self._check_room(num_texts)

    async def submit(self, jobs: Sequence[Job], *, at_once: bool = False) -> Answers:
        """Ask for texts, piece by piece or each `at_once`; all of them are accepted, or none.

        Raises:
            ValueError: a prompt that the engine refuses, or more jobs than can ever wait.
            NeverFitsError: a job that the cache could never hold, with the numbers.
            QueueFullError: too many wait already.
            NotServingError: the loop is stopping, or has failed.
        """
        answers = Answers(jobs, self._cancel_later, at_once=at_once)
        self._enlist(answers)
        try:
            await answers.accepted()
        except BaseException:  # refused, or the caller itself was cancelled while it waited
            answers.cancel()
            raise
        return answers

    def begin_stop(self, timeout_s: float) -> None:
        """Accept nothing new; let what runs or waits finish, and cancel what is left after `timeout_s`.

        Callers of what is left are told by their own asyncio loops at that moment, even if the engine is in a step.
        """
        with self._lock:
            if self._refusal is None:
                self._refusal = NotServingError("the server is shutting down and takes no new requests")
            self._inbox.put(partial(self._set_deadline, time.monotonic() + timeout_s))
            left = {generation.answers: None for generation in self._unfinished}
        for answers in left:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody is left to tell
                answers.loop.call_soon_threadsafe(answers.loop.call_later, timeout_s, answers.deliver, _too_late())

    async def stop(self, timeout_s: float) -> None:
        """Stop, and wait until the thread has ended. Never longer than `timeout_s` and one step."""
        self.begin_stop(timeout_s)
        await asyncio.to_thread(self._thread.join)

    def _enlist(self, answers: Answers) -> None:
        with self._lock:
            self._check_room(len(answers.generations))
            self._unfinished |= dict.fromkeys(answers.generations)
            self._inbox.put(partial(self._take_on, answers))

    def _check_room(self, num_new: int) -> None:
        if num_new > self.max_unfinished:
            raise ValueError(
                f"one call asks for {num_new} texts, and this server takes {self.max_unfinished} at once: ask for fewer"
            )
        if self._refusal is not None:
            raise NotServingError(str(self._refusal))
        if len(self._unfinished) + num_new > self.max_unfinished:
            raise QueueFullError(
                f"{len(self._unfinished)} of at most {self.max_unfinished} requests are unfinished and this asks "
                f"for {num_new} more: try again later"
            )

    def _cancel_later(self, answers: Answers) -> None:
        self._inbox.put(partial(self._drop, answers))

    # On the engine's thread

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._step()
        except Exception as error:  # the engine is in no known state: nobody may wait for it
            logging.getLogger(__name__).exception("the engine failed, and with it every request")
            self._fail(error)

    def _take_commands(self) -> bool:
        """Do what callers asked for; with nothing to run, wait for them. False: it is time to end."""
        while True:
            is_idle = self.engine.scheduler.is_idle
            if is_idle:
                self._publish_all()
                if self._deadline is not None:
                    return False
            try:
                self._inbox.get(block=is_idle)()
            except queue.Empty:
                break
            self._post()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._cut_off()
        return True

    def _step(self) -> None:
        """One step; what came of the one before is told while a GPU is busy with it."""
        try:
            self.engine.step(self._publish_all)
        except ModelOutputError as error:  # who is at fault has ended; the others go on
            self._publish_all(error)

    def _publish_all(self, error: Exception | None = None) -> None:
        """Tell of what came; `error` is what ended those texts that failed."""
        with self._lock:
            unfinished = list(self._unfinished)
        for generation in unfinished:
            self._publish(generation, error)
        self._post()
        for watch in self.watches:
            watch.stepped(self.engine)

    def _publish(self, generation: Generation, error: Exception | None) -> None:
        piece = generation.advance()
        if generation.num_seen and generation.first_token_at is None:
            generation.first_token_at = time.perf_counter()
            for watch in self.watches:
                watch.got_first_token(generation)
        if piece is None:
            return
        failed = piece.finish_reason is FinishReason.ERROR
        self._send(generation.answers, error if failed else piece)
        if piece.finish_reason is not None:
            self._end(generation, piece.finish_reason)

    def _take_on(self, answers: Answers) -> None:
        try:
            for generation in answers.generations:
                generation.request = self.engine.submit(*generation.job)
        except (ValueError, HiSparseError) as error:
            self._drop(answers)
            self._send(answers, error)
        else:
            self._send(answers, None)

    def _drop(self, answers: Answers) -> None:
        """Cancel what is not finished of a call."""
        for generation in answers.generations:
            if generation.request is not None:
                self.engine.cancel(generation.request)
            self._end(generation, FinishReason.CANCELLED)

    def _end(self, generation: Generation, reason: FinishReason) -> None:
        with self._lock:
            was_unfinished = generation in self._unfinished
            self._unfinished.pop(generation, None)
        if was_unfinished:
            for watch in self.watches:
                watch.ended(generation, reason)

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = min(deadline, self._deadline or deadline)

    def _cut_off(self) -> None:
        """The time to finish is over: free what is left. Its callers are told by `begin_stop`."""
        with self._lock:
            left = {generation.answers: None for generation in self._unfinished}
        for answers in left:
            self._drop(answers)

    def _fail(self, error: Exception) -> None:
        failure = NotServingError(f"the engine failed ({type(error).__name__}: {error}): restart the server")
        with contextlib.suppress(Exception):  # texts that were finished before are whole
            self._publish_all(failure)
        with self._lock:
            self._refusal = failure
            left = list(self._unfinished)
        for generation in left:
            self._send(generation.answers, failure)
            self._end(generation, FinishReason.ERROR)
        self._post()

    def _send(self, answers: Answers, news: News) -> None:
        self._mail[answers.loop].append((answers, news))

    def _post(self) -> None:
        """Send all news off: each asyncio loop is woken once."""
        for loop, letters in self._mail.items():
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(_deliver, letters)
        self._mail = defaultdict(list)


def _too_late() -> NotServingError:
    return NotServingError("the server shut down before this request was finished")


def _deliver(letters: Sequence[Letter]) -> None:
    for answers, news in letters:
        answers.deliver(news)
