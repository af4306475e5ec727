"""Planted pairs: models of true shapes and weight types with random weights, whose text, routing and acceptance are as ordered.

They time what real weights would take, where real weights cannot be had. Whatever was measured on one says "planted".
"""

from moespac_llamacpp.synth.pair import Order, Pair, write_pair
from moespac_llamacpp.synth.plan import Plan
from moespac_llamacpp.synth.writer import RoomError

__all__ = ["Order", "Pair", "Plan", "RoomError", "write_pair"]
