"""Two streams of the prefill path share no memory that an event does not order."""

import pytest
import torch

import prefill_backends
from quantkv import testing
from quantkv.implementations.prefill import attend as prefill
from quantkv.implementations.prefill import backends, streams
from test_prefill_rounds import KIND, NAME, ROW, SINKS, fine_cuts, make  # noqa: F401  a fixture

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="streams are played on a CPU")


class Recorder(streams.Lanes):
    """Lanes that run all in the order of the calls, and write down which of them a GPU would be free to run in another."""

    def __init__(self, device, count):
        self.count, self.lane, self.tails, self.log, self.lent = count, 0, [set() for _ in range(count)], [], []
        self.ran = []
        Recorder.last = self

    def on(self, lane):
        recorder = self

        class Entered:
            def __enter__(self):
                self.before, recorder.lane = recorder.lane, lane

            def __exit__(self, *error):
                recorder.lane = self.before

        return Entered()

    def did(self, reads, writes):
        """An operation of the present lane: after all before it there, and what that has waited for."""
        before = frozenset(self.tails[self.lane])
        for other, (_, others_reads, others_writes) in enumerate(self.log):
            if other not in before and (writes & (others_reads | others_writes) or reads & others_writes):
                raise AssertionError(
                    f"operation {len(self.log)} on lane {self.lane} may run before or beside {other}, whose memory it uses"
                )
        self.log.append((before, reads, writes))
        self.ran.append(self.lane)
        self.tails[self.lane] |= {len(self.log) - 1}

    def mark(self, lane):
        return frozenset(self.tails[lane])

    def wait(self, lane, point):
        self.tails[lane] |= point

    def lend(self, t, lane):
        self.lent.append((t.untyped_storage().data_ptr(), lane))


def recorded(monkeypatch, without=None):
    """The steps of a call tell the recorder which memory they read and write. without: a method of the lanes that does nothing."""
    monkeypatch.setattr(prefill, "Lanes", Recorder)
    if without:
        monkeypatch.setattr(Recorder, without, lambda self, *args: frozenset())
    kept = []  # memory that is given back is the allocator's affair, which `lend` tells what it must know

    def at(*tensors):
        kept.extend(tensors)
        return {t.untyped_storage().data_ptr() for t in tensors if t is not None}

    steps, attend = prefill.TorchSteps, backends.attend
    stock = {name: getattr(steps, name) for name in ("gather", "map_query", "combine", "finish")}

    def gather(self, table, round, scratch, blocks=None):
        Recorder.last.did(at(table), at(*scratch))
        stock["gather"](self, table, round, scratch, blocks)

    def map_query(self, q, front, back):
        rows = stock["map_query"](self, q, front, back).clone()
        Recorder.last.did(at(q), at(rows))
        return rows

    def attended(backend, q, k, v, *rest):
        found = attend(backend, q, k, v, *rest)
        Recorder.last.did(at(q, k, v), at(*found))
        return found

    def combine(self, a, b):
        combined = stock["combine"](self, a, b)
        Recorder.last.did(at(*a, *b), at(*combined))
        return combined

    def finish(self, total, last, out, lse, sinks=None):
        Recorder.last.did(at(*last, *(total or ())), at(out, lse))
        monkeypatch.setattr(steps, "combine", stock["combine"])
        stock["finish"](self, total, last, out, lse, sinks)
        monkeypatch.setattr(steps, "combine", combine)

    for name, function in (("gather", gather), ("map_query", map_query), ("combine", combine), ("finish", finish)):
        monkeypatch.setattr(steps, name, function)
    monkeypatch.setattr(backends, "attend", attended)


@pytest.mark.parametrize("backend", ["math", "flash3 operator", "hopper", "cudnn", "cudnn graph"])
def test_the_order_of_events(backend, monkeypatch):
    """Two streams share no memory that an event does not order; the result is that of one."""
    b = make("int4", queries=(150, 33, 20), keys=(300, 100, 20))
    recorded(monkeypatch)
    call = b.call(sinks=SINKS)
    with prefill_backends.installed(monkeypatch, KIND[backend]):
        prefill.serve(call, backend=NAME.get(backend, backend), overlap=True, scratch_bytes=2 * 64 * ROW)
    testing.check(b, (call.out, call.lse), sinks=SINKS)
    log = Recorder.last.log
    assert Recorder.last.tails[0] == {*range(len(log))}, "the caller's stream goes on before all is done"
    beside = sum(i not in after for j, (after, *_) in enumerate(log) for i in range(j))
    assert Recorder.last.count == 2 and beside > len(log), "nothing may run beside anything else"


def test_what_another_stream_uses_is_lent(monkeypatch):
    """Memory that one stream made and another reads is told so to the allocator."""
    b = make("int4", queries=(150,), keys=(300,))
    recorded(monkeypatch)
    seen, attend = [], backends.attend

    def attended(backend, q, *rest):
        found = attend(backend, q, *rest)
        seen.append((Recorder.last.lane, q.untyped_storage().data_ptr(), found))
        return found

    monkeypatch.setattr(backends, "attend", attended)
    call = b.call()
    prefill.serve(call, overlap=True, scratch_bytes=2 * 64 * ROW)
    lent = set(Recorder.last.lent)
    for lane, _, found in seen:
        assert lane == 0 or all((t.untyped_storage().data_ptr(), 0) in lent for t in found)
    users = {}
    for lane, q, _ in seen:
        users.setdefault(q, []).append(lane)
    assert any(len({*lanes}) == 2 for lanes in users.values())
    assert all((q, lane) in lent for q, lanes in users.items() for lane in {*lanes} - {lanes[0]})


@pytest.mark.parametrize("method", ["wait", "mark"])
def test_the_recorder_sees_a_missing_event(method, monkeypatch):
    b = make("int4", queries=(150,), keys=(300,))
    recorded(monkeypatch, without=method)
    with pytest.raises(AssertionError, match="may run before"):
        prefill.serve(b.call(), overlap=True, scratch_bytes=2 * 64 * ROW)


def test_a_plan_of_two_streams_is_captured_on_one(monkeypatch):
    b = make("int4", queries=(150,), keys=(300,))
    recorded(monkeypatch)
    call = b.call()
    plan = prefill.plan(call, overlap=True, scratch_bytes=2 * 64 * ROW)
    for capturing, lanes in ((False, 2), (True, 1)):
        monkeypatch.setattr(prefill, "_capturing", lambda q, capturing=capturing: capturing)
        prefill.follow(call, plan)
        assert Recorder.last.count == lanes and {*Recorder.last.ran} == {*range(lanes)}
        testing.check(b, (call.out, call.lse))
