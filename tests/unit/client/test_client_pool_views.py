"""A gateway's views of its tenants are bounded: the least recently used goes first."""

from evenhand.client.pool_view import VIEWS_MAX, PoolView, PoolViews


def view(tenant: str) -> PoolView:
    return PoolView("p", tenant, "m", 16, "scheme", tenant, 1, "salt")


def test_views_are_bounded() -> None:
    views = PoolViews()
    for number in range(VIEWS_MAX):
        views.put(f"t{number}", view(f"t{number}"))
    assert views.get("t0") is not None, "and it is the latest used one from here on"
    for number in range(VIEWS_MAX, VIEWS_MAX + 10):
        views.put(f"t{number}", view(f"t{number}"))
    assert len(views._views) == VIEWS_MAX
    assert views.get("t0") is not None
    assert views.get("t1") is None


def test_a_view_of_another_generation_is_forgotten() -> None:
    views = PoolViews()
    views.put("a", view("a"))
    views.seen_generation("a", 1)
    assert views.get("a") is not None
    views.seen_generation("a", 2)
    assert views.get("a") is None
