"""Hooks on SGLang: known signatures, named failures, and nothing where tangram does not serve."""

import dataclasses

import pytest

from tangram_sglang.errors import TangramError
from tangram_sglang.patches.hook import check_applied, check_signature
from tangram_sglang.patches.hooks import HOOKS


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rsplit(".", 1)[1])
def test_the_installed_sglang_has_the_signature_the_hook_was_written_for(hook):
    check_signature(hook)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rsplit(".", 1)[1])
def test_a_target_that_changed_is_named(hook):
    with pytest.raises(TangramError, match=hook.target.rsplit(".", 1)[1]):
        check_signature(dataclasses.replace(hook, parameters=("something", "else")))
    with pytest.raises(TangramError, match="is gone"):
        check_signature(dataclasses.replace(hook, target=hook.target + "_renamed"))


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rsplit(".", 1)[1])
def test_a_hook_that_sglang_did_not_apply_is_named(hook):
    """This process has loaded no plugins, so none is in place."""
    with pytest.raises(TangramError, match=hook.target.rsplit(".", 1)[1]):
        check_applied(hook)
