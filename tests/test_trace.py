"""The tool that times the engine's thread still finds what it times, and groups turns by what they did."""

from tests.trace import ALSO, CALLS, Turn, table


def test_every_call_that_is_timed_is_there() -> None:
    assert all(callable(getattr(owner, name)) for owner, name in CALLS)
    assert set(ALSO) <= {name for _, name in CALLS}


def test_turns_are_grouped_by_what_they_did() -> None:
    steady = [
        Turn(0.0, wall, 5.0, 4, 8, ["ahead 3", "read 3"], {"Runner.launch_after": (1, wall / 2)})
        for wall in (6.0, 10.0)
    ]
    joined = Turn(0.0, 24.0, 20.0, 4, 2, ["read 3"], {"Decoder.prefill": (1, 9.0), "prefill": (1, 9.0)})
    first, *kinds = table([*steady, joined])
    assert first == "3 turns, 0.04 s, 18 tokens"
    assert kinds == [
        "read 3, prefill: 1 turns, 60.0%, median 24.0 ms, mean 24.0, 20.0 of the processor, 2.0 tokens; Decoder.prefill 9.0",
        "ahead 3, read 3: 2 turns, 40.0%, median 8.0 ms, mean 8.0, 5.0 of the processor, 8.0 tokens; Runner.launch_after 4.0",
    ]
