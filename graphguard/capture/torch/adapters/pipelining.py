"""torch.distributed.pipelining."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.pipelining import _backward as backward
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import InferenceMode

if TYPE_CHECKING:
    from graphguard.capture.torch.record.recorder import Recorder
    from graphguard.capture.torch.world.objects import ObjectExchange


def adjust_pipelining(recorder: Recorder, objects: ObjectExchange) -> None:
    """The stages vote, with tensors whose values they read, whether shapes are known beforehand: vote with objects."""

    warm_up = schedules._PipelineSchedule._warmup_p2p

    def vote(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        if not all(isinstance(stage, schedules.PipelineStage) for stage in stages):
            warm_up(self, stages, has_backward, p2p_done)
            return
        recorder.assume("the warm-up messages of pipeline schedules carry no data of the program")
        static = not any(InferenceMode.needs_dynamic(stage._user_meta, has_backward) for stage in stages)
        votes: list[bool] = [False] * stages[0].group_size
        objects.all_gather_object(votes, static, stages[0].group)
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC if all(votes) else InferenceMode.DYNAMIC

    group_parameters = backward.get_param_groups

    def group_in_order(inputs: list[Any], parameters: list[Any], reverse_edges: Any) -> list[dict[str, Any]]:
        """Its groups are sets of autograd nodes, whose order changes from run to run."""
        place = {parameter: index for index, parameter in enumerate(parameters)}
        groups = group_parameters(inputs, parameters, reverse_edges)
        for group in groups:
            group["params"] = sorted(group["params"], key=place.__getitem__)
            group["intermediates"] = sorted(group["intermediates"], key=lambda node: node._sequence_nr())
        return sorted(groups, key=lambda group: place[group["params"][0]])

    schedules._PipelineSchedule._warmup_p2p = vote
    backward.get_param_groups = group_in_order
