"""The dashboard without a browser: its page holds together, needs nothing from elsewhere, and its state is true."""

import re
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import httpx
import pytest

from hisparse.checkpoint import Loaded
from hisparse.server.dashboard.pages import PARTS
from tests.server.serving import MODEL, PATIENCE_S, Served, SlowEngine, wait_until

FOLDER = files("hisparse.server.dashboard")
SCRIPTS = [name for name, kind in PARTS.values() if kind == "text/javascript"]
EMPTY = {"meta", "link", "line", "br"}  # elements without an end
LATENCIES = ("ttft", "tpot")


def text_of(name: str) -> str:
    return FOLDER.joinpath(name).read_text("utf-8")


class Page(HTMLParser):
    """Reads a page, and fails where an element is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in EMPTY:
            self.open.append(tag)
        self.attributes += attributes
        self.ids += [value for name, value in attributes if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(text_of("index.html"))


def test_the_page_is_well_formed(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    named = {value for name, value in page.attributes if name == "aria-labelledby"}
    assert named <= set(page.ids)


def test_every_element_that_scripts_use_is_there(page: Page) -> None:
    used: set[str] = set()
    for script in map(text_of, SCRIPTS):
        used |= set(re.findall(r'(?:element|setText|getElementById)\("([\w-]+)"', script))
        used |= set(re.findall(r'\bid: "([\w-]+)"', script))
        used |= {name + rest for rest in re.findall(r"`\$\{name\}(-\w+)`", script) for name in LATENCIES}
    assert {"throughput", "heat", "ttft-aside", "tpot-chart", "banner"} <= used
    assert used <= set(page.ids)


def test_styles_and_scripts_agree_on_classes() -> None:
    style = text_of("dashboard.css")
    made = {name for script in map(text_of, SCRIPTS) for name in re.findall(r'make\("\w+", "([\w-]+)"', script)}
    assert made
    for name in made - {"title", "amount", "bytes"}:  # which look like what is around them
        assert f".{name}" in style, name


def test_scripts_import_what_is_exported() -> None:
    for script in map(text_of, SCRIPTS):
        for names, source in re.findall(r'import \{ ([^}]+) \} from "\./([\w.]+)"', script):
            for name in names.split(", "):
                assert re.search(rf"export (?:const|function) {name}\b", text_of(source)), (name, source)


def test_nothing_comes_from_elsewhere(page: Page) -> None:
    for name, _ in PARTS.values():
        addresses = set(
            re.findall(r"\b(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", re.sub(r"(?m)^\s*//.*", "", text_of(name)))
        )
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
    for name, value in page.attributes:
        assert name != "style"
        assert not name.startswith("on")
        if name in ("src", "href"):
            assert value in ("data:,", "metrics") or f"/{value}" in PARTS, value


def test_parts_are_served_with_a_policy_that_forbids_everything_else(served: Served) -> None:
    for path, (name, kind) in PARTS.items():
        response = served.get(path)
        assert response.status_code == 200
        assert response.text == text_of(name)
        assert response.headers["content-type"].startswith(kind)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    assert served.get("/dashboard/other.js").status_code == 404


def state_of(served: Served) -> dict[str, Any]:
    response = served.get("/dashboard/state")
    assert response.headers["cache-control"] == "no-store"
    state: dict[str, Any] = response.json()
    return state


def body(**values: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x" * 200, "temperature": 0, "max_tokens": 40} | values


def test_the_state_of_an_idle_server(served: Served) -> None:
    state = state_of(served)
    assert state["model"] == MODEL
    assert state["refusal"] is None
    assert [state[name] for name in ("unfinished", "running", "waiting", "retracted", "retractions")] == [0] * 5
    assert (state["ttft"], state["tpot"], state["ended"], state["output_tokens"]) == (None, None, {}, 0)


def test_the_state_follows_what_happens(served: Served) -> None:
    slow = SlowEngine(served.loop.engine, seconds=0.02)
    with ThreadPoolExecutor(5) as threads:
        answers = [threads.submit(served.post, "/v1/completions", body()) for _ in range(5)]
        wait_until(lambda: state_of(served)["running"] == 3 and state_of(served)["waiting"] == 2, "the load")
        wait_until(lambda: state_of(served)["output_tokens"] > 10, "tokens of answers that have not ended")
        state = state_of(served)
        assert state["unfinished"] == 5
        assert state["pools"]["reservations"] == {"used": 3, "size": 3}
        slow.seconds = 0
        assert {answer.result().status_code for answer in answers} == {200}
    wait_until(lambda: state_of(served)["running"] == 0, "the end")
    state = state_of(served)
    assert (state["output_tokens"], state["prompt_tokens"], state["ended"]) == (200, 1000, {"length": 5})
    for name in LATENCIES:
        assert state[name]["count"] == 5
        assert 0 < state[name]["p50"] <= state[name]["p90"]
    layout = served.loop.engine.runner.cache.layout
    assert state["pool_bytes"] == {"device_slots": layout.slots_bytes, "host_pages": layout.host_bytes}
    assert set(state["pool_bytes"]) < set(state["pools"])
    assert len(state["hits"]) == len(state["misses"]) == layout.num_layers
    assert all(count > 0 for count in (*state["hits"], *state["misses"]))


def test_the_state_says_that_the_server_is_ending(served: Served) -> None:
    served.loop.begin_stop(timeout_s=0)
    assert "shutting down" in state_of(served)["refusal"]


@pytest.fixture
def keyed(loaded: Loaded) -> Iterator[Served]:
    served = Served(loaded, api_key="sésame: x")
    yield served
    served.stop()


def basic(password: str, name: str = "me") -> str:
    return f"Basic {b64encode(f'{name}:{password}'.encode()).decode()}"


def test_the_key_guards_every_part(keyed: Served) -> None:
    right = (basic("sésame: x"), basic("sésame: x", name=""), "Bearer sésame: x".encode())
    wrong = (
        None,
        basic("sésame"),
        basic(""),
        "Basic",
        "Basic ???",
        "Basic bm8=",
        "Bearer",
        "Bearer wrong",
        "sésame: x".encode(),
    )
    with httpx.Client(base_url=keyed.url, timeout=PATIENCE_S) as client:
        for path in (*PARTS, "/dashboard/state"):
            for given, status in (*((one, 200) for one in right), *((one, 401) for one in wrong)):
                headers: Any = {} if given is None else {"Authorization": given}
                response = client.get(path, headers=headers)
                assert response.status_code == status, (path, given)
                assert response.headers.get("www-authenticate", "").startswith("Basic realm=" if status == 401 else "")


def test_what_a_browser_sends_unasked_starts_nothing(keyed: Served) -> None:
    refused = keyed.post("/v1/completions", body(), headers={"Authorization": basic("sésame: x")})
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
