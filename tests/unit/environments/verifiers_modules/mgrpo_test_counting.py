"""A taskset of `verifiers` 0.4 for the tests: the model counts."""

import verifiers.v1 as vf


class CountData(vf.TaskData):
    """What is to be counted to."""

    goal: int


class Count(vf.Task[CountData]):
    """Right where the answer has the number."""

    @vf.reward
    async def counted(self, trace) -> float:
        return float(f"done {self.data.goal} " in (trace.branches[-1].messages[-1].content or ""))

    @vf.metric
    async def turns(self, trace) -> float:
        return float(len(trace.calls))


class CountTaskset(vf.Taskset[Count]):
    """Three tasks."""

    def load(self):
        for goal in range(3):
            yield Count(CountData(prompt=f"count to {goal}", goal=goal), self.config.task)


__all__ = ["CountTaskset"]
