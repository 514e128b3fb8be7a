"""Prompt sets: reading, formatting, tokenising, and the resumable order of training."""

from rlightning.data.module import PromptDataModule
from rlightning.data.stream import PromptStream
from rlightning.data.validation_sets import ValidationSet

__all__ = ["PromptDataModule", "PromptStream", "ValidationSet"]
