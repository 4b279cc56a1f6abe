"""The paper's arithmetic for GLM-5.1 beside this package's, and where the two differ.

The paper's figures are those of its sections 1, 2.2, 2.3, 3.2 and 3.3: records in bfloat16, FP8 weights, data-parallel
attention on 8 x H200.
"""

from typing import NamedTuple

from hisparse.plan.footprint import per_token
from hisparse.plan.machine import GB, Machine
from hisparse.plan.quantities import in_words
from hisparse.plan.question import Question

LAYERS, RECORD_BYTES = 78, 1152  # GLM-5.1's, an indexer in every layer
LONG, MEDIUM = 128 * 1024, 40 * 1024  # positions: 128K, and 32K in with 8K out
BUFFER = 4096
FP8_KEY_BYTES = 132  # an index key of 128 elements and its scale
MACHINE = Machine(device_memory=141 * GB, host_memory=2000 * GB, gpus=8)


class Comparison(NamedTuple):
    """One figure, twice."""

    what: str
    paper: str
    here: str
    note: str


def compare_with_paper(question: Question) -> list[Comparison]:
    """The figures, if the model has GLM-5.1's records and indexers; else none."""
    family = question.family
    if (len(set(family.anchors)), family.num_state_layers, family.record_bytes) != (LAYERS, LAYERS, RECORD_BYTES):
        return []
    records, own_keys = per_token(family).records, per_token(family).selection_state
    fp8_keys = float(LAYERS * FP8_KEY_BYTES)
    why = (
        "the paper's 13.09 GB are 1,280 B a layer: a record of 1,152 B and 128 B more, what an index key takes in FP8 "
        "without its scale"
    )
    plain = "" if own_keys == fp8_keys else f"{own_keys / LAYERS:g} B, or "
    keys = f"a layer's key takes {plain}{FP8_KEY_BYTES} B in FP8: {in_words(LONG * fp8_keys)} at 128K, "
    return [
        Comparison("records of a token", "about 100 KB", in_words(records), why),
        _history("32K + 8K", "up to 4 GB", MEDIUM, records, fp8_keys),
        _history("128K", "13.09 GB", LONG, records, fp8_keys),
        Comparison(
            f"slots of a request, B = {BUFFER}", "about 0.4 GB", in_words(BUFFER * records), "as 1,280 B: 409 MB"
        ),
        Comparison("fetched a token without a cache", "about 200 MB", in_words(2048 * records), "of 1,280 B: 204 MB"),
        Comparison(
            "selection state of a token", "a few hundred B", in_words(own_keys), f"{keys}more than a request's slots"
        ),
        _concurrency(question, "32K + 8K", "about 60", MEDIUM, records + own_keys, records + fp8_keys),
        _concurrency(question, "128K", "about 15", LONG, records + own_keys, records + fp8_keys),
    ]


def _history(length: str, paper: str, positions: int, records: float, fp8_keys: float) -> Comparison:
    note = f"with FP8 index keys {in_words(positions * (records + fp8_keys))}"
    return Comparison(f"records of {length}", paper, in_words(positions * records), note)


def _concurrency(
    question: Question, length: str, paper: str, positions: int, bytes_each: float, bytes_with_fp8_keys: float
) -> Comparison:
    """Requests with everything on the device, on the paper's machine."""
    room = max(MACHINE.cache_bytes_per_gpu(question.weights), 0)
    here, with_fp8 = (
        int(room // (positions * each)) * MACHINE.independent_caches for each in (bytes_each, bytes_with_fp8_keys)
    )
    return Comparison(f"requests of {length}, full KV", paper, str(here), f"with FP8 index keys {with_fp8}; 8 x 141 GB")
