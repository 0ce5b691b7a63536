"""Simulated processes: tasks with a clock of their own, that can end at any await and leave nothing running.

A process dies at once: from that moment none of its ports does anything, and its tasks are cancelled. What it had
in memory is gone with the objects; what it had handed to the broker, the database or a disk stays.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from evenhand.simulation.system.clock import CLOCK, Clock, VirtualLoop

Result = TypeVar("Result")
Report = Callable[[str, BaseException], None]

PROCESS: ContextVar["Process | None"] = ContextVar("process", default=None)


class Process:
    """One process of the simulated system."""

    def __init__(self, name: str, number: int, loop: VirtualLoop, clock: Clock, report: Report) -> None:
        """``number`` is this process's alone, ``name`` its host's.

        ``report`` hears of a task that ended with a fault of its own.
        """
        self.name = name
        self.number = number
        self.loop = loop
        self.clock = clock
        self.alive = True
        self.context: Context = copy_context()
        self.context.run(CLOCK.set, clock)
        self.context.run(PROCESS.set, self)
        self._report = report
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def within(self, call: Callable[[], Result]) -> Result:
        """Call in this process, by its clock."""
        return self.context.copy().run(call)

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine as a task of this process; a fault that ends it is reported."""
        task = self.loop.create_task(work, context=self.context.copy())
        task.add_done_callback(self._ended)
        return task

    def later(self, delay_s: float, call: Callable[..., Any], *arguments: Any) -> None:
        """Call in this process, unless it has died by then."""
        self.loop.call_later(delay_s, self._call, call, arguments, context=self.context.copy())

    def kill(self) -> None:
        """End at once."""
        if self.alive:
            self.alive = False
            for task in tuple(self._tasks):
                task.cancel()

    def check(self) -> None:
        """The first line of every port: a dead process does nothing."""
        if not self.alive:
            raise asyncio.CancelledError

    async def pause(self, seconds: float) -> None:
        """Wait, as for a network or a disk; does not return to a dead process."""
        self.check()
        await asyncio.sleep(seconds)
        self.check()

    def adopt(self, task: "asyncio.Task[Any]") -> None:
        """Know a task that was made in this process."""
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(task, None)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self.alive:
            self._report(self.name, error)

    def _call(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self.alive:
            call(*arguments)


def task_factory(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], context: Context | None = None
) -> "asyncio.Task[Any]":
    """Makes tasks and tells the process in whose context they run."""
    task = asyncio.Task(coro, loop=loop, context=context)
    process = context[PROCESS] if context is not None and PROCESS in context else PROCESS.get()
    if process is not None:
        process.adopt(task)
    return task
