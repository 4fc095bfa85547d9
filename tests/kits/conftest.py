"""Servers for SGLang's kits: `whole` keeps all tokens, `third` 0.3 of them; both are started once.

Pages of one token: `/server_info` says page_size 1, and the kits expect cache hits to the token.
Windows are small, so that prompts of a few hundred tokens seal several.
"""

from contextlib import ExitStack

import pytest

from tangram_sglang.cli.server import Server, cpu_arguments, cpu_environment
from tests.kits.model import save_tiny_model

WINDOWS = {
    "TANGRAM_PAGE": "1",
    "TANGRAM_SINKS": "1",
    "TANGRAM_WINDOW": "64",
    "TANGRAM_RECENT": "32",
}


def kit_server(folder, log, settings, *arguments, tokens=40_000) -> Server:
    """A server with grammars; `settings` are environment variables."""
    options = cpu_arguments(folder, "tangram")
    options[options.index("--max-total-tokens") + 1] = str(tokens)
    options[options.index("--grammar-backend") + 1] = "xgrammar"
    # models this small would fill an answer with spaces for ever
    options += ["--constrained-json-disable-any-whitespace", "--sleep-on-idle", *arguments]
    return Server(options, cpu_environment(settings), log)


@pytest.fixture(scope="package")
def tiny_folder(tmp_path_factory, smollm2):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), smollm2)


@pytest.fixture(scope="package")
def servers(tiny_folder, tmp_path_factory):
    """Both at once: each start keeps one core busy."""
    logs = tmp_path_factory.mktemp("kits")
    with ExitStack() as stack:
        started = []
        for retention in ("1.0", "0.3"):
            settings = {**WINDOWS, "TANGRAM_RETENTION": retention}
            server = kit_server(
                tiny_folder, logs / f"log-{retention}", settings, "--max-running-requests", "32"
            )
            started.append(stack.enter_context(server))
        for server in started:
            server.wait_until_ready()
        yield started


@pytest.fixture(scope="package")
def whole(servers):
    return servers[0]


@pytest.fixture(scope="package")
def third(servers):
    return servers[1]


@pytest.fixture(scope="package", params=["whole", "third"])
def either(request, servers):
    """Each of the two in turn."""
    return servers[("whole", "third").index(request.param)]
