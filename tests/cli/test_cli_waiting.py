"""What is said while a command works, by a clock of the test's own."""

import math
from types import SimpleNamespace

import pytest

from quantkv import under_way
from quantkv.cli import costs, generate, models, options, readers, text, trials, waiting
from quantkv.cli import eval as evaluation
from quantkv.cli.waiting import EVERY, Estimate, Step, Work
from quantkv.implementations.cpu import compiling
from quantkv.integrations.transformers_model import CACHE
from quantkv.model_analysis.sensitivity import sensitivities
from quantkv.model_analysis.teacher_forced import FakeQuantizedCache
from quantkv.policy import Policy


@pytest.fixture(autouse=True)
def lines_by_the_clock(monkeypatch, no_lines_by_the_clock):
    """As they are for whoever runs a command."""
    monkeypatch.setattr(waiting, "EVERY", EVERY)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def told(steps, seconds, beyond=None):
    """Run steps that take `seconds` each, and look before every one: (seconds that are left, what the estimate says)."""
    estimate, now = Estimate(steps, beyond), 0.0
    found = []
    for number, took in enumerate(seconds):
        estimate.begin(number, now)
        found.append((math.fsum(seconds[number:]), estimate.left(now)))
        now += took
    estimate.begin(len(steps), now)
    assert estimate.left(now) is None
    return found


def test_steps_that_cost_alike_go_by_the_pace():
    assert told([Step("")] * 4, [5.0] * 4) == [(20.0, None), (15.0, 15.0), (10.0, 10.0), (5.0, 5.0)]


def test_every_kind_has_its_own_pace():
    """A pass that takes as long as all layers together is not taken for the pace of layers, once both were seen."""
    context = [Step("gradients"), *[Step("layer")] * 3]
    found = told(context * 2, [90.0, 2.0, 2.0, 2.0] * 2)
    assert [left for _, left in found[:2]] == [None, None]  # of a layer nothing is known yet
    assert all(left == pytest.approx(real) for real, left in found[2:])


def test_costs_weigh():
    assert told([Step("a", 100), Step("a", 400)], [10.0, 40.0])[1] == (40.0, 40.0)


def test_an_expensive_kind_is_known_before_it_comes():
    """One format takes a hundred times as long as the pass: by what a unit of it took in a trial, the first estimate holds."""
    steps = [Step(kind, 1024) for kind in ("exact", "int4", "trellis2")]
    seconds = [10.24, 20.48, 819.2]
    found = told(steps, seconds, {"int4": 0.01, "trellis2": 0.79})
    assert found[1] == (pytest.approx(839.68), pytest.approx(839.68))
    assert found[2] == (819.2, pytest.approx(819.2))


def test_what_is_seen_goes_before_what_was_believed():
    steps = [Step("exact"), Step("int4")] * 2
    assert told(steps, [1.0, 3.0, 1.0, 3.0], {"int4": 50.0})[2:] == [(4.0, 4.0), (3.0, 3.0)]


def test_a_step_counts_down_and_one_that_takes_longer_says_so_of_its_kind():
    estimate = Estimate([Step("a"), Step("a"), Step("a")])
    estimate.begin(0, 0.0)
    estimate.begin(1, 10.0)
    assert [estimate.left(now) for now in (10.0, 14.0, 20.0)] == [20.0, 16.0, 10.0]
    assert estimate.left(40.0) == 30.0  # thirty seconds and not through: the last one may take as long


def test_several_steps_at_once():
    """A batch of contexts is through: each took its share."""
    estimate = Estimate([Step("", 2.0)] * 4)
    estimate.begin(0, 0.0)
    estimate.begin(3, 12.0)
    assert estimate.left(12.0) == 4.0


def test_a_line_every_ten_seconds_in_a_long_step_too():
    clock, lines = Clock(), []
    work = Work("", Estimate([Step("a"), Step("b"), Step("b")]), lines.append, clock)
    work.on_step("exact", 0)
    for _ in range(12):
        clock.now += 2
        work.beat()
    work.on_step("trellis2", 1)
    clock.now += 30
    work.on_step("trellis2", 2)
    clock.now += 12
    work.beat(), work.beat()
    clock.now += 60
    work.on_step("", 3)
    work.beat()
    assert lines == [
        "0 of 3 steps, exact: 10 s so far",
        "0 of 3 steps, exact: 20 s so far",
        "2 of 3 steps, trellis2: about 30 s left",
        "2 of 3 steps, trellis2: about 18 s left",
    ]


def test_what_is_being_compiled_is_named():
    clock, lines = Clock(), []
    work = Work("reading the prompt", tell=lines.append, clock=clock)
    with under_way.compiling("attend by numba"), under_way.compiling("combine by numba"):
        clock.now += 86
        work.beat()
    clock.now += 10
    work.beat()
    assert lines == ["reading the prompt: 1 min 26 s so far; compiling combine by numba", "reading the prompt: 1 min 36 s so far"]


def test_a_thread_says_it_while_the_command_works(monkeypatch):
    """No wait by a clock: the main thread goes on when the other one has told its line."""
    console, clock = options.stderr(), Clock()
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(waiting, "BEAT", 0.001)
    lines, heard = [], waiting.threading.Event()

    def tell(line):
        lines.append(line)
        heard.set()

    monkeypatch.setattr(waiting, "_line", lambda console: tell)
    for what in (waiting.progress(console, 2), waiting.waiting(console, "loading the model")):
        heard.clear()
        with what:
            clock.now += 11
            assert heard.wait(60)
        assert "quantkv-beat" not in [thread.name for thread in waiting.threading.enumerate()]
    assert lines == ["0 of 2 steps: 11 s so far", "loading the model: 11 s so far"]


POLICIES = {"int4": Policy("int4"), "mixed": Policy("int8", {1: "trellis2"})}


@pytest.fixture
def loaded(model_dir):
    return models.load(str(model_dir))


def test_the_steps_of_an_evaluation_are_those_that_it_takes(loaded, text_file):
    contexts = text.cut(text.read_file(text_file), loaded.tokenizer, 100, 200)
    made, seen = [trials.TextTrial(contexts[0]), trials.Greedy(contexts[1][:-8], 9)], []
    evaluation.evaluate(loaded.model, made, POLICIES, on_step=lambda name, step: seen.append((step, name)))
    steps = costs.steps_of(made, POLICIES, readers.TeacherForced())
    assert [cost for _, cost in steps] == [100] * 3 + [92, 100, 100]
    assert seen == [*enumerate(kind.partition(",")[0] for kind, _ in steps), (len(steps), "")]


def test_through_the_cache_every_pass_is_a_step(loaded, text_file):
    contexts = text.cut(text.read_file(text_file), loaded.tokenizer, 100, 200)
    made, seen, read = [trials.TextTrial(contexts, 0, 3), trials.Greedy(contexts[:1, :-8], 4)], [], readers.ThroughCache(60)
    evaluation.evaluate(loaded.model, made, POLICIES, read=read, on_step=lambda name, step: seen.append((step, name)))
    steps = costs.steps_of(made, POLICIES, read)
    one = [60 * 2, 37 * 2, 1, 1, 1]  # two contexts side by side: two passes of their prompts, then a token of each
    assert [cost for _, cost in steps] == [200, *one, *one, 92, *[60, 32, 1, 1, 1] * 2]
    assert [kind for kind, _ in steps][:6] == ["exact", "int4", "int4", *["int4, decoding"] * 3]
    assert seen == [*enumerate(kind.partition(",")[0] for kind, _ in steps), (len(steps), "")]


def test_what_decoding_takes_is_tried_by_real_passes(loaded, monkeypatch):
    """By a clock that passes advance: 64 tokens in 8 s, or 2 s without a cache, and 3 s for each token after them."""
    clock, forward = Clock(), loaded.model.forward
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=clock))

    def passed(ids, **options):
        clock.now += (2.0 if options.get(CACHE) is None else 8.0) if ids.shape[1] > 1 else 3.0
        return forward(ids, **options)

    monkeypatch.setattr(loaded.model, "forward", passed)
    found = costs.beyond(loaded.model, POLICIES, readers.ThroughCache())
    assert found == {costs.CONTINUED: 0.0, **{k: v for name in POLICIES for k, v in ((name, 6 / 64), (f"{name}, decoding", 3.0))}}


def test_the_steps_of_tuning_are_gradients_and_layers(loaded, text_file):
    contexts = text.cut(text.read_file(text_file), loaded.tokenizer, 100, 200)
    seen = []
    sensitivities(loaded.model, contexts, ["int4", "int8"], Policy("none"), lambda *step: seen.append(step))
    names = ["gradients", "layer 0", "layer 1"] * 2
    assert [(name, step) for step, name in enumerate([*names, ""])] == seen


def test_what_formats_take_is_tried_on_a_few_rows(loaded, monkeypatch):
    """By a clock that a layer's rows advance: 64 tokens of two layers."""
    clock = Clock()
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=clock))
    tried = []

    def rows(fake, layer, key, value):
        assert key.shape == value.shape == (1, 64, 64)
        tried.append(fake.policy.name_of(layer))
        clock.now += {"int4": 0.125, "int8": 0.25, "trellis2": 64.0}[tried[-1]]

    monkeypatch.setattr(FakeQuantizedCache, "rows", rows)
    found = costs.beyond(loaded.model, POLICIES, readers.TeacherForced())
    assert found == {costs.CONTINUED: 0.0, "int4": 2 * 0.125 / 64, "mixed": (0.25 + 64) / 64}
    assert tried == ["int4", "int4", "int8", "int8", "trellis2", "trellis2"]  # each once to make tables, and once by the clock


def test_compilers_say_what_they_compile(monkeypatch):
    numba = pytest.importorskip("numba")
    seen = []
    monkeypatch.setattr(numba, "njit", lambda *given, **options: lambda function: seen.append(under_way.compiled_now()))
    compiling.compiled("signature")(test_compilers_say_what_they_compile)
    assert seen == ["test_compilers_say_what_they_compile by numba"] and under_way.compiled_now() is None


def test_a_kernels_first_launch_says_that_it_compiles():
    launch = pytest.importorskip("quantkv.implementations.triton.launch")
    seen = []

    class Kernel:
        __name__ = "attend_kernel"

        def __getitem__(self, grid):
            return lambda: seen.append((grid, under_way.compiled_now()))

    launch.Launch(Kernel(), (2,), {}, {}, ())()
    assert seen == [((2, 1, 1), "attend_kernel by Triton")] and under_way.compiled_now() is None


def test_the_wait_for_an_answer_ends_before_its_first_word(loaded):
    seen = []
    writer = generate.Writer(loaded.model, loaded.tokenizer, None, lambda text: seen.append("text"))
    writer.answer([40, 41, 42], 3, begins=lambda: seen.append("begins"))
    assert seen[0] == "begins" and seen.count("begins") == 1 and len(seen) > 1
