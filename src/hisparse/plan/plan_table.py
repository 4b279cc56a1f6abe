"""A plan as tables to read."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hisparse.plan.footprint import per_token, resident_bytes
from hisparse.plan.paper import Comparison, compare_with_paper
from hisparse.plan.plan import Option, Plan, recommended_keys
from hisparse.plan.quantities import in_words
from hisparse.plan.report import about_index_keys, assumptions, serve_command

WIDTH = 120  # where there is no terminal
NO_BREAK = "\u00a0"  # a space
LIMITS = {
    "slots": "slots",
    "selection_state": "state",
    "tables": "tables",
    "host_memory": "host",
    "int32_rows": "int32",
}
COLUMNS = ("B", "requests", "per GPU", "limit", "slots", "state", "tables", "host", "misses", "link", "in budget")


def print_plan(plan: Plan) -> None:
    """Everything, on standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    console.print(_model(plan))
    console.print(_options(plan))
    for line in filter(None, (*assumptions(plan.question), about_index_keys(plan))):
        console.print(f"- {line}", markup=False, soft_wrap=True)
    if rows := compare_with_paper(plan.question):
        console.print(_against_the_paper(rows))
    if plan.best is not None:
        keys = json.dumps(recommended_keys(plan.best))
        each = f"recommended, for each GPU: --hisparse-config '{keys}'"
        console.print(serve_command(plan) or each, markup=False, soft_wrap=True)


def _against_the_paper(rows: Sequence[Comparison]) -> Table:
    table = Table("", "paper", "here", "", title="GLM-5.1 in the paper, and here", title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _model(plan: Plan) -> Table:
    question = plan.question
    family, machine = question.family, question.machine
    sizes = per_token(family, heated=question.heated)
    resident = question.resident_requests_per_gpu * machine.independent_caches
    table = Table(
        title=f"{question.model.name}, {question.context:,} tokens a request", show_header=False, title_justify="left"
    )
    rows = (
        ("machine", f"{machine.gpus} x {in_words(machine.device_memory)}, host {in_words(machine.host_memory)}"),
        ("records a token", f"{sizes.records:,.0f} B = {len(family.anchors)} layers x {family.record_bytes:,} B"),
        ("selection state a token", f"{sizes.selection_state:,.0f} B, {family.num_state_layers} layers"),
        ("tables a token", f"{sizes.tables:,.0f} B, {len(set(family.anchors))} index groups"),
        (
            "weights",
            f"{in_words(question.weights.total)}, {in_words(machine.weight_bytes_per_gpu(question.weights))} a GPU",
        ),
        ("left for a GPU's cache", in_words(max(question.cache_bytes, 0))),
        ("fully resident", f"{resident:,} requests of {in_words(resident_bytes(family, question.context))}"),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _options(plan: Plan) -> Table:
    table = Table(title="hierarchical (bytes of one GPU)", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for option in plan.options:
        table.add_row(*(cell.replace(" ", NO_BREAK) for cell in _cells(option)))
    return table


def _cells(option: Option) -> tuple[str, ...]:
    size, fits = option.footprint, option.capacity
    parts = (
        (
            size.layout.slots_bytes,
            size.selection_state_bytes,
            size.bookkeeping_bytes,
            size.host_bytes,
        )
        if size is not None
        else (0, 0, 0, 0)
    )
    return (
        f"{option.device_buffer_size:,}",
        f"{fits.requests * option.question.machine.independent_caches:,}",
        f"{fits.requests:,}",
        LIMITS[fits.limited_by],
        *(in_words(part) for part in parts),
        f"{option.miss_rate:.1%}",
        f"{option.link_ms:.1f} ms",
        f"{option.requests_in_budget:,}",
    )
