"""Transfer of the actor's weights to engines; :mod:`~rlightning.rollout.weights.driver` has a diagram."""

from rlightning.rollout.weights.source import ChunkPlan, WeightSource, plan_chunks

__all__ = ["ChunkPlan", "WeightSource", "plan_chunks"]
