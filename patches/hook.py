"""What a hook on SGLang is, and the check that its target still is what the hook was written for."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tangram_sglang.errors import TangramError

VERSIONS = ("0.5.23",)


@dataclass(frozen=True, slots=True)
class Hook:
    """An AROUND hook; ``wrapper(original, *args, **kwargs)`` must defer unless tangram serves.

    Attributes:
        target: dotted path of a function or method.
        parameters: names of its parameters, in order, without ``self``.
        wrapper: what runs in its place.
        reason: why no registry of SGLang serves.
    """

    target: str
    parameters: tuple[str, ...]
    wrapper: Callable[..., Any]
    reason: str


def resolve(target: str) -> Any:
    """The object a dotted path names; AttributeError or ImportError if it is gone."""
    module, attributes = target, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            if not module:
                raise
            attributes.insert(0, last)
    for name in attributes:
        found = getattr(found, name)
    return found


def check_signature(hook: Hook) -> None:
    """Raise TangramError, naming the target, if its signature is not the known one."""
    try:
        parameters = tuple(inspect.signature(inspect.unwrap(resolve(hook.target))).parameters)
    except (ImportError, AttributeError) as error:
        raise _unknown(hook, f"is gone ({error})") from None
    names = tuple(name for name in parameters if name != "self")
    if names != hook.parameters:
        raise _unknown(hook, f"takes {names}, expected {hook.parameters}")


def check_applied(hook: Hook) -> None:
    """Raise TangramError, naming the target, if SGLang did not put the hook in place."""
    if inspect.unwrap(resolve(hook.target)) is resolve(hook.target):
        raise TangramError(
            f"tangram's hook on {hook.target} is not in place; SGLang logged why when it loaded "
            "plugins. Refusing to serve without it"
        )


def selected() -> bool:
    """Whether this process serves with the tangram backend."""
    from sglang.srt.runtime_context import attention_backends

    return "tangram" in attention_backends()


def _unknown(hook: Hook, what: str) -> TangramError:
    from sglang.version import __version__

    return TangramError(
        f"{hook.target} {what}; this is SGLang {__version__}, tangram knows {VERSIONS}: install "
        "one of these or a newer tangram_sglang"
    )
