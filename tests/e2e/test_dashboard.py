"""A service shows its dashboard to who has a key, unless it was told to have none."""

import httpx

from service.automatic_key import read_key


def front_page(manta, **headers):
    return httpx.get(f"{manta.url}/ui/", headers=headers, timeout=30)


def test_service_has_a_dashboard_unless_it_was_told_otherwise(manta, on_postgres):
    shown = front_page(on_postgres, authorization=f"Bearer {read_key(on_postgres.home)}")
    assert (shown.status_code, "Manta" in shown.text) == (200, True)
    assert front_page(on_postgres).status_code == 401
    without = front_page(manta, authorization=f"Bearer {read_key(manta.home)}")
    assert (without.status_code, without.json()["code"]) == (404, "not_found")
