"""Fused forwards for models that exist: `accelerate(model)`, `restore(model)`."""

from bertfast.swap.attention_interface import register_attention
from bertfast.swap.core import SwapError, accelerate, restore
from bertfast.swap.report import SwapReport

__all__ = ["SwapError", "SwapReport", "accelerate", "register_attention", "restore"]
