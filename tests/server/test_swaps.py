"""Adapter swaps under eight streaming clients: no error, no cut stream, and the target's own outputs."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from service.core import Sampling, Unavailable
from service.evaluation.clients import Clients
from service.evaluation.server_process import LocalServer
from service.models.pair import load_model
from service.models.text import TextEncoder
from tests.support.oracle import naive
from tests.support.tiny_server import generate, in_process_server, prompts, register_adapters, tiny_server, write_pair


@pytest.mark.parametrize(
    ("make", "swaps", "checked"),
    [(in_process_server, 2, 3), pytest.param(tiny_server, 50, 25, marks=pytest.mark.nightly)],
    ids=["2", "50-process"],
)
@pytest.mark.promise(6)
def test_swaps_under_eight_streams_do_not_change_outputs(
    tmp_path: Path,
    make: Callable[[Path, tuple[Path, Path]], LocalServer],
    swaps: int,
    checked: int,
    figure: Callable[[str], None],
) -> None:
    pair = write_pair(tmp_path)
    server = make(tmp_path, pair)
    first, second = register_adapters(server, pair, 2)

    server.start()
    try:
        assert server.get("/adapters")["active"] == second.id, "the rows' active adapter serves after a start"
        endless = itertools.chain.from_iterable(prompts(200, seed) for seed in itertools.count())
        clients = Clients(server.url, endless, clients=8, max_tokens=48)
        try:
            for turn in range(swaps):
                wanted = (first, second)[turn % 2].id
                assert server.post(f"/adapters/{wanted}/activate")["active"] == wanted
        finally:
            clients.stop()
    finally:
        assert server.stop() == 0

    answers = clients.answers
    assert len(answers) >= 8
    figure(f"{swaps} swaps, {len(answers)} streams, none failed or cut")
    assert [answer.error for answer in answers if answer.error] == [], "no error, no cut stream"
    assert all(set(answer.adapters) <= {first.id, second.id} and answer.adapters for answer in answers)
    assert {version for answer in answers for version in answer.adapters} == {first.id, second.id}
    target = load_model(pair[0])
    encoder = TextEncoder(target.tokenizer)
    ends = frozenset(target.tokenizer.eos_token_ids)
    for answer in answers[:: max(1, len(answers) // checked)]:
        asked = encoder.encode_chat([{"role": "user", "content": answer.line.prompt}]).tokens
        assert answer.tokens == naive(target.model, asked, Sampling(max_tokens=48), ends)


@pytest.mark.promise(7)
def test_unknown_adapters_change_nothing(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    server = in_process_server(tmp_path, pair)
    server.start()
    try:
        assert server.post("/adapters/0/activate")["active"] == 0
        with pytest.raises(Unavailable, match="404"):
            server.post("/adapters/99/activate")
        assert generate(server, "abc")["timings"]["adapters"] == [0]
    finally:
        assert server.stop() == 0
