"""The gate's protocol: mutual exclusion, first come first served, no lost wake-up, death of a holder."""

import queue
import threading
import time

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draftsmith.compiling.gate import Gate

PATIENCE = 10.0


class Visitor(threading.Thread):
    """A real thread that enters and leaves the gate on command."""

    def __init__(self, gate: Gate, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.gate, self.commands = gate, queue.SimpleQueue[str]()
        self.inside = threading.Event()
        self.start()

    def run(self) -> None:
        while (command := self.commands.get()) != "end":
            with self.gate.shared() if command == "shared" else self.gate.exclusive():
                self.inside.set()
                order = self.commands.get()
                if order == "die":
                    # Unwinding would leave the gate politely; a thread that vanishes does not.
                    self._vanish(command)
                    return
            self.inside.clear()

    def _vanish(self, command: str) -> None:
        me = threading.current_thread()
        hold = self.gate._owner if command == "exclusive" else self.gate._inside[me]
        assert hold is not None
        hold.depth += 1


class GateMachine(RuleBasedStateMachine):
    """Real threads against a model: a list of who is inside and a first-come-first-served queue."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.visitors: dict[str, Visitor] = {}
        self.model_inside: dict[str, str] = {}
        self.model_queue: list[tuple[str, str]] = []
        self.count = 0

    def admit(self) -> None:
        """Let the model's queue move: readers together, a writer alone, never past an earlier writer."""
        while self.model_queue:
            name, kind = self.model_queue[0]
            alone = "exclusive" in self.model_inside.values()
            if alone or (kind == "exclusive" and self.model_inside):
                return
            self.model_queue.pop(0)
            self.model_inside[name] = kind

    def outside(self) -> list[str]:
        waiting = {name for name, _ in self.model_queue}
        return [n for n in self.visitors if n not in self.model_inside and n not in waiting]

    @rule(kind=st.sampled_from(["shared", "shared", "exclusive"]))
    def arrive(self, kind: str) -> None:
        free = self.outside()
        if not free and len(self.visitors) < 6:
            self.count += 1
            free = [f"v{self.count}"]
            self.visitors[free[0]] = Visitor(self.gate, free[0])
        if not free:
            return
        name = free[0]
        queued = len(self.gate._queue)
        self.visitors[name].commands.put(kind)
        self.model_queue.append((name, kind))
        self.admit()
        if name not in self.model_inside:
            # Its place in the queue counts from when it stands there.
            deadline = time.monotonic() + PATIENCE
            while len(self.gate._queue) == queued and time.monotonic() < deadline:
                pass

    @precondition(lambda self: self.model_inside)
    @rule(data=st.data(), order=st.sampled_from(["leave", "leave", "leave", "die"]))
    def go(self, data: st.DataObject, order: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.model_inside)))
        visitor = self.visitors[name]
        assert visitor.inside.wait(PATIENCE)
        visitor.commands.put(order)
        if order == "die":
            visitor.join(PATIENCE)
            assert not visitor.is_alive()
            del self.visitors[name]
        else:
            deadline = time.monotonic() + PATIENCE
            while visitor.inside.is_set() and time.monotonic() < deadline:
                pass
        del self.model_inside[name]
        self.admit()

    @invariant()
    def threads_are_where_the_model_says(self) -> None:
        for name in self.model_inside:
            assert self.visitors[name].inside.wait(PATIENCE), f"{name} was never let in"
        for name, _ in self.model_queue:
            assert not self.visitors[name].inside.is_set(), f"{name} is inside out of turn"
        kinds = list(self.model_inside.values())
        assert "exclusive" not in kinds or len(kinds) == 1

    def teardown(self) -> None:
        while self.model_inside or self.model_queue:
            for name in list(self.model_inside):
                assert self.visitors[name].inside.wait(PATIENCE)
                self.visitors[name].commands.put("leave")
                del self.model_inside[name]
            self.admit()
        for visitor in self.visitors.values():
            visitor.commands.put("end")
        for visitor in self.visitors.values():
            visitor.join(PATIENCE)
            assert not visitor.is_alive()


TestGate = GateMachine.TestCase
# Not shrunk: a failing example waits out PATIENCE each time.
TestGate.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)


def test_entries_nest_but_never_upgrade() -> None:
    gate = Gate()
    with gate.shared(), gate.shared():
        assert gate.holders() == [threading.current_thread().name]
        with pytest.raises(RuntimeError, match="leave shared"), gate.exclusive():
            pass
    assert gate.holders() == []
    with gate.exclusive(), gate.exclusive(), gate.shared():
        assert len(gate.holders()) == 1
    assert gate.holders() == []
    assert gate.metrics.exclusive_holds == 1


def test_an_exception_inside_leaves_the_gate() -> None:
    gate = Gate()
    for enter in (gate.shared, gate.exclusive):
        with pytest.raises(ValueError, match="x"), enter():
            raise ValueError("x")
        assert gate.holders() == []


def test_metrics_say_who_waited_and_how_long() -> None:
    gate = Gate()
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with gate.exclusive():
            inside.set()
            leave.wait(PATIENCE)

    def visit() -> None:
        with gate.shared():
            pass

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(PATIENCE)
    waiter = threading.Thread(target=visit, name="waiter")
    waiter.start()
    while not gate._queue:
        pass
    assert gate.holders() == [holder.name]
    leave.set()
    waiter.join(PATIENCE)
    holder.join(PATIENCE)
    assert gate.metrics.wait_s["waiter"] > 0
    assert gate.metrics.longest_s > 0
    assert gate.metrics.exclusive_s >= gate.metrics.longest_s


def test_a_dead_holder_is_taken_out_and_counted() -> None:
    gate = Gate()
    visitor = Visitor(gate, "doomed")
    visitor.commands.put("exclusive")
    assert visitor.inside.wait(PATIENCE)
    visitor.commands.put("die")
    visitor.join(PATIENCE)
    with gate.shared():
        assert gate.holders() == [threading.current_thread().name]
    assert gate.metrics.died_inside == 1
