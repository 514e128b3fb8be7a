"""The one way of the actor's weights to engines; :mod:`~rlightning.rollout.weights.driver` has the picture."""

from rlightning.rollout.weights.source import ChunkPlan, WeightSource, plan_chunks

__all__ = ["ChunkPlan", "WeightSource", "plan_chunks"]
