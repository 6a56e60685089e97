"""Names are found by syntax as Python would find them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.releases.syntax import OUTSIDE, VALUE, Tree
from tests.unit.releases.packages import write

FILES = {
    "pack": """
        from pack.inner import Base as Exported
        from .inner import *
        from . import flags
        from typing import TYPE_CHECKING
        import torch

        if TYPE_CHECKING:
            from pack.other import late
        else:
            late = 1

        try:
            from fast import speed
        except ImportError:
            speed = None

        LIMIT: int = 3
        Other = Exported

        def build(first, /, second, *rest, third=3, **others): ...
    """,
    "pack.flags": "DEBUG = False",
    "pack.inner": """
        import functools
        from abc import ABC, abstractmethod
        from msgspec import Struct

        class Root(ABC):
            size: int

            def run(self, budget=1):
                self.state, (self.left, *self.rest) = 1, (2, 3)

            @abstractmethod
            def stop(self): ...

        class Base(Root):
            limit = 3

            def __init__(self) -> None:
                self.queue: list = []
                with open("x") as self.file:
                    self.register_buffer("scale", None)

            @staticmethod
            def add(parser): ...

            @classmethod
            def make(cls, config): ...

            @property
            def name(self): ...

            @name.setter
            def name(self, value): ...

            @functools.cached_property
            def metadata(self): ...

            if True:
                def late(self, x): ...

        class Message(Struct):
            text: str
    """,
}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(write(tmp_path, FILES))


@pytest.mark.parametrize(
    "target, kind, place",
    [
        ("pack:build", "function", "pack:build"),
        ("pack:LIMIT", VALUE, "pack:LIMIT"),
        ("pack:flags", "module", "pack.flags:"),
        ("pack:flags.DEBUG", VALUE, "pack.flags:DEBUG"),
        ("pack:Exported", "class", "pack.inner:Base"),
        ("pack:Other", "class", "pack.inner:Base"),
        ("pack:Base", "class", "pack.inner:Base"),
        ("pack:late", VALUE, "pack:late"),
        ("pack:speed", OUTSIDE, "fast:speed"),
        ("pack:torch.nn.Module", OUTSIDE, "torch:"),
        ("pack:Exported.run", "function", "pack.inner:Root.run"),
        ("pack:Exported.size", VALUE, "pack.inner:Root.size"),
        ("pack:Exported.limit", VALUE, "pack.inner:Base.limit"),
        ("pack:Exported.queue", VALUE, "pack.inner:Base.queue"),
        ("pack:Exported.file", VALUE, "pack.inner:Base.file"),
        ("pack:Exported.rest", VALUE, "pack.inner:Root.rest"),
        ("pack:Exported.scale", VALUE, "pack.inner:Base.scale"),
        ("pack:Exported.add", "staticmethod", "pack.inner:Base.add"),
        ("pack:Exported.make", "classmethod", "pack.inner:Base.make"),
        ("pack:Exported.name", "property", "pack.inner:Base.name"),
        ("pack:Exported.metadata", "cached_property", "pack.inner:Base.metadata"),
        ("pack:Exported.late", "function", "pack.inner:Base.late"),
        ("pack.inner:Message.text", VALUE, "pack.inner:Message.text"),
    ],
)
def test_a_name_is_found_where_it_is_defined(tree, target, kind, place):
    found = tree.find(target)
    assert (found.kind, found.target) == (kind, place)


@pytest.mark.parametrize(
    "target", ["pack:gone", "pack.gone:name", "pack:Exported.gone", "pack:gone.name"]
)
def test_a_name_that_is_gone_is_not_found(tree, target):
    assert tree.find(target) is None


def test_parameters_are_those_that_inspect_would_say(tree):
    signature = tree.find("pack:build").signature
    assert str(signature) == "(first, /, second, *rest, third=Ellipsis, **others)"


def test_abstract_methods_of_base_classes_are_found(tree):
    members = tree.members(tree.find("pack:Base"))
    assert {name for name, each in members.items() if each.is_abstract} == {"stop"}


def test_a_stand_in_is_found_in_place_of_a_name(tmp_path):
    folder = write(tmp_path, FILES)
    tree = Tree(folder, stand_ins={"pack:Exported": "pack.inner:Message"})
    assert tree.find("pack:Exported.text").target == "pack.inner:Message.text"


def test_comments_and_docstrings_are_no_code(tmp_path):
    files = {
        "one": "def f():\n    '''Old.'''\n    return 1  # old\n",
        "two": "def f():\n    '''New.'''\n    return 1\n",
        "three": "def f():\n    return 2\n",
    }
    tree = Tree(write(tmp_path, files))
    one, two, three = (tree.find(f"{name}:f").code for name in files)
    assert one == two != three
