"""Selectors: what decides which positions a layer reads. One file each, one Protocol."""

from hisparse.selectors.all_positions import AllPositions
from hisparse.selectors.attention_mass import AttentionMass, Ranking
from hisparse.selectors.dsa import DSA, Selected
from hisparse.selectors.quest import AGGREGATIONS, Quest
from hisparse.selectors.selector import Selector

__all__ = ["AGGREGATIONS", "DSA", "AllPositions", "AttentionMass", "Quest", "Ranking", "Selected", "Selector"]
