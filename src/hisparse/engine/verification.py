"""Compares a hierarchical run with a resident one, step by step, and with dense attention beside it.

An observer of the engine: after every forward it hands the very same batch to a resident runner and compares
logits bit for bit. "Equal" says that the cache changed nothing; how far sparse attention itself is from
dense attention is another question, which the agreement figures answer, so that nobody mistakes one for the
other.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hisparse.engine.batch import Batch, PrefillChunk
from hisparse.engine.resident_runner import ResidentRunner
from hisparse.errors import ModelOutputError


@dataclass
class Agreement:
    """How close two runs' next-token distributions are, over the same tokens."""

    steps: int = 0
    same_top: int = 0
    total_divergence: float = 0.0

    def add(self, logits: Tensor, others: Tensor) -> None:
        """Take in [b, vocab] logits of both."""
        self.steps += logits.shape[0]
        self.same_top += int((logits.argmax(-1) == others.argmax(-1)).sum())
        log_p, log_q = logits.double().log_softmax(-1), others.double().log_softmax(-1)
        self.total_divergence += float((log_q.exp() * (log_q - log_p)).sum())

    @property
    def top_token_rate(self) -> float:
        """Share of steps on which both put the same token first; 1 if there was none."""
        return self.same_top / self.steps if self.steps else 1.0

    @property
    def mean_divergence(self) -> float:
        """Mean Kullback-Leibler divergence from dense to sparse, in nats."""
        return self.total_divergence / self.steps if self.steps else 0.0


@dataclass
class Verification:
    """The comparison of one run; an observer of the engine.

    Args:
        resident: same model and selector as the engine under test.
        dense: same model with the selector `all`; None leaves the second question out.
    """

    resident: ResidentRunner
    dense: ResidentRunner | None = None
    steps: int = 0  # forwards whose logits were compared
    unequal_steps: int = 0
    first_difference: str | None = None
    agreement: Agreement = field(default_factory=Agreement)

    @property
    def equal(self) -> bool:
        """Whether every logit of every step was the same bit for bit, and there was some step."""
        return self.steps > 0 and self.unequal_steps == 0

    def ran(self, batch: Batch, logits: Tensor | None) -> None:
        """Run the batch resident and compare.

        Raises:
            ModelOutputError: sparse and dense logits have no divergence, because some are not finite.
        """
        resident = self.resident.run(batch)
        dense = self.dense.run(batch) if self.dense is not None else None
        if logits is None or resident is None:
            return
        self.steps += 1
        if not torch.equal(logits, resident):
            self.unequal_steps += 1
            self.first_difference = self.first_difference or _describe(batch, logits, resident)
        sparse = self.resident.family.prefills_sparsely or not isinstance(batch, PrefillChunk)
        if dense is not None and sparse:  # where both are dense they agree, which says nothing
            _check_finite("dense", batch, dense)
            _check_finite("sparse", batch, logits)
            self.agreement.add(logits, dense)

    def finished(self, request_id: int) -> None:
        """Let the request go everywhere."""
        for runner in (self.resident, self.dense):
            if runner is not None:
                runner.finish(request_id)


def _describe(batch: Batch, logits: Tensor, resident: Tensor) -> str:
    row = int((logits != resident).any(dim=-1).nonzero()[0])
    largest = float((logits[row] - resident[row]).abs().max())
    return f"{_place(batch, row)}: logits differ by up to {largest:.3g}"


def _check_finite(run: str, batch: Batch, logits: Tensor) -> None:
    wrong = ~logits.isfinite().all(dim=-1)
    if wrong.any():
        raise ModelOutputError(
            f"the {run} run produced NaN or infinite logits for {_place(batch, int(wrong.nonzero()[0]))}: "
            "the checkpoint is damaged, or its dtype overflows (try float32)"
        )


def _place(batch: Batch, row: int) -> str:
    if isinstance(batch, PrefillChunk):
        return f"request {batch.request_id}, position {batch.start + len(batch.tokens) - 1}"
    return f"request {batch.request_ids[row]}, position {batch.positions[row]}"
