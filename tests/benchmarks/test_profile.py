"""Where the CPU time of a call goes."""

from benchmarks.profile import Profile, Sample


def test_the_time_of_a_library_counts_for_the_package_that_calls_it():
    """A package gets the share of its samples of the CPU time; what no package calls is the event loop's."""
    samples = [
        Sample("storage/redis/store.py", "Store.open", "storage/redis/store.py", 1),
        Sample("redis/connection.py", "Connection.pack", "storage/redis/store.py", 2),
        Sample("aiohttp/web_protocol.py", "RequestHandler.start", None, 1),
    ]
    profile = Profile(samples, 400, 0, 0)

    assert profile.us(lambda sample: sample.area) == {"storage/redis": 300, "event loop, HTTP of agents": 100}
