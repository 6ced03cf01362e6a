"""The pipe axis: a model's layers in stages, each on devices of its own, and several steps on their way through them.

      steps of groups 0 1 0 1        stage 0   | 0 | 1 | 0 | 1 |
      (the scheduler's turns)        stage 1       | 0 | 1 | 0 | 1 |
                                                 ^ tokens of group 0 are back before its next step begins

Every stage is a `Runner` with weights, caches, tables and carry of its own, and sees the same steps in the same order.
What travels is the residual stream [T, hidden] from stage to stage, and the sampled tokens from the last to the first.
All of that is dispatched ahead: the host waits for nothing but the tokens of the oldest step.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.core import StepPlan, StepResult
from jaxinfer.engine.runner import InFlight, Runner
from jaxinfer.sharding.placement import replicated


class Pipeline:
    """Stages behind the interface of one `Runner`.

    Args:
      stages: in their order, each of whose programs has a mesh; two at least.
    """

    decode_steps = 1
    """The next step of a row begins at the first stage, so no program can run several."""

    def __init__(self, stages: list[Runner]) -> None:
        self.stages = stages
        self.ladder = stages[0].ladder
        self._returning: dict[int, tuple[jax.Array, np.ndarray]] = {}

    def reset(self) -> None:
        """As `Runner.reset`, of all stages."""
        self._returning.clear()
        for stage in self.stages:
            stage.reset()

    def may_burst(self, plan: StepPlan) -> bool:
        """Never: see `decode_steps`."""
        return False

    def dispatch_burst(self, plans: list[StepPlan]) -> list[InFlight]:
        """Sends plans to the devices, one by one."""
        return [self.dispatch(plan) for plan in plans]

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Sends a plan through all stages and returns at once.

        The first stage takes over the tokens of the group's last step only now: all that it was given before runs ahead
        of them. A slot is always of the same group, so tokens for a former owner arrive before those for the next.
        """
        first, *middle, last = self.stages
        if plan.group in self._returning:
            first.receive(*self._returning.pop(plan.group))
        packed = first.pack(plan)
        residual = first.relay(plan, packed)
        for stage in middle:
            residual = stage.relay(plan, packed, _move(residual, stage))
        step = last.dispatch(plan, packed, _move(residual, last))
        assert step.output is not None
        slots = _sampled_slots(plan, step.output.tokens.shape[0], first.shapes.num_slots)
        self._returning[plan.group] = _move(step.output.tokens, first), slots
        return step

    def fetch(self, step: InFlight) -> StepResult:
        """Waits for a step's tokens."""
        return self.stages[-1].fetch(step)


def _move(array: jax.Array, stage: Runner) -> jax.Array:
    """The array, whole on every device of its stage, on the devices of another. Copies from device to device."""
    mesh = stage.programs.mesh
    assert isinstance(mesh, Mesh)
    return jax.device_put(array, replicated(mesh))


def _sampled_slots(plan: StepPlan, num_rows: int, num_slots: int) -> np.ndarray:
    """int32 [S]: the slot of each row that samples, B for the others."""
    slots, num_decodes = np.full(num_rows, num_slots, np.int32), len(plan.decodes)
    slots[:num_decodes] = plan.decodes.slots
    slots[num_decodes : plan.num_rows] = [row.slot if row.samples else num_slots for row in plan.others]
    return slots
