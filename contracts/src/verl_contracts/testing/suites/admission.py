# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of an `AdmissionPolicy`: no token beyond the bound, nothing trained twice or lost, no standstill.

Most of it is one state machine that plays producer, replicas and trainer in every order that hypothesis can think of.
"""

from __future__ import annotations

import abc
import json
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from verl_contracts.errors import StateError
from verl_contracts.samples import GroupUid
from verl_contracts.testing.suites.base import ContractSuite
from verl_contracts.training import DropReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from verl_contracts.events import JsonValue
    from verl_contracts.training import AdmissionPolicy

__all__ = ["AdmissionPolicySuite"]


def _uid(row: int) -> GroupUid:
    return GroupUid(epoch=0, row=row)


A, B, C, D = (_uid(row) for row in range(4))


class AdmissionPolicySuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `policy`. The policy must wait for groups that are due, and drop none by itself."""

    examples: int = 50
    """How many runs of the state machine are tried."""
    shrinks: bool = True
    """Whether a failure is made as short as possible before it is shown, which takes its time."""

    @abc.abstractmethod
    def policy(self, *, max_staleness: int, batch_groups: int) -> AdmissionPolicy:
        """Return a fresh policy for at least 100 steps, at step 1 with version 0 acknowledged."""

    def test_room_follows_the_formula(self) -> None:
        for k in (0, 1, 2, 5):
            policy = self.policy(max_staleness=k, batch_groups=3)
            assert (policy.step, policy.room()) == (1, (k + 1) * 3)
            for row in range((k + 1) * 3):
                policy.admit(_uid(row))
            assert policy.room() == 0
            with pytest.raises(StateError):
                policy.admit(_uid(1000))

    def test_room_grows_only_when_weights_arrive(self) -> None:
        policy = self.policy(max_staleness=0, batch_groups=1)
        policy.admit(A)
        policy.finish(A, oldest_version=0)
        policy.trained((A,))
        assert (policy.step, policy.room()) == (2, 0), "version 1 serves nowhere yet"
        policy.acknowledge(1)
        assert policy.room() == 1

    def test_uid_is_admitted_once(self) -> None:
        policy = self.policy(max_staleness=2, batch_groups=2)
        policy.admit(A)
        with pytest.raises(StateError):
            policy.admit(A)
        assert policy.room() == 5

    def test_dropped_group_makes_room_and_is_not_selected(self) -> None:
        policy = self.policy(max_staleness=0, batch_groups=1)
        policy.admit(A)
        policy.finish(A, oldest_version=0)
        policy.drop(A, DropReason("too few scored samples"))
        assert policy.select() is None
        assert policy.room() == 1

    def test_unknown_group_is_refused(self) -> None:
        policy = self.policy(max_staleness=0, batch_groups=1)
        with pytest.raises(StateError):
            policy.finish(A, oldest_version=0)
        with pytest.raises(StateError):
            policy.drop(A, DropReason("never there"))

    def test_batch_waits_for_groups_and_names_them(self) -> None:
        policy = self.policy(max_staleness=0, batch_groups=2)
        assert (policy.select(), policy.blocking()) == (None, ())
        policy.admit(A)
        policy.admit(B)
        policy.finish(A, oldest_version=0)
        assert policy.select() is None
        assert policy.blocking() == (B,)
        policy.finish(B, oldest_version=0)
        assert set(policy.select() or ()) == {A, B}

    def test_select_changes_nothing(self) -> None:
        policy = self.policy(max_staleness=1, batch_groups=1)
        for uid in (A, B):
            policy.admit(uid)
            policy.finish(uid, oldest_version=0)
        assert policy.select() == policy.select()
        assert (policy.step, policy.room()) == (1, 0)

    def test_only_the_selected_batch_is_trained(self) -> None:
        policy = self.policy(max_staleness=1, batch_groups=1)
        policy.admit(A)
        policy.admit(B)
        policy.finish(A, oldest_version=0)
        with pytest.raises(StateError):
            policy.trained((B,))
        with pytest.raises(StateError):
            policy.trained(())
        assert policy.step == 1
        policy.trained((A,))
        assert policy.step == 2
        with pytest.raises(StateError):
            policy.trained((A,))

    def test_a_b_c_d_two_groups_are_never_due_in_one_step_of_one(self) -> None:
        """With bound 2, B before A and C is right, and D before both is a standstill or a broken bound in step 3."""
        policy = self.policy(max_staleness=2, batch_groups=1)
        for uid in (A, B, C):
            policy.admit(uid)
        assert policy.room() == 0
        policy.finish(B, oldest_version=0)
        assert policy.select() == (B,), "nothing is due in step 1, so whoever is ready is trained"
        policy.trained((B,))
        policy.acknowledge(1)
        assert policy.room() == 1
        policy.admit(D)
        policy.finish(D, oldest_version=1)
        assert policy.select() is None, "D now would leave A and C due in step 3, which trains one group"
        assert set(policy.blocking()) == {A, C}
        policy.finish(C, oldest_version=0)
        assert policy.select() == (C,)
        policy.trained((C,))
        assert policy.select() is None
        assert policy.blocking() == (A,), "A is due in step 3"
        policy.finish(A, oldest_version=0)
        assert policy.select() == (A,)
        policy.trained((A,))
        assert policy.select() == (D,)

    def test_group_that_no_step_can_train_is_refused(self) -> None:
        policy = self.policy(max_staleness=0, batch_groups=1)
        policy.admit(A)
        policy.finish(A, oldest_version=0)
        policy.trained((A,))
        policy.acknowledge(1)
        policy.admit(B)
        assert policy.finish(B, oldest_version=0) is False, "trained in step 2, version 0 would be 1 behind"
        assert policy.select() is None
        policy.drop(B, DropReason("too stale"))
        assert policy.room() == 1

    def test_state_goes_through_json_and_back(self) -> None:
        policy = self.policy(max_staleness=2, batch_groups=2)
        for row in range(6):
            policy.admit(_uid(row))
        for row in (4, 1, 5):
            policy.finish(_uid(row), oldest_version=0)
        policy.trained(policy.select() or ())
        policy.acknowledge(1)
        policy.admit(_uid(7))
        copy = self.policy(max_staleness=2, batch_groups=2)
        copy.restore(cast("Mapping[str, JsonValue]", json.loads(json.dumps(policy.state()))))
        for one in (policy, copy):
            for row in range(8):
                if row in (0, 2, 3, 7):
                    one.finish(_uid(row), oldest_version=1 if row == 7 else 0)
        while (batch := policy.select()) is not None:
            assert (copy.step, copy.room(), copy.select()) == (policy.step, policy.room(), batch)
            policy.trained(batch)
            copy.trained(batch)
        assert (copy.select(), copy.room(), copy.blocking()) == (None, policy.room(), policy.blocking())

    @pytest.mark.parametrize(("max_staleness", "batch_groups"), [(0, 1), (0, 3), (1, 2), (2, 1), (3, 2), (8, 4)])
    def test_every_order_of_events_keeps_the_bound(self, max_staleness: int, batch_groups: int) -> None:
        machine = _machine(
            lambda: self.policy(max_staleness=max_staleness, batch_groups=batch_groups), max_staleness, batch_groups
        )
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=40,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
                phases=tuple(Phase) if self.shrinks else (Phase.generate,),
            ),
        )


def _machine(make: Callable[[], AdmissionPolicy], k: int, batch: int) -> type[RuleBasedStateMachine]:
    """Return a machine that plays everybody around one policy, with its own books."""

    class Machine(RuleBasedStateMachine):
        @initialize()
        def start(self) -> None:
            self.policy = make()
            self.acknowledged = 0
            self.next_row = 0
            self.running: dict[GroupUid, int] = {}
            """Admitted, not finished → version acknowledged at its admission."""
            self.ready: dict[GroupUid, int] = {}
            """Finished, not trained → oldest version."""
            self.gone: set[GroupUid] = set()

        def _admit(self) -> None:
            uid = _uid(self.next_row)
            self.next_row += 1
            self.policy.admit(uid)
            self.running[uid] = self.acknowledged

        def _finish(self, uid: GroupUid, version: int) -> None:
            del self.running[uid]
            assert self.policy.finish(uid, oldest_version=version) is True, (
                f"{uid} holds nothing older than was acknowledged at its admission, yet no step may train it"
            )
            self.ready[uid] = version

        def _train(self) -> bool:
            selected = self.policy.select()
            if selected is None:
                return False
            step = self.policy.step
            assert len(set(selected)) == batch, f"a batch has {batch} different groups, got {selected}"
            for uid in selected:
                assert uid not in self.gone, f"{uid} would be trained or dropped twice"
                assert uid in self.ready, f"{uid} is not finished"
                staleness = (step - 1) - self.ready[uid]
                assert staleness <= k, f"{uid} of version {self.ready[uid]} is {staleness} behind in step {step}"
            self.policy.trained(selected)
            assert self.policy.step == step + 1
            for uid in selected:
                del self.ready[uid]
                self.gone.add(uid)
            return True

        @precondition(lambda self: self.policy.room() > 0)
        @rule()
        def admit(self) -> None:
            self._admit()

        @precondition(lambda self: self.running)
        @rule(data=st.data())
        def finish(self, data: st.DataObject) -> None:
            uid = data.draw(st.sampled_from(sorted(self.running)))
            newest = self.policy.step - 1
            self._finish(uid, data.draw(st.integers(self.running[uid], newest)))

        @precondition(lambda self: self.running or self.ready)
        @rule(data=st.data())
        def drop(self, data: st.DataObject) -> None:
            uid = data.draw(st.sampled_from(sorted([*self.running, *self.ready])))
            self.policy.drop(uid, DropReason("drawn"))
            self.running.pop(uid, None)
            self.ready.pop(uid, None)
            self.gone.add(uid)

        @rule()
        def train(self) -> None:
            self._train()

        @precondition(lambda self: self.running)
        @rule(data=st.data(), rounds=st.integers(1, k + 3))
        def go_on_without_some(self, data: st.DataObject, rounds: int) -> None:
            """Some groups are slow: the others come, finish and are trained as far as the policy lets them."""
            slow = data.draw(st.sets(st.sampled_from(sorted(self.running)), min_size=1))
            for _ in range(rounds):
                while self.policy.room() > 0:
                    self._admit()
                for uid in sorted(self.running.keys() - slow):
                    self._finish(uid, self.running[uid])
                if not self._train():
                    return
                self.acknowledged = self.policy.step - 1
                self.policy.acknowledge(self.acknowledged)

        @precondition(lambda self: self.acknowledged < self.policy.step - 1)
        @rule(data=st.data())
        def acknowledge(self, data: st.DataObject) -> None:
            self.acknowledged = data.draw(st.integers(self.acknowledged + 1, self.policy.step - 1))
            self.policy.acknowledge(self.acknowledged)

        @invariant()
        def room_is_exact(self) -> None:
            outstanding = len(self.running) + len(self.ready)
            room = (k + self.acknowledged + 2 - self.policy.step) * batch - outstanding
            assert self.policy.room() == max(0, room)

        @invariant()
        def blocking_names_unfinished_groups_only(self) -> None:
            assert set(self.policy.blocking()) <= set(self.running)

        def teardown(self) -> None:
            """Let everything finish: three more batches must come out, in which nothing is too stale."""
            if not hasattr(self, "policy"):
                return
            for _ in range(3):
                self.acknowledged = self.policy.step - 1
                self.policy.acknowledge(self.acknowledged)
                while self.policy.room() > 0:
                    self._admit()
                for uid in sorted(self.running):
                    self._finish(uid, self.running[uid])
                assert self._train(), f"standstill in step {self.policy.step}: everything is finished"

    return Machine
