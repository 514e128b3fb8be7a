"""Prompt sets: reading, formatting, and the resumable order of training."""

from rlightning.data.module import PromptDataModule, ValidationSet
from rlightning.data.stream import PromptStream

__all__ = ["PromptDataModule", "PromptStream", "ValidationSet"]
