"""The examples in the docstrings run and show what they say."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import hotcold.equations

MODULES = [m.name for m in pkgutil.iter_modules(hotcold.equations.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    result = doctest.testmod(importlib.import_module(f"hotcold.equations.{name}"))
    assert result.failed == 0
    assert result.attempted > 0 or name == "checks"


@pytest.mark.parametrize("name", hotcold.equations.__all__)
def test_every_public_equation_has_an_example(name):
    assert ">>>" in inspect.getdoc(getattr(hotcold.equations, name))
