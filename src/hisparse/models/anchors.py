"""Which layers have an indexer of their own, in every notation that configurations use.

Layers next to each other select much the same positions, so some models compute a selection in one layer (the
anchor) and reuse it in the layers after it. Configurations say so in three ways, which all end here as one
boolean a layer; `sparse_mla_config.py` is the caller. A configuration that uses two notations must mean the
same with both, because engines differ in which of them they read.

Source of the notations: IndexShare (arXiv 2603.12201) as transformers' glm_moe_dsa reads it.
"""

from collections.abc import Callable, Sequence

from hisparse.errors import CheckpointError
from hisparse.models.config_values import Config, positive_int

FULL = {"full": True, "shared": False, "F": True, "S": False}
DEFAULT_OFFSET = 2  # of index_skip_topk_offset, as in transformers


def layers_with_indexer(config: Config, num_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it computes a selection; all do where the configuration says nothing.

    Raises `CheckpointError` for a notation that is not known, for one that has another number of layers, for
    two that contradict each other, and for a first layer that has nothing to share.
    """
    found = {key: read(config, num_layers) for key, read in NOTATIONS.items() if config.get(key) is not None}
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"config.json: {' and '.join(found)} contradict each other about which layers have an indexer; "
            "keep the one that the weights were made with"
        )
    layers = next(iter(found.values()), (True,) * num_layers)
    if not layers[0]:
        raise CheckpointError(
            f"config.json: {next(iter(found))} makes layer 0 a shared one, but no layer before it selects: "
            "the first layer must have its own indexer"
        )
    return layers


def anchors_of(has_indexer: Sequence[bool]) -> tuple[int, ...]:
    """For each layer, the layer whose selection it uses: itself, or the last before it that selects."""
    anchors: list[int] = []
    for layer, own in enumerate(has_indexer):
        anchors.append(layer if own else anchors[-1])
    return tuple(anchors)


def _from_types(config: Config, num_layers: int) -> tuple[bool, ...]:
    return _read_names("indexer_types", config["indexer_types"], num_layers)


def _from_pattern(config: Config, num_layers: int) -> tuple[bool, ...]:
    return _read_names("index_topk_pattern", config["index_topk_pattern"], num_layers)


def _read_names(key: str, names: object, num_layers: int) -> tuple[bool, ...]:
    if not isinstance(names, str | list) or not names:
        raise CheckpointError(f"config.json: {key} must be a name for each layer, got {names!r}")
    unknown = [name for name in names if not isinstance(name, str) or name not in FULL]
    if unknown:
        raise CheckpointError(
            f"config.json: {key} has {unknown[0]!r}, which is not known; expected 'full' or 'shared', or 'F' or 'S'"
        )
    if len(names) != num_layers:
        raise CheckpointError(f"config.json: {key} has {len(names)} layers, but num_hidden_layers is {num_layers}")
    return tuple(FULL[name] for name in names)


def _from_frequency(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Every `index_topk_freq`-th layer, counted from the last of the `index_skip_topk_offset` first, which all do."""
    frequency = positive_int(config, "index_topk_freq")
    if frequency == 1:  # all of them, whatever the offset
        return (True,) * num_layers
    offset = positive_int(config, "index_skip_topk_offset", DEFAULT_OFFSET)
    return tuple(max(layer - offset + 1, 0) % frequency == 0 for layer in range(num_layers))


NOTATIONS: dict[str, Callable[[Config, int], tuple[bool, ...]]] = {
    "indexer_types": _from_types,
    "index_topk_pattern": _from_pattern,
    "index_topk_freq": _from_frequency,
}
