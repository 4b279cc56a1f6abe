"""What `generate`, `verify` and `demo` have in common: load, tokenize, run with progress, report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from hisparse.chat import encode_chat
from hisparse.commands.progress import bars, console, doing, say
from hisparse.config import HiSparseConfig

if TYPE_CHECKING:
    from hisparse.checkpoint import Loaded
    from hisparse.engine import Engine, Request, SamplingParams
    from hisparse.engine.engine import Observer
    from hisparse.engine.meter import Meter

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class Session:
    """An engine with its requests queued."""

    engine: "Engine"
    meter: "Meter"
    requests: list["Request"]

    def run(self, on_step: Callable[[list["Request"]], None] | None = None) -> None:
        """Run every request to its end, with a bar for prompts and one for tokens."""
        with bars() as group:
            prompt = group.bar("reading prompts", sum(len(request.prompt) for request in self.requests))
            tokens = group.bar("generating", sum(request.params.max_tokens for request in self.requests))
            while not self.engine.scheduler.is_idle:
                before = self.meter.prompt_tokens
                self.meter.start()
                stepped = self.engine.step()
                prompt.advance(self.meter.prompt_tokens - before)
                tokens.advance(len(stepped))
                if on_step is not None:
                    on_step(stepped)


def load_model(model: str, dtype: str, device: str) -> "Loaded":
    """Load a checkpoint, saying so."""
    import torch

    from hisparse.checkpoint import load

    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"--device must be a torch device such as 'cpu' or 'cuda', got {device!r}") from error
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be 'cpu' or 'cuda', got {device!r}")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this torch sees no CUDA device; use --device cpu")
    with doing(f"loading {model}"):
        return load(model, dtype=getattr(torch, dtype), device=where, progress=say)


def tokenize(loaded: "Loaded", texts: Sequence[str], chat: bool | None) -> list[list[int]]:
    """Tokens of each prompt, in the chat template if asked for (default: if there is one)."""
    template = getattr(loaded.tokenizer, "chat_template", None)
    if chat and not template:
        raise ValueError(f"{loaded.name} has no chat template: use --raw")
    if chat or (chat is None and template):
        return [encode_chat(loaded.tokenizer, text) for text in texts]
    return [list(loaded.tokenizer.encode(text)) for text in texts]


def make_engine(loaded: "Loaded", config: HiSparseConfig, sizes: Sequence[int]) -> "Engine":
    """An engine for requests of these sizes, with a bar while the host pool is pinned."""
    from hisparse.engine import build_engine
    from hisparse.engine.latent import LatentFamily

    with bars() as group:
        engine = build_engine(loaded, config, sizes, progress=group.amounts("pinning host memory, MiB", unit=1 << 20))
    used = engine.runner.cache.layout.top_k
    if config.top_k is not None and config.top_k > used:
        trained = isinstance(engine.runner.family, LatentFamily)
        why = f"this model's indexer was trained to read {used}" if trained else "Quest reads whole pages of 16 tokens"
        say(f"top_k {config.top_k}: {why}, so layers read {used}")
    return engine


def prepare(
    loaded: "Loaded",
    config: HiSparseConfig,
    prompts: Sequence[Sequence[int]],
    params: "SamplingParams",
    observers: Sequence["Observer"] = (),
) -> Session:
    """Build an engine for these prompts and queue them."""
    from hisparse.engine.engine import check_prompt
    from hisparse.engine.meter import Meter

    context = loaded.model.config.max_positions
    for prompt in prompts:
        check_prompt(prompt, context)
    sizes = [min(len(prompt) + params.max_tokens, context) for prompt in prompts]
    engine = make_engine(loaded, config, sizes)
    meter = Meter(engine.runner.cache, config.policy)
    engine.observers += [meter, *observers]
    return Session(engine, meter, [engine.submit(prompt, params) for prompt in prompts])


def print_statistics(summary: dict[str, int | float], title: str = "statistics") -> None:
    """A table of the figures, on standard error."""
    full, device = summary["full_kv_bytes"], summary["device_kv_bytes"]
    table = Table(title=title, show_header=False, title_justify="left")
    rows = (
        ("context length", f"{summary['context_length']:,} tokens"),
        ("full KV", _megabytes(full)),
        (
            "device KV (slots + workspace)",
            f"{_megabytes(summary['slots_bytes'])} + {_megabytes(summary['workspace_bytes'])}"
            f" = {_megabytes(device)}, {device / max(full, 1):.0%} of full",
        ),
        ("selection state, beside it", _megabytes(summary["selection_state_bytes"])),
        ("hit rate", f"{summary['hit_rate']:.1%}"),
        ("fetched a token", f"{summary['fetched_bytes_per_token'] / 1e6:.2f} MB"),
        ("reading", f"{summary['prefill_tokens_per_second']:.0f} tokens/s"),
        ("generating", f"{summary['tokens_per_second']:.1f} tokens/s"),
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
