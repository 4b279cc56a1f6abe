"""`hisparse verify`: proof that the hierarchy changed nothing."""

from typing import TYPE_CHECKING, Annotated

import typer

from hisparse.commands.options import (
    BufferOption,
    ChatOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    MaxTokensOption,
    ModelArgument,
    PolicyOption,
    PrefetchOption,
    PromptFileOption,
    PromptOption,
    SelectorOption,
    TopKOption,
    build_config,
    print_json,
    read_prompts,
)
from hisparse.commands.progress import console
from hisparse.commands.session import load_model, prepare, print_statistics, tokenize
from hisparse.config import HiSparseConfig

if TYPE_CHECKING:
    from hisparse.checkpoint import Loaded
    from hisparse.engine.verification import Verification


def verify(
    model: ModelArgument,
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    max_tokens: MaxTokensOption = 64,
    top_k: TopKOption = None,
    device_buffer_size: BufferOption = None,
    selector: SelectorOption = None,
    policy: PolicyOption = None,
    prefetch: PrefetchOption = None,
    chat: ChatOption = None,
    hisparse_config: ConfigOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    dense: Annotated[
        bool, typer.Option("--dense/--no-dense", help="Also measure how far sparse attention is from dense.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Run prompts hierarchically and fully resident, and compare logits bit for bit at every step.

    Exits 0 only if every logit is equal, 1 if one is not. The agreement with dense attention is another
    matter: equal means that the cache changed nothing, not that top-k attention loses nothing.

    Example: hisparse verify smollm2 --prompt-file README.md --top-k 256 --device-buffer-size 512 --json
    """
    from hisparse.engine import SamplingParams

    config = build_config(
        hisparse_config,
        top_k=top_k,
        device_buffer_size=device_buffer_size,
        selector=selector,
        policy=policy,
        prefetch=prefetch,
    )
    params = SamplingParams(max_tokens=max_tokens)
    texts = read_prompts(prompt, prompt_file)
    loaded = load_model(model, dtype, device)
    prompts = tokenize(loaded, texts, chat)
    longest = min(max(len(tokens) for tokens in prompts) + max_tokens, loaded.model.config.max_positions)
    verification = build_verification(loaded, config, longest if dense else None)
    session = prepare(loaded, config, prompts, params, [verification])
    session.run()
    result = {"equal": verification.equal, "steps": verification.steps} | describe(verification)
    summary = session.meter.summary()
    if as_json:
        print_json(result | summary)
    else:
        print_verdict(verification)
        print_statistics(summary)
    if not verification.equal:
        raise typer.Exit(1)


def build_verification(loaded: "Loaded", config: HiSparseConfig, dense_context: int | None) -> "Verification":
    """The observer that compares; with `dense_context`, also against dense attention up to that length."""
    from hisparse.engine.build import build_family, dense_family
    from hisparse.engine.resident_runner import ResidentRunner
    from hisparse.engine.verification import Verification

    resident = ResidentRunner(build_family(config, loaded.model))
    if dense_context is None:
        return Verification(resident)
    return Verification(resident, ResidentRunner(dense_family(config, loaded.model, dense_context)))


def describe(verification: "Verification") -> dict[str, object]:
    """What the comparison found, by name."""
    found: dict[str, object] = {
        "unequal_steps": verification.unequal_steps,
        "first_difference": verification.first_difference,
    }
    if verification.dense is not None:
        found["dense_top_token_agreement"] = verification.agreement.top_token_rate
        found["dense_mean_kl"] = verification.agreement.mean_divergence
    return found


def print_verdict(verification: "Verification") -> None:
    """The comparison in two sentences."""
    if verification.equal:
        print(f"equal: all logits of {verification.steps} steps are the same bit for bit, hierarchical and resident")
    else:
        print(f"NOT equal: {verification.unequal_steps} of {verification.steps} steps differ")
        print(f"first difference: {verification.first_difference}")
    if verification.dense is not None:
        agreement = verification.agreement
        console.print(
            f"dense attention puts the same token first in {agreement.top_token_rate:.1%} of {agreement.steps} "
            f"decode steps (mean KL {agreement.mean_divergence:.3f} nats): the price of top-k, not of the cache",
            markup=False,
        )
