"""Pages, formats and sizes of the KV state."""

from __future__ import annotations

import pytest
import torch

from ds4.gguf.shape import FLASH, PRO
from ds4.model.cache import PAGE_ROWS, KVCache, RowPool, key_format, kv_format
from tests.helpers import SMALL, random_engine


def pool() -> RowPool:
    return RowPool([2, 4], {"rows": kv_format(SMALL, True), "keys": key_format(SMALL, True)})


def test_pages_are_counted_by_their_holders() -> None:
    p = pool()
    pages = [p.allocate() for _ in range(11)]
    assert len(set(pages)) == 11
    p.share(pages[:3])
    p.release(pages)
    assert p.used_pages == 3
    p.release(pages[:3])
    assert p.used_pages == 0
    assert p.allocate() in pages  # free pages come first


def test_a_page_that_others_hold_is_copied_before_it_changes() -> None:
    p = pool()
    page = p.allocate()
    p.planes(2, "rows")[0][page * PAGE_ROWS] = 7
    assert p.own(page) == page
    p.share([page])
    copy = p.own(page)
    assert copy != page
    assert p.used_pages == 2
    p.planes(2, "rows")[0][copy * PAGE_ROWS] = 9
    assert p.planes(2, "rows")[0][page * PAGE_ROWS].unique().item() == 7


def test_growing_keeps_what_is_stored() -> None:
    p = pool()
    first = p.allocate()
    for plane in p.planes(4, "keys"):
        plane[first * PAGE_ROWS : (first + 1) * PAGE_ROWS] = 3
    for _ in range(100):
        p.allocate()
    for plane in p.planes(4, "keys"):
        assert plane[first * PAGE_ROWS : (first + 1) * PAGE_ROWS].unique().item() == 3


@pytest.mark.parametrize("qat_sim", [True, False])
def test_rows_are_packed_exactly_when_the_round_trips_are_on(qat_sim: bool) -> None:
    cache = KVCache(FLASH, qat_sim)
    assert cache.row_format.row_bytes == (583 if qat_sim else 2048)
    assert cache.key_format.row_bytes == (68 if qat_sim else 512)
    assert (torch.float32 in cache.row_format.dtypes) is not qat_sim


def test_kv_bytes_per_token_of_the_published_models() -> None:
    for shape, expected in ((FLASH, 3509), (PRO, 5024)):
        cache = KVCache(shape, True)
        per_token = sum(p.page_bytes / PAGE_ROWS / ratio for ratio, p in cache.pools.items())
        assert round(per_token) == pytest.approx(expected, abs=1)


def test_a_checkpoint_of_flash_at_a_multiple_of_128_takes_3_6_mb() -> None:
    state = KVCache(FLASH, True).new_state()
    state.prepare(1280)
    state.advance(1280)
    assert state.checkpoint().nbytes / 1e6 == pytest.approx(3.6, abs=0.05)
    state.prepare(127)
    state.advance(127)
    assert 14 < state.checkpoint().nbytes / 1e6 < 18.5


def test_positions_that_the_rings_have_lost_are_refused() -> None:
    state = KVCache(SMALL, True).new_state()
    state.prepare(100)
    state.advance(100)
    with pytest.raises(ValueError, match="cannot cut a sequence of 100 tokens to 82"):
        state.truncate(82)
    with pytest.raises(ValueError, match="start at token 200"):
        state.import_state(_shifted(state, 200))


def _shifted(state, start: int):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(state.export(), start=start)


def test_a_checkpoint_a_few_tokens_back_is_the_one_taken_there() -> None:
    engine = random_engine()
    here, there = engine.session(), engine.session()
    ids = list(range(60))
    for n in (40, 47, 48, 55):
        here.sync(ids[:n])
        there.sync(ids[: n + 16])
        a, b = here.state.checkpoint(), there.state.checkpoint(length=n)
        assert a.length == b.length == n
        for x, y in zip([*a.window, *a.frontier.values()], [*b.window, *b.frontier.values()], strict=True):
            assert torch.equal(x, y)
    with pytest.raises(ValueError, match="no state of 30 tokens any more"):
        there.state.checkpoint(length=30)
