"""The scheduler: unit tests, and long random lives against a memory in plain dicts."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_paged.block_pool import BlockPool
from mlx_paged.scheduler import MAX_HELD, Schedule, Scheduler
from mlx_paged.sequence import Sequence
from tests.simulation import ROOTS, Simulation, random_request


def random_simulation(rng: random.Random) -> Simulation:
    """A small world, often too small for what is asked of it."""
    size = rng.choice([1, 1, 2, 3, 4, 4, 5, 8])
    most = rng.choice([1, 2, 3, 4, 6, 8])
    return Simulation(
        num_blocks=max(3, rng.choice([24, 40, 60, 120]) // size),
        block_size=size,
        max_batched_tokens=most + rng.choice([0, 0, 1, 2, 5, 20, 100]),
        max_num_seqs=most,
        prefix_caching=rng.random() < 0.85,
        token_reuse=rng.random() < 0.7,
        vocab=rng.choice([2, 3, 5, 50]),
    )


def act(rng: random.Random, sim: Simulation) -> bool:
    """One random action; whether it was a step."""
    dice = rng.random()
    running = sim.scheduler.running
    if dice < 0.2 and len(sim.living) < 24:
        prompt, count, width, root = random_request(rng, sim, 24)
        if sim.fits(len(prompt), count):
            sim.add(prompt, count, width, root)
    elif dice < 0.24 and running:
        sim.preempt(rng.choice(running))
    elif dice < 0.27 and sim.requests:
        sim.cancel(rng.choice(list(sim.requests)))
    elif dice < 0.29:
        sim.evict(rng.randint(1, 4))
    elif dice < 0.33 and forkable(sim):
        sim.fork(rng.choice(forkable(sim)))
    elif dice < 0.335:
        sim.pool.clear_cache()
    elif dice < 0.36:
        sim.step(fail=True)
    else:
        sim.step()
        return True
    return False


def forkable(sim: Simulation) -> list[Sequence]:
    """Decoding sequences, where there is room for one more."""
    running = sim.scheduler.running
    if sum(seq.width for seq in running) >= sim.scheduler.max_num_seqs:
        return []
    return [seq for seq in running if seq.width == 1 and seq.num_generated]


def test_20000_random_steps() -> None:
    rng = random.Random(20_000)
    steps = finished = preemptions = hits = partial = copies = 0
    while steps < 20_000:
        sim = random_simulation(rng)
        for _ in range(1000):
            steps += act(rng, sim)
            sim.check()
        sim.drain()
        finished += sim.finished
        preemptions += sim.scheduler.num_preemptions
        hits += sim.pool.stats.hit_blocks
        partial += sim.pool.stats.partial_hits
        copies += sim.copies
    # The run has seen what it is for.
    assert min(finished, preemptions, hits, partial, copies) > 500


class Lives(RuleBasedStateMachine):
    """Any order of actions, found and shortened by hypothesis."""

    @initialize(
        size=st.integers(1, 6),
        blocks=st.integers(2, 24),
        most=st.integers(1, 6),
        spare=st.sampled_from([0, 1, 3, 10, 100]),
        caching=st.sampled_from(["off", "blocks", "tokens", "tokens"]),
        vocab=st.sampled_from([2, 3, 50]),
    )
    def start(
        self, size: int, blocks: int, most: int, spare: int, caching: str, vocab: int
    ) -> None:
        self.sim = Simulation(
            num_blocks=blocks,
            block_size=size,
            max_batched_tokens=most + spare,
            max_num_seqs=most,
            prefix_caching=caching != "off",
            token_reuse=caching == "tokens",
            vocab=vocab,
        )

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        count=st.integers(1, 10),
        width=st.sampled_from([1, 1, 2, 4]),
        root=st.sampled_from([ROOTS[0], *ROOTS]),
    )
    def add(self, prompt: list[int], count: int, width: int, root: bytes) -> None:
        if width <= self.sim.scheduler.max_num_seqs and self.sim.fits(len(prompt), count):
            self.sim.add(prompt, count, width, root)

    @precondition(lambda self: self.sim.requests)
    @rule(data=st.data(), keep=st.integers(0, 24), count=st.integers(1, 6))
    def add_again(self, data: st.DataObject, keep: int, count: int) -> None:
        other = data.draw(st.sampled_from(list(self.sim.requests.values())))
        prompt = [*other.prompt[:keep], *([1] if keep % 2 else [])] or [0]
        if self.sim.fits(len(prompt), count):
            self.sim.add(prompt, count, 1, other.root)

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.sim.step()
            self.sim.check()

    @rule()
    def fail(self) -> None:
        self.sim.step(fail=True)

    @precondition(lambda self: self.sim.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.sim.preempt(data.draw(st.sampled_from(self.sim.scheduler.running)))

    @precondition(lambda self: bool(forkable(self.sim)))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.sim.fork(data.draw(st.sampled_from(forkable(self.sim))))

    @precondition(lambda self: self.sim.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.sim.cancel(data.draw(st.sampled_from(list(self.sim.requests))))

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        self.sim.evict(count)

    @rule()
    def clear_cache(self) -> None:
        self.sim.pool.clear_cache()

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.drain()


Lives.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestLives = Lives.TestCase


# One thing at a time


def make(
    num_blocks: int = 20, size: int = 4, tokens: int = 100, seqs: int = 8, **options: bool
) -> Simulation:
    return Simulation(
        num_blocks=num_blocks,
        block_size=size,
        max_batched_tokens=tokens,
        max_num_seqs=seqs,
        **options,
    )


def plan(sim: Simulation, **options: bool) -> dict[int, int]:
    """Do a step; tokens computed by request."""
    step = sim.step(**options)
    sim.check()
    return {seq.age[0]: n for seq, n in step.rows}


def test_decoding_rows_come_first_and_prompts_share_the_rest() -> None:
    sim = make(tokens=10, prefix_caching=False)
    sim.add([0] * 3, 9)
    assert plan(sim) == {0: 3}
    sim.add([1] * 16, 3)
    sim.add([2] * 3, 3)
    assert plan(sim) == {0: 1, 1: 9}
    assert plan(sim) == {0: 1, 1: 7, 2: 2}
    assert plan(sim) == {0: 1, 1: 1, 2: 1}


def test_a_budget_of_one_token_works() -> None:
    sim = make(tokens=1, seqs=1)
    sim.add([0, 1, 2], 2)
    sim.add([0, 1], 1)
    assert [plan(sim) for _ in range(5)] == [{0: 1}] * 4 + [{1: 1}]
    sim.drain()


def test_no_more_sequences_run_than_allowed() -> None:
    sim = make(seqs=4)
    for width, token in ((3, 0), (2, 1), (1, 2)):
        sim.add([token] * 5, 2, width)
    assert set(plan(sim)) == {0}  # the second is too wide, the third waits behind it
    assert len(sim.scheduler.running) == 3
    assert set(plan(sim)) == {0}
    assert set(plan(sim)) == {1, 2}
    sim.drain()


def test_a_request_wider_than_the_limit_is_refused() -> None:
    scheduler = Scheduler(BlockPool(4, 4), max_batched_tokens=8, max_num_seqs=2)
    with pytest.raises(
        ValueError, match=r"n, best_of and width must be at most max_num_seqs \(2\), got 3"
    ):
        scheduler.add(Sequence([1], ROOTS[0], (0, 0), width=3))
    assert scheduler.waiting == []


@pytest.mark.parametrize(
    ("tokens", "seqs", "name"),
    [(8, 0, "max_num_seqs"), (7, 8, "max_batched_tokens"), (0, 1, "max_batched_tokens")],
)
def test_limits_are_checked(tokens: int, seqs: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Scheduler(BlockPool(4, 4), max_batched_tokens=tokens, max_num_seqs=seqs)


# Requests that arrive together


def test_equal_prompts_in_one_step_are_computed_once() -> None:
    sim = make(num_blocks=40)
    for _ in range(5):
        sim.add([0, 1, 2, 0, 1, 2, 0, 1, 2, 0], 3)
    assert plan(sim) == {0: 10}
    assert plan(sim) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    assert sim.pool.stats.hit_blocks == 8
    assert sim.pool.stats.partial_hit_tokens == 4  # the tenth token is computed by each
    sim.drain()


def test_a_shared_prefix_is_waited_for_while_it_is_computed_in_chunks() -> None:
    sim = make(num_blocks=40, tokens=12)
    prefix = [0, 1, 2, 2] * 6
    sim.add([*prefix, 0], 2)
    sim.add([*prefix, 1, 1], 2)
    sim.add([2, 2, 2], 9)
    assert plan(sim) == {0: 12}
    assert plan(sim) == {0: 12}
    assert plan(sim) == {0: 1, 1: 2, 2: 3}  # full blocks can be found before the prompt's end
    sim.drain()


def test_who_shares_less_than_a_block_waits_only_for_token_reuse() -> None:
    for token_reuse in (True, False):
        sim = make(token_reuse=token_reuse)
        sim.add([0, 1, 2, 0], 2)
        sim.add([0, 1, 2, 1], 2)
        assert plan(sim) == ({0: 4} if token_reuse else {0: 4, 1: 4})
        sim.drain()


@pytest.mark.parametrize("reason", ["root", "off", "first token", "already cached"])
def test_nobody_waits_in_vain(reason: str) -> None:
    sim = make(prefix_caching=reason != "off")
    prompt = [0, 1, 2, 0, 1]
    if reason == "already cached":
        sim.add([*prompt, 0, 0], 1)
        sim.drain()
    sim.add(prompt, 2)
    other = [2, *prompt[1:]] if reason == "first token" else prompt
    sim.add(other, 2, 1, ROOTS[reason == "root"])
    assert len(plan(sim)) == 2
    sim.drain()


def test_many_held_requests_do_not_stop_others_for_ever() -> None:
    sim = make(num_blocks=200, seqs=100, tokens=100)
    for _ in range(MAX_HELD + 1):
        sim.add([0, 1, 2, 0], 1)
    sim.add([2, 2], 1)
    assert plan(sim) == {0: 4}  # nobody looks further than MAX_HELD
    assert len(plan(sim)) == MAX_HELD + 1
    sim.drain()


def test_requests_behind_held_ones_go_on() -> None:
    sim = make()
    for prompt in ([0, 1, 2, 0], [0, 1, 2, 0], [1, 1]):
        sim.add(prompt, 4)
    assert plan(sim) == {0: 4, 2: 2}
    assert plan(sim) == {0: 1, 1: 1, 2: 1}
    sim.drain()


# A full pool


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    sim = make(num_blocks=6, size=2, prefix_caching=False)
    for token in (0, 1, 2):
        sim.add([token] * 4, 5)
    sim.add([0], 1)
    assert plan(sim) == {0: 4, 1: 4, 2: 4}
    assert plan(sim) == {0: 1, 1: 1}  # both need a block; nobody new in the same step
    assert [seq.age[0] for seq in sim.scheduler.waiting] == [2, 3]
    assert plan(sim) == {0: 1, 1: 1}
    sim.drain()
    assert sim.finished == 4


def test_a_request_may_fill_the_pool_exactly() -> None:
    for size in (1, 4):
        sim = make(num_blocks=12 // size, size=size)
        sim.add([0, 1, 2, 0, 1, 2], 7)  # the last token's slot is never needed
        sim.add([0, 1, 2, 0, 1, 2], 7)
        assert not sim.fits(6, 8)
        while sim.living:
            sim.step()
            sim.check()
        assert sim.finished == 2


def test_samples_of_one_prompt_preempt_each_other_in_a_pool_for_one() -> None:
    sim = make(num_blocks=5, size=3, seqs=4)
    sim.add([0, 1, 2, 0, 1], 11, width=4)
    sim.drain()
    assert sim.finished == 1
    assert sim.scheduler.num_preemptions > 3


def test_a_request_preempted_before_its_first_token_keeps_its_samples() -> None:
    sim = make(tokens=4, seqs=4)
    sim.add([0, 1, 2, 0, 1, 2], 3, width=3)
    assert plan(sim) == {0: 4}
    sim.preempt(sim.scheduler.running[0])
    assert sim.scheduler.waiting[0].width == 3
    sim.drain()
    assert sim.finished == 1


def test_a_copy_may_read_a_block_that_is_handed_out_in_the_same_step() -> None:
    sim = make(num_blocks=3, size=4)
    sim.add([0, 1, 2], 1)
    sim.drain()
    assert sim.pool.num_cached == 1
    sim.add([0, 1, 1], 1)  # copies the cached block
    sim.add([2, 2, 2, 2, 2], 1)  # and this one needs every other block
    step = sim.step()
    assert [seq.age[0] for seq, _ in step.rows] == [1, 2]
    assert step.copies == [(0, 1)]
    assert sim.pool.stats.evictions == 1  # block 0
    sim.drain()


def test_a_part_of_a_block_is_left_alone_if_its_copy_does_not_fit() -> None:
    sim = make(num_blocks=2, size=4)
    sim.add([0, 1, 2, 0, 1], 1)
    sim.drain()
    sim.add([0, 1, 2, 1, 1], 4)  # needs both blocks, and one of them would be the source
    step = sim.step()
    assert step.copies == []
    sim.drain()


def test_without_a_token_the_sequence_starts_again() -> None:
    sim = make()
    sim.add([0, 1, 2], 3)
    sim.step()
    (seq,) = sim.scheduler.running
    token = seq.tokens.pop()  # as if the step had broken off before it was drawn
    sim.scheduler.abandon(Schedule())
    assert sim.scheduler.waiting == [seq]
    sim.requests[0].outputs[0].remove(token)
    sim.drain()
