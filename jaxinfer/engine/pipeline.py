"""The pipe axis: a model's layers in stages, each on devices of its own, and several steps on their way through them.

      steps of groups 0 1 0 1        stage 0   | 0 | 1 | 0 | 1 |
      (the scheduler's turns)        stage 1       | 0 | 1 | 0 | 1 |
                                                 ^ tokens of group 0 are back before its next step begins

Every stage is a `Runner` with weights, caches, tables and carry of its own, and sees the same steps in the same order.
What travels is the residual stream [T, hidden] from stage to stage, and the sampled tokens from the last to the first.
All of that is dispatched ahead: the host waits for nothing but the tokens of the oldest step.

Where stages lie in several processes, each has the runners of its own devices. Tokens then go from host to host, which
all schedulers need anyway, and a group's next step is planned when they are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.batch import BatchShape
from jaxinfer.core import StepPlan, StepResult
from jaxinfer.engine.links import Link, is_spread, move, pack_result, unpack_result
from jaxinfer.engine.runner import InFlight, Runner
from jaxinfer.sharding.processes import current


class Pipeline:
    """Stages behind the interface of one `Runner`.

    Args:
      runners: of the stages that lie in this process, by their numbers.
      meshes: of all stages, two at least.
    """

    decode_steps = 1
    """The next step of a row begins at the first stage, so no program can run several."""

    def __init__(self, runners: Mapping[int, Runner], meshes: Sequence[Mesh]) -> None:
        self.stages = list(runners.values())
        self.ladder = self.stages[0].ladder
        self.num_groups = len(meshes)
        self.num_devices = sum(mesh.size for mesh in meshes)
        self.has_late_tokens = is_spread(*meshes)
        self._runners, self._meshes = runners, meshes
        self._links = [Link(*pair) if is_spread(*pair) else None for pair in pairwise(meshes)]
        self._speaker = min(device.process_index for device in meshes[-1].devices.flat)  # tells results to the others
        self._returning: dict[int, tuple[jax.Array, np.ndarray]] = {}

    def reset(self) -> None:
        """As `Runner.reset`, of all stages."""
        self._returning.clear()
        for stage in self.stages:
            stage.reset()

    def warm_up_all(self, repeats: int) -> None:
        """As `Runner.warm_up_all`, of all stages and of what is between them."""
        for stage in self.stages:
            stage.warm_up_all(repeats)
        for shape in self.ladder.shapes:
            residual = None
            for number in range(self.num_groups):
                arrived = self._pass_on(number, residual, shape)
                runner = self._runners.get(number)
                residual = None if runner is None else runner.no_residual(shape)
                jax.block_until_ready(arrived)

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
        if plan.group in self._returning:
            self._runners[0].receive(*self._returning.pop(plan.group))
        shape = self.ladder.fit(plan.num_tokens, plan.num_rows)
        packed, residual, last = self.stages[0].pack(plan, shape), None, self.num_groups - 1
        for number in range(last):
            arrived, runner = self._pass_on(number, residual, shape), self._runners.get(number)
            residual = None if runner is None else runner.relay(plan, packed, arrived)
        arrived = self._pass_on(last, residual, shape)
        if last not in self._runners:
            return InFlight(plan, None)
        step = self._runners[last].dispatch(plan, packed, arrived)
        if not self.has_late_tokens:
            assert step.output is not None
            slots = _sampled_slots(plan, shape.num_rows, self.stages[0].shapes.num_slots)
            self._returning[plan.group] = move(step.output.tokens, self._meshes[0]), slots
        return step

    def _pass_on(self, number: int, residual: jax.Array | None, shape: BatchShape) -> jax.Array | None:
        """What a stage reads of the one before: nothing for the first, and where neither is here."""
        if number == 0:
            return None
        link, programs = self._links[number - 1], self.stages[0].programs
        if link is not None:
            return link.send(residual, (shape.num_tokens, programs.hidden_size), programs.dtype)
        return None if residual is None else move(residual, self._meshes[number])

    def fetch(self, step: InFlight) -> StepResult:
        """Waits for a step's tokens."""
        last = self._runners.get(self.num_groups - 1)
        result = None if last is None else last.fetch(step)
        if not self.has_late_tokens:
            assert result is not None
            return result
        processes = current()
        assert processes is not None
        speaks = processes.index == self._speaker
        told = processes.exchange(pack_result(result, step.plan) if speaks and result is not None else None)
        return result or unpack_result(told[self._speaker], step.plan)


def _sampled_slots(plan: StepPlan, num_rows: int, num_slots: int) -> np.ndarray:
    """int32 [S]: the slot of each row that samples, B for the others."""
    slots, num_decodes = np.full(num_rows, num_slots, np.int32), len(plan.decodes)
    slots[:num_decodes] = plan.decodes.slots
    slots[num_decodes : plan.num_rows] = [row.slot if row.samples else num_slots for row in plan.others]
    return slots
