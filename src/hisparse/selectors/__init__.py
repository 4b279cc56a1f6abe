"""Selectors: what decides which positions a layer reads. One file each; an indexer has its own inputs (dsa.py)."""

from hisparse.selectors.all_positions import AllPositions
from hisparse.selectors.attention_mass import AttentionMass
from hisparse.selectors.dsa import DSA, Indexed
from hisparse.selectors.quest import AGGREGATIONS, Quest
from hisparse.selectors.selector import Selected, Selector

__all__ = ["AGGREGATIONS", "DSA", "AllPositions", "AttentionMass", "Indexed", "Quest", "Selected", "Selector"]
