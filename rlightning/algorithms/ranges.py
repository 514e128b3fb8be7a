"""Checks of the algorithms' numbers, before any model loads."""

from rlightning.errors import ConfigError


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Refuse bounds between which the ratio cannot move."""
    if not 0 < clip_low <= 1:
        raise ConfigError(f"clip_low={clip_low} must be in (0, 1]: ratios are clipped at 1 - clip_low. Try 0.2.")
    if clip_high <= 0:
        raise ConfigError(f"clip_high={clip_high} must be above 0: ratios are clipped at 1 + clip_high. Try 0.2.")
    if dual_clip is not None and dual_clip <= 1 + clip_high:
        raise ConfigError(f"dual_clip={dual_clip} must be above 1 + clip_high = {1 + clip_high}. Try 3.0, or null.")


def check_positive(name: str, value: float) -> None:
    """Refuse what is not above 0."""
    if value <= 0:
        raise ConfigError(f"{name}={value} must be above 0.")
