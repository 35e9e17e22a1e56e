"""Servers of OpenEnv's library for the tests of the adaptor: a guessing game, and tools. The arguments are their ports."""

import asyncio
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """Guess the number."""

    value: int


class Hint(Observation):
    hint: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number = self.steps = 0

    def reset(self, seed=None, episode_id=None, name="you", **columns):
        self.number, self.steps = (seed or 0) % 10, 0
        return Hint(hint=f"Hello {name}, guess!")

    def step(self, action, timeout_s=None, **others):
        self.steps += 1
        if action.value == self.number:
            return Hint(hint="right", reward=1.0, done=True)
        if action.value < 0:
            raise ValueError("numbers are not negative")
        return Hint(hint="higher" if action.value < self.number else "lower", reward=-0.1)

    @property
    def state(self):
        return State(step_count=self.steps)


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")
        self.total = 0

        @server.tool()
        def add(number: int) -> str:
            """Adds to the total."""
            self.total += number
            return f"total {self.total}"

        @server.tool()
        def fail(text: str) -> str:
            """Fails."""
            raise RuntimeError(text)

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **columns):
        self.total = 0
        return Observation()

    def _step_impl(self, action, timeout_s=None, **others):
        return Observation()

    @property
    def state(self):
        return State()


async def main():
    apps = [
        create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=2),
        create_fastapi_app(Tools, Action, Observation, max_concurrent_envs=2),
    ]
    servers = [
        uvicorn.Server(uvicorn.Config(app, port=int(port), log_level="error"))
        for app, port in zip(apps, sys.argv[1:], strict=True)
    ]
    await asyncio.gather(*(server.serve() for server in servers))


if __name__ == "__main__":
    asyncio.run(main())
